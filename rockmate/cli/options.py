"""What commands have in common: options, and how an answer or an error ends the command."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from rockmate.cli.answers import Answer, Options
from rockmate.cli.errors import DEFECT, told
from rockmate.cli.load import target_of
from rockmate.planning import options
from rockmate.progress import Progress

TARGET = click.argument("target", metavar="FILE:FUNCTION")
COSTS = click.option(
    "--costs",
    type=click.Choice(["measured", "flops"]),
    default="measured",
    show_default=True,
    help="Time every operation, or model the times: the same plan on every run.",
)
TYPES = {"bf16": "bfloat16", "fp16": "float16"}
AUTOCAST = click.option(
    "--autocast",
    type=click.Choice([*TYPES.values(), *TYPES]),
    callback=lambda context, parameter, name: TYPES.get(name, name),
    help="Plan for torch.autocast with this type.",
)
COMPILE = click.option("--compile", is_flag=True, help="Plan for compiled kernels, as with compile=True in a script.")
LOSS = click.option("--loss-memory", metavar="BYTES", help='What the loss allocates, such as "200 MiB".')
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object; all else goes to standard error.")
TRACE = click.option("--traceback", "trace", is_flag=True, help="Show the whole traceback of an error.")


def answering(*options: Callable[..., Any]) -> Callable[[Callable[..., Answer]], Callable[..., int]]:
    """A command with these options, whose function is given the ``Target`` and returns the answer."""

    def decorate(function: Callable[..., Answer]) -> Callable[..., int]:
        @functools.wraps(function)
        def command(trace: bool, as_json: bool, target: str, **given: Any) -> int:
            with Progress(instead=f"rockmate {function.__name__}: planning takes some time"):
                return _run(lambda: function(target_of(target), **given), as_json, trace)

        for option in reversed((TARGET, *options, JSON, TRACE)):
            command = option(command)
        return command

    return decorate


def _run(work: Callable[[], Answer], as_json: bool, trace: bool) -> int:
    """Print the answer; the exit code. Raises ``click.ClickException`` for errors that are not Rockmate's."""
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(), _quiet():
            answer = work()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and has an exit code
        found = told(error)
        if trace or found is None:
            traceback.print_exception(error)
        if found is None:
            click.echo("This is no mistake of yours: please report it, with the lines above.", err=True)
            return DEFECT
        raise found from found.__cause__
    click.echo(json.dumps(answer.values, indent=2) if as_json else answer.text)
    return answer.code


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Warnings are one line each; what TorchDynamo cannot capture, and that there is a plan, is in the answer."""
    loud, names = logging.CRITICAL, ("torch._dynamo", "torch._subclasses.fake_tensor", "rockmate")
    levels = dict(zip(map(logging.getLogger, names), (loud, loud, logging.WARNING), strict=True))
    before = {logger: logger.level for logger in levels}
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: click.echo(f"Warning: {message}", err=True)
        try:
            for logger, level in levels.items():
                logger.setLevel(level)
            yield
        finally:
            for logger, level in before.items():
                logger.setLevel(level)


def options_of(costs: str, autocast: str | None, loss_memory: str | None, **more: Any) -> Options:
    """How to plan. Raises ``InputError`` for what cannot be used, before a model is built."""
    arguments = {"costs": costs, "loss_memory": loss_memory, **more}
    options.options_of(**arguments)
    return Options(arguments, autocast)


def writable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse what cannot be written before anything is planned for minutes."""
    if path is not None and not path.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.absolute().parent}: make it first")
    return path


FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


def numbers(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """Whole numbers with commas or spaces between them."""
    words = re.split(r"[,\s]+", text.strip())
    if not all(re.fullmatch(r"-?\d+", word) for word in words):
        raise click.BadParameter(f"{text!r} is no list of whole numbers: give them with commas, such as 8,16,32")
    return tuple(map(int, words))
