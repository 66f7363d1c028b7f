"""The commands: what they are called, what they take, and what their help says."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from rockmate import __version__
from rockmate.budget import parse_budget
from rockmate.cli import answers
from rockmate.cli.answers import Answer
from rockmate.cli.errors import MISUSE, Misuse, kind_of
from rockmate.cli.load import Target, load
from rockmate.cli.options import AUTOCAST, COMPILE, COSTS, FILE, LOSS, answering, numbers, options_of, writable

HELP = """Train a PyTorch model within a memory budget: see what a plan takes.

Commands are given FILE:FUNCTION. The function takes no arguments. It returns
the model, and a sample that the model is called with as in a training step:

\b
  # model.py
  import torch
\b
  def make():
      model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())
      return model, torch.randn(4096, 64)
\b
  $ rockmate check model.py:make
  $ rockmate plan model.py:make --budget "60%"

The sample is a tensor, a tuple of positional arguments, or a dict of keyword
arguments. A third value is a dict of keyword arguments beside a tuple. Instead
of FILE, package.module will do.
"""

EPILOG = """\b
Exit codes:
  0  fine
  1  the model is not supported, or no plan fits the budget
  2  misuse: what was given cannot be used
  3  Rockmate itself failed
"""


class _Ordered(click.Group):
    """Commands in the order in which they are needed, not that of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Ordered, help=HELP, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rockmate", message="%(prog)s %(version)s")
def cli() -> None:
    """The command ``rockmate``."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code. ``arguments``: by default those of the process."""
    try:
        result = cli.main(arguments, prog_name="rockmate", standalone_mode=False)
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            # What may be meant: not what has little but the dashes in common with it.
            name, there = error.option_name.lstrip("-"), error.possibilities or []
            alike = [option for option in there if get_close_matches(name, [option.lstrip("-")])]
            error = click.NoSuchOption(error.option_name, possibilities=alike, ctx=error.ctx)
        if "unexpected extra argument" in error.message:
            hint = 'put what has spaces in quotes, such as --budget "8 GiB"'
            error = click.UsageError(f"{error.message}: {hint}.", getattr(error, "ctx", None))
        if _as_json(arguments):
            click.echo(json.dumps({"error": {"type": kind_of(error), "message": error.format_message()}}))
        error.show()
        return error.exit_code
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.Abort:
        if _as_json(arguments):
            click.echo(json.dumps({"error": {"type": "KeyboardInterrupt", "message": "Interrupted."}}))
        click.echo("Interrupted.", err=True)
        return 130
    except BrokenPipeError:
        raise  # whoever reads has seen enough
    except OSError as error:
        Misuse(f"the answer cannot be written to the standard output: {error.strerror}").show()
        return MISUSE
    return result if isinstance(result, int) else 0


def _as_json(arguments: list[str] | None) -> bool:
    return "--json" in (sys.argv if arguments is None else arguments)


# ----------------------------------------------------------------------------------------------- commands


@cli.command()
@answering(COSTS, AUTOCAST, COMPILE, LOSS)
def check(target: Target, **options: Any) -> Answer:
    """Is my model supported, and what would I gain?

    Prints what a step takes without a plan, the smallest budget, and what budgets in between cost in time. If the model
    is not supported, prints why, and what to do.

    \b
    Example: rockmate check model.py:make
    """
    made = options_of(**options)
    return answers.check(load(target), made)


@cli.command()
@answering(
    click.option("--budget", required=True, help='"8 GiB", bytes, "60%" of eager\'s peak, or "auto".'),
    click.option("--save", type=FILE, metavar="FILE", callback=writable, help="Write the plan as JSON."),
    click.option("--program", is_flag=True, help="Print also every step, with its memory and your source line."),
    click.option("--solver", default="auto", show_default=True, help="The name of a solver."),
    click.option("--time-limit", type=float, metavar="SECONDS", help="End the search with the best plan so far."),
    COSTS,
    AUTOCAST,
    COMPILE,
    LOSS,
)
def plan(target: Target, budget: str, save: Path | None, program: bool, **options: Any) -> Answer:
    """Print the plan for a budget.

    \b
    Example: rockmate plan model.py:make --budget "8 GiB" --save plan.json
    In a script: rockmate.Rockmate(model, sample, plan="plan.json")
    """
    parse_budget(budget)  # the model may take long to build
    made = options_of(**options)
    return answers.plan(load(target), budget, made, save, program)


