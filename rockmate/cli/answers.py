"""What commands answer: text for people, and values for JSON. Memory is in bytes, overheads are fractions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import rkgb
import rockmate
from rkgb.errors import GraphError
from rockmate import Plan, Rockmate, RockmateError
from rockmate.budget import show_at_least, show_bytes
from rockmate.cli.errors import UNSUPPORTED, Misuse, Unsupported, kind_of, told
from rockmate.cli.load import Given
from rockmate.errors import InputError
from rockmate.follow.plan import FollowedPlan
from rockmate.planning.checks import checked_call
from rockmate.planning.least import least_share
from rockmate.planning.options import PlanOptions
from rockmate.planning.prepare import make_planner
from rockmate.planning.report import block_choices, facts_of_call, text_of_facts
from rockmate.progress import Progress
from rockmate.tell import be_silent
from solvers import Frontier

CHEAP = 0.1
"""What a step may take longer at most at the budget that ``check`` suggests, if there is such a budget."""


class Answer(NamedTuple):
    """``text`` is printed, or ``values`` as JSON; ``code`` is the exit code."""

    text: str
    values: dict[str, Any]
    code: int = 0


@dataclass(frozen=True)
class Options:
    """How plans are made: ``arguments`` of ``rockmate.attach``, and the type of autocast ("bfloat16"), or None."""

    arguments: dict[str, Any]
    autocast: str | None

    def precision(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Autocast as asked for, on the device of the model."""
        if self.autocast is None:
            return contextlib.nullcontext()
        device = next((p.device.type for p in model.parameters()), "cpu")
        return torch.autocast(device, dtype=getattr(torch, self.autocast))


def planned(given: Given, budget: str, options: Options) -> Rockmate:
    """The model under the plan for ``budget``. Raises what ``Rockmate`` raises."""
    be_silent()
    with options.precision(given.model):
        return Rockmate(given.model, given.sample, budget, sample_kwargs=given.sample_kwargs, **options.arguments)


# ------------------------------------------------------------------------------------------------- check


def check(given: Given, options: Options) -> Answer:
    try:
        found = planned(given, "100%", options)
        curve = found.frontier()
    except InputError:
        raise
    except (GraphError, RockmateError) as error:
        refused = told(error)
        assert isinstance(refused, Unsupported)
        text = text_of_facts([*_subject(given), ("supported", "no")])
        said = {"type": kind_of(refused), "message": refused.message}
        values = {**_values(given), "supported": False, "error": said}
        return Answer(f"{text}\n\n{said['type']}: {said['message']}", values, UNSUPPORTED)
    followed = isinstance(found.plan, FollowedPlan)
    supported = f"yes, followed operation by operation ({found.reason})" if followed else "yes"
    facts = [*_subject(given), *facts_of_call(found.plan.call), ("supported", supported)]
    eager, room = show_bytes(found.plan.eager_peak), show_bytes(curve.max_budget)
    facts.append(("eager's peak", eager if eager == room else f"{eager}; with room for a larger loss {room}"))
    share = least_share(curve.min_budget, curve.max_budget)
    facts.append(("smallest budget", f'{show_at_least(curve.min_budget)}, "{share}" of eager\'s peak'))
    facts.append(("not counted", "parameters and the optimizer's state"))
    values = {
        **_values(given),
        "supported": True,
        "error": None,
        "calls": [list(found.plan.call)],
        "eager_peak": found.plan.eager_peak,
        "min_budget": curve.min_budget,
        "max_budget": curve.max_budget,
        "points": [{"budget": b, "share": share, "overhead": o} for b, share, o in curve.table()],
        "memory": dataclasses.asdict(memory := found.memory()),
    }
    gain = _gain(given, options, found.plan.eager_peak, curve)
    return Answer(f"{text_of_facts(facts)}\n\n{curve}\n\n{memory}\n\n{gain}", values)


def _gain(given: Given, options: Options, eager_peak: int, curve: Frontier) -> str:
    """What to do next: the smallest budget that is cheap, or else the cheapest one."""
    rows = [row for row in curve.table() if row[0] < min(eager_peak, curve.max_budget)]
    if not rows and curve.min_budget < curve.max_budget and eager_peak < curve.max_budget:
        return (
            f"These budgets leave {show_bytes(curve.max_budget - eager_peak)} more for the loss than it usually takes, "
            "as no step has shown yet what it takes.\n"
            f"So even the least of them is more than the {show_bytes(eager_peak)} of a usual step without "
            "recomputation. To see what smaller ones cost:\n"
            'handle = rockmate.attach(model, "100%"), train one step, then print(handle.frontier())'
        )
    if not rows:
        return "There is nothing to gain: no plan takes less memory than the step without recomputation."
    cheap = [row for row in rows if row[2] <= CHEAP]
    budget, share, overhead = min(cheap) if cheap else min(rows, key=lambda row: (row[2], row[0]))
    whole = abs(100 * share - round(100 * share)) < 1e-9
    text = f"{round(100 * share)}%" if whole else show_at_least(budget)
    more = f" --autocast {options.autocast}" if options.autocast else ""
    more, argument = (f"{more} --compile", ", compile=True") if options.arguments["compile"] else (more, "")
    return (
        f"With {100 * share:.0f} % of the memory, a step takes {100 * overhead:.1f} % longer.\n"
        f'In your script: rockmate.attach(model, "{text}"{argument})\n'
        f'The plan:       rockmate plan {given.target} --budget "{text}"{more}'
    )


