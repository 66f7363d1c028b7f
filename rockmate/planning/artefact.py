"""Plans as files: JSON that people can read, and that another process or machine can run.

A file holds the schedule as a program, the figures of every node that it was made from, and the fingerprint of the
graph that it is for. It holds no code and no tensors: when a plan is loaded the module is traced again, nothing is
measured or solved, and the schedule is walked before it is trusted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from rkgb.blocks.classes import classes
from rkgb.blocks.fingerprint import describe_inputs, fingerprint
from rkgb.cost.node import warm
from rkgb.cost.usage import Usage
from rkgb.graphs import S_graph
from rkgb.Ktools import K_data, K_graph, K_node
from rkgb.pipeline import Graphs, Shows, make_S
from rkgb.probe.operations import is_python
from rkgb.sample import Call
from rkgb.trace.capture import current_mode
from rockmate.errors import InputError, PlanError
from rockmate.planning.problem import Room
from solvers import Problem, ProblemError, Schedule, ScheduleError, parse_schedule
from solvers.errors import check_whole
from solvers.files.values import from_json, to_json

FORMAT = 3


_FIGURES = ("nodes", "data", "outputs", "output_bytes", "held", "returned", "usage", "idle")
"""The fields of a K graph that a file has."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanFields:
    """How and for what a plan was made.

    ``budget``: bytes that one forward and its backward may allocate. ``costs``, ``loss_memory``: as for ``Rockmate``.
    ``missing``: parameters without ``.grad`` when the plan was made, so that their gradients count. ``room``: bytes
    left for the loss, and which of them ``predicted_peak`` counts. ``solver``: what found the schedule. ``reason``:
    what cut the search short, such as a time limit; empty if nothing did.
    """

    budget: int
    costs: str = "measured"
    loss_memory: int | None = None
    missing: frozenset[str] = frozenset()
    room: Room
    solver: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class SavedPlan(PlanFields):
    """What a file of a plan says, under these names: how the plan was made, its program, and the figures of its graph.

    ``path`` is not in the file, whose ``program`` is a list of lines. ``call``: as in ``Plan``.
    """

    path: str
    fingerprint: str
    inputs: tuple[str, ...]
    program: str
    nodes: tuple[K_node, ...]
    data: tuple[K_data, ...]
    outputs: tuple[int, ...]
    output_bytes: int
    held: tuple[int, ...]
    returned: tuple[int, ...]
    usage: Usage
    idle: frozenset[int]
    call: tuple[str, ...] = ()

    def graphs(self, model: torch.nn.Module, call: Call, shown: Shows = lambda: None) -> Graphs:
        """The graphs of ``model``, with the figures of the file. Raises ``PlanError`` if it is for another graph.

        ``shown``: see ``rkgb.make_all_graphs``.
        """
        b, d, s = make_S(model, call, shown=shown)
        found = fingerprint(s)
        if found != self.fingerprint:
            raise PlanError(
                f"the plan in {self.path} is for another graph: {self._difference(s)}. Make a plan for this one."
            )
        missing = frozenset(v for v, x in s.d.sources.items() if x.key in self.missing)
        figures = {name: getattr(self, name) for name in _FIGURES}
        k = K_graph(s=s, missing=missing, made_by=(*s.made_by, "read_plan"), **figures)
        with self.unchanged():
            k.verify()
        warm(s, model, call.tensors)
        return Graphs(b, d, s, tuple(classes(s)), k)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise ``PlanError`` where the figures of the file do not go together."""
        try:
            yield
        except PlanError:
            raise
        except (AssertionError, LookupError, ProblemError, InputError) as error:
            raise PlanError(
                f"the figures in {self.path} are not those of this graph, though its fingerprint is: the file was "
                "changed. Make the plan again."
            ) from error

    def schedule(self, problem: Problem) -> Schedule:
        """The steps of the program. Raises ``PlanError`` where it cannot be read."""
        try:
            return parse_schedule(problem, self.program)
        except ScheduleError as error:
            raise PlanError(f"the program in {self.path} cannot be read: {error}") from error

    def _difference(self, s: S_graph) -> str:
        inputs = describe_inputs(s)
        if inputs != self.inputs:
            return f"it is called with {', '.join(self.inputs)}, the sample is {', '.join(inputs)}"
        before, casts = ([w for w in call if w.startswith("autocast ")] for call in (self.call, autocast_of_now()))
        if before != casts:
            made, loaded = (" and ".join(words) or "no autocast" for words in (before, casts))
            return f"it was made under {made}, and is loaded under {loaded}"
        saved, now = [n.name for n in self.nodes], [n.label for n in s.nodes]
        if saved == now:
            own = dict.fromkeys(node.line for node in s.d.nodes if is_python(node))
            functions = f", or an autograd.Function computes otherwise ({', '.join(own)})" if own else ""
            what = "other arguments, types, modes or parameters that require grad"
            return f"operations have the same names, but {what}{functions}"
        at = next((i for i, (a, b) in enumerate(zip(saved, now, strict=False)) if a != b), min(len(saved), len(now)))
        return (
            f"it has {len(saved)} nodes and this graph {len(now)}, and they differ from node {at} on "
            f"({', '.join(saved[at : at + 1]) or 'nothing'} there, {', '.join(now[at : at + 1]) or 'nothing'} here)"
        )


def autocast_of_now() -> list[str]:
    """What is said of the autocast that this thread is in: "autocast bfloat16"."""
    return [f"autocast {str(dtype).removeprefix('torch.')}" for _, dtype in current_mode().autocast]


def write_plan(path: str | Path, plan: PlanFields, k: K_graph, program: str, promised: Mapping[str, Any]) -> None:
    """Write a plan with the schedule ``program``; ``promised``: what else the file tells people.

    Raises ``PlanError`` where there is no such file to write to.
    """
    said = {field.name: getattr(plan, field.name) for field in fields(PlanFields)}
    figures = {name: getattr(k, name) for name in _FIGURES}
    lists = {"program": program.rstrip("\n").split("\n"), "nodes": figures.pop("nodes"), "data": figures.pop("data")}
    head = {"format": FORMAT, **promised, "fingerprint": fingerprint(k.s), "inputs": describe_inputs(k.s)}
    parts = [f"{to_json(key)}: {to_json(value)}" for key, value in {**head, **said, **figures}.items()]
    for key, items in lists.items():
        parts.append(f"{to_json(key)}: [\n  " + ",\n  ".join(map(to_json, items)) + "\n]")
    if not isinstance(path, (str, Path)):
        raise PlanError(f"{path!r} is no path: give the name of a file to write to")
    try:
        Path(path).write_text("{\n" + ",\n".join(parts) + "\n}\n")
    except OSError as error:
        raise PlanError(f"the plan cannot be written: {error}. Give a file in a folder that is there") from error


def read_plan(path: str | Path) -> SavedPlan:
    """The plan in a file. Raises ``PlanError`` if there is none that this version can read."""
    if not isinstance(path, (str, Path)):
        raise PlanError(f"plan is of type {type(path).__name__}: give the path of the file that plan.save(path) wrote")
    try:
        found = json.loads(Path(path).read_text())
        if found["format"] != FORMAT:
            raise PlanError(f"{path} has format {found['format']}, this version reads {FORMAT}: make the plan again")
        said = {f.name: found[f.name] for f in fields(SavedPlan) if f.name in found}
        said |= {"path": str(path), "program": "\n".join(found["program"])}
        plan: SavedPlan = from_json(said, SavedPlan, "the plan")
        check_whole("the plan", budget=plan.budget)
        return plan
    except OSError as error:
        raise PlanError(f"there is no plan in {path}: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PlanError(f"{path} is no plan: {type(error).__name__}: {error}. plan.save(path) writes one.") from error