@cli.command()
@answering(
    click.option("--plot", type=FILE, metavar="FILE", callback=writable, help="Draw the curve: .png, .pdf, .svg."),
    COSTS,
    AUTOCAST,
    COMPILE,
    LOSS,
)
def frontier(target: Target, plot: Path | None, **options: Any) -> Answer:
    """Print what budgets cost in time; draw the curve.

    The plot shows beside it what the usual ways to checkpoint take, such as one checkpoint per block.

    \b
    Example: rockmate frontier model.py:make --plot frontier.png
    """
    made = options_of(**options)
    if plot is not None:
        answers.check_plot(plot)
    return answers.frontier(load(target), made, plot)


@cli.command(short_help="What larger batches, lengths or images take.")
@answering(
    click.option("--sizes", required=True, callback=numbers, metavar="N,N,…", help="Batches, lengths, or image sizes."),
    click.option(
        "--dim", default="0", show_default=True, callback=numbers, metavar="D,…", help="Which dimensions grow."
    ),
    click.argument("more_sizes", nargs=-1, type=int, metavar=""),  # as in --sizes 8 16 32
    click.option("--budget", help='"24 GiB", or bytes: say which sizes fit, and the largest that does.'),
    AUTOCAST,
    LOSS,
)
def estimate(
    target: Target,
    sizes: tuple[int, ...],
    more_sizes: tuple[int, ...],
    dim: tuple[int, ...],
    budget: str | None,
    **options: Any,
) -> Answer:
    """What larger batches, lengths or images take; none of them is run.

    The sample is small: it runs, at up to four times its size. --dim is the number of the dimension of its tensors that
    grows: 0 for batches, 1 for lengths of (batch, length, …), 2,3 for square images.

    \b
    Example: rockmate estimate model.py:make --sizes 32,64,128 --budget "24 GiB"
    """
    made = options_of("flops", **options)
    if budget is not None:
        parse_budget(budget)
    return answers.estimate(load(target), (*sizes, *more_sizes), dim, budget, made)


@cli.command()
@answering(
    click.option(
        "--format", "form", type=click.Choice(["pdf", "png", "svg", "text"]), default="svg", show_default=True
    ),
    click.option(
        "--out",
        type=click.Path(file_okay=False, path_type=Path),
        default="graphs",
        show_default=True,
        metavar="DIR",
        help="The folder to write to.",
    ),
    click.option("--block", type=int, metavar="N", help="Draw also block N of the chain in K on its own."),
    COSTS,
)
def graphs(target: Target, form: str, out: Path, block: int | None, costs: str) -> Answer:
    """Write the graphs of the model as pictures or text.

    B is the trace, D the data flow, S the simplified graph, K the graph with backward and costs; of a large K the chain
    of its blocks is drawn. Pictures need Graphviz.

    \b
    Example: rockmate graphs model.py:make --format pdf --out graphs
    """
    if form != "text" and shutil.which("dot") is None:
        raise Misuse(
            f"--format {form} needs the program dot, which is not installed: install Graphviz (for example: apt "
            "install graphviz), or take --format text"
        )

    if form == "text" and block is not None:
        raise Misuse("--block is drawn, not written: leave out --format text")
    return answers.graphs(load(target), form, out, block, costs)


@cli.command(
    short_help="Train a small GPT, plainly and under budgets.",
    context_settings={"ignore_unknown_options": True},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> None:
    """Train a small GPT on real text, plainly and under budgets, and compare.

    The same as python -m rockmate.demo; "rockmate demo --help" lists its options.
    """
    sys.argv = ["rockmate demo", *arguments]
    runpy.run_module("rockmate.demo", run_name="__main__", alter_sys=True)
