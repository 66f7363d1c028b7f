"""What of plans is kept for later processes, and for other ranks: the costs of a graph, and schedules.

The graph is always the one that was traced just now. Costs are found by the graph, the usage of its outputs, the
device, torch's settings and the versions. A schedule is found by its problem, which has the costs, and what was asked
of the solvers. Figures are not kept: the walker makes them anew, and judges the schedule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rkgb.blocks.fingerprint import fingerprint
from rkgb.cost.measure import Cost, Kept
from rkgb.cost.usage import Usage
from rkgb.device import kind_of
from rkgb.graphs import S_graph
from rkgb.settings import settings
from rkgb.trace.attention import attention_kernels
from rockmate.planning.disk import Places, named
from solvers import ChainPlan, Problem, format_schedule, parse_schedule, walk
from solvers.files.values import from_json, to_json

LOADED = ", loaded"
"""What the name of a plan's solver ends with where the schedule comes from another process."""

_LIBRARIES = ("torch", "highspy", "pulp", "rockmate")
_PACKAGES = ("rkgb", "solvers", "rockmate")

# Operators whose kernels follow from a version. Others may be the user's own, and change from one start to the next.
_VERSIONED = {"aten": "torch", "prims": "torch", "torchvision": "torchvision"}


class Bounded(NamedTuple):
    """A plan; nanoseconds that a step takes at least within its budget, if known; what cut the search short."""

    plan: ChainPlan
    bound: int | None
    reason: str = ""


class KeptCosts(Kept):
    """The costs of the graph ``s``; ``costs``: of which kind."""

    def __init__(self, places: Places, s: S_graph, costs: str) -> None:
        self.places, self.s = places, s
        device = s.device
        found = _libraries(s)
        self._depends: tuple[object, ...] | None = None
        if found is not None:
            where = device.type, kind_of(device).model(device), settings(), attention_kernels()
            self._depends = costs, fingerprint(s), s.d.storages, found, where, versions()

    def _name(self, usage: Usage, given: frozenset[int]) -> str | None:
        return None if self._depends is None else named("costs", to_json(usage), sorted(given), *self._depends)

    def get(self, usage: Usage, given: frozenset[int]) -> list[Cost] | None:
        """As in ``Kept``."""
        name = self._name(usage, given)
        return None if name is None else self.places.read(name, lambda found: _costs_in(found, self.s))

    def put(self, usage: Usage, given: frozenset[int], costs: list[Cost]) -> list[Cost]:
        """As in ``Kept``; equal nodes have one cost, which is written once."""
        name = self._name(usage, given)
        if name is None:
            return costs
        distinct = list({id(c): c for c in costs}.values())
        at = {id(c): k for k, c in enumerate(distinct)}
        content = {"costs": distinct, "of": [at[id(c)] for c in costs]}
        return self.places.keep(name, content, lambda found: _costs_in(found, self.s), costs)


def _costs_in(found: dict[str, Any], s: S_graph) -> list[Cost]:
    """The costs of the nodes of ``s``. Raises ``ValueError`` or ``LookupError`` where these are of another graph."""
    distinct: tuple[Cost, ...] = from_json(found["costs"], tuple[Cost, ...], "costs")
    if len(found["of"]) != len(s.nodes):
        raise ValueError(f"it has the costs of {len(found['of'])} nodes, and the graph has {len(s.nodes)}")
    return [distinct[k] for k in found["of"]]


def kept_or_made(
    places: Places | None, problem: Problem, room: int, asked: tuple[object, ...], make: Callable[[], Bounded]
) -> Bounded:
    """The schedule for ``problem`` within ``room`` bytes, as another process has found it, or else as ``make`` does.

    ``asked``: what else the answer depends on.
    """
    if places is None:
        return make()
    name = named("schedule", to_json(problem), room, asked, versions())

    def checked(found: dict[str, Any]) -> Bounded:
        schedule = parse_schedule(problem, "\n".join(found["program"]))
        walked = walk(problem, schedule)
        if walked.peak > room:
            raise ValueError(f"its schedule takes {walked.peak} bytes, and {room} are there")
        return Bounded(ChainPlan(schedule, walked, found["solver"] + LOADED), found["bound"], found["reason"])

    found = places.read(name, checked)
    if found is None:
        found = make()
        solver = found.plan.source.removesuffix(LOADED)
        text = format_schedule(problem, found.plan.schedule).rstrip("\n")
        program = [line.split("#")[0].rstrip() for line in text.split("\n")]  # comments say what the walker says
        content = {"program": program, "solver": solver, "reason": found.reason, "bound": found.bound}
        found = places.keep(name, content, checked, found)
    return found


def _libraries(s: S_graph) -> tuple[str, ...] | None:
    """What the operations of ``s`` are of, with versions; None if there is one that may change without notice."""
    found = set()
    for node in s.d.nodes:
        if isinstance(node.op, torch._ops.OpOverload):
            library = _VERSIONED.get(node.op.namespace)
            if library is None:
                return None
            found.add(library)
        elif node.args and getattr(node.args[0], "of_torch", False):
            found.add("torch")  # its text is in the graph's
        elif not (getattr(node.op, "__module__", None) or "").startswith("rkgb."):
            return None
    return tuple(f"{name} {_version(name)}" for name in sorted(found))


@cache
def versions() -> tuple[str, ...]:
    """Of what makes plans, and a digest of the packages' sources, which may change while their version does not."""
    sources = hashlib.sha256()
    for package in _PACKAGES:
        for folder in import_module(package).__path__:
            for path in sorted(Path(folder).rglob("*.py")):
                sources.update(f"{path.relative_to(folder)}".encode() + path.read_bytes())
    return (*(f"{name} {_version(name)}" for name in _LIBRARIES), sources.hexdigest())


def _version(name: str) -> str:
    if name == "torch":
        return str(torch.__version__)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