# ------------------------------------------------------------------------------------- plans and frontiers


def plan(given: Given, budget: str, options: Options, save: Path | None, program: bool) -> Answer:
    found = planned(given, budget, options)
    made = found.plan
    text, values = str(made), {**_values(given), **_values_of_plan(made)}
    if save is not None:
        if not isinstance(made, Plan):
            why = f"the model is not captured as one graph ({found.reason}), and each process finds its plan itself"
            raise Misuse(f"the plan was not saved: {why}")
        made.save(save)
        more = ", compile=True" if options.arguments["compile"] else ""
        text += f"\n\nsaved in {save}: rockmate.Rockmate(model, sample, plan={str(save)!r}{more})"
        values["saved"] = str(save)
    if program:
        text += f"\n\n{made.program()}"
        values["program"] = made.program()
    return Answer(text, values)


def frontier(given: Given, options: Options, plot: Path | None) -> Answer:
    curve = planned(given, "100%", options).frontier()
    text = str(curve)
    values = {
        **_values(given),
        "min_budget": curve.min_budget,
        "max_budget": curve.max_budget,
        "points": [{"budget": budget, "overhead": overhead} for budget, overhead in curve.points],
        "baselines": [found._asdict() for found in curve.baselines],
    }
    if plot is not None:
        curve.plot(plot)
        text += f"\n\nplotted in {plot}"
        values["plot"] = str(plot)
    return Answer(text, values)


def check_plot(path: Path) -> None:
    """Raise ``Misuse`` where no plot could be written, before anything is planned."""
    from solvers.figures import new_figure

    try:
        kinds = new_figure()[0].canvas.get_supported_filetypes()
    except ImportError as error:
        raise Misuse(str(error)) from error
    if path.suffix[1:].lower() not in kinds:
        raise Misuse(f"--plot {path}: give a file that ends in {', '.join(f'.{kind}' for kind in sorted(kinds))}")


# --------------------------------------------------------------------------------------- estimate, graphs


def estimate(given: Given, sizes: Sequence[int], dims: tuple[int, ...], budget: str | None, options: Options) -> Answer:
    kwargs, room = given.sample_kwargs, options.arguments["loss_memory"]
    try:
        with options.precision(given.model):
            found = rockmate.estimate(
                given.model, given.sample, sizes, budget, dim=dims, sample_kwargs=kwargs, loss_memory=room
            )
    except InputError as error:
        raise Misuse(str(error).replace("dim= ", "--dim ")) from error
    return Answer(str(found), {**_values(given), "dim": list(dims), **dataclasses.asdict(found)})


def graphs(given: Given, form: str, folder: Path, block: int | None, costs: str) -> Answer:
    with Progress() as report:
        call = checked_call(given.model, given.sample, given.sample_kwargs)
        made = make_planner(given.model, call, PlanOptions(costs), report).graphs
    name = type(given.model).__name__
    try:
        paths = rkgb.print_all_graphs(made, name, render_format=form, directory=folder)
        if block is not None:
            paths.append(rkgb.print_graph(made.K, f"{name}_K_block{block}", False, form, folder, block=block))
    except ValueError as error:
        raise Misuse(f"--{error}".replace("=", " ", 1)) from error
    except OSError as error:
        raise Misuse(f"--out {folder} cannot be written to: {error}") from error
    code = 0 if all(path.suffix != ".gv" for path in paths) else UNSUPPORTED
    text = "\n".join([str(made.summary()), *map(str, paths)])
    return Answer(text, {**_values(given), "files": list(map(str, paths))}, code)


# ------------------------------------------------------------------------------------------- what is said


def _subject(given: Given) -> list[tuple[str, str]]:
    values = _values(given)
    size = f"{values['parameters']:,} parameters, {show_bytes(values['parameter_bytes'])}"
    return [("model", f"{values['model']}: {size}, on {', '.join(values['devices']) or 'no device'}")]


def _values(given: Given) -> dict[str, Any]:
    parameters = list(given.model.parameters())
    return {
        "target": given.target,
        "model": type(given.model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": sum(p.nbytes for p in parameters),
        "devices": sorted({str(p.device) for p in parameters}),
    }


def _values_of_plan(made: Plan | FollowedPlan) -> dict[str, Any]:
    """The figures of a plan; ``calls``: one list, the inputs in a few words, then the mode."""
    figures = ("eager_peak", "budget", "predicted_peak", "predicted_overhead", "recomputed")
    values = {"calls": [list(made.call)], **{name: getattr(made, name) for name in figures}}
    if not isinstance(made, Plan):
        return values
    values |= {name: getattr(made, name) for name in ("status", "gap", "solver", "setup_seconds")}
    choices = block_choices(made.problem, made.schedule, made.predicted_overhead)
    blocks = [dataclasses.asdict(choice) for choice in choices]
    return {**values, "blocks": blocks}
