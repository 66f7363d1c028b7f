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
from rkgb.cost.layouts import differentiated
from rkgb.cost.measure import Cost, Kept
from rkgb.cost.usage import Usage
from rkgb.device import kind_of
from rkgb.graphs import S_graph, S_node
from rkgb.settings import settings
from rkgb.trace.attention import attention_kernels
from rockmate.planning.disk import Places, named
from solvers import ChainPlan, Problem, format_schedule, parse_schedule, walk
from solvers.errors import MOST
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
        return None if name is None else self.places.read(name, lambda found: checked_costs(found, self.s, usage))

    def put(self, usage: Usage, given: frozenset[int], costs: list[Cost]) -> list[Cost]:
        """As in ``Kept``; equal nodes have one cost, which is written once."""
        name = self._name(usage, given)
        if name is None:
            return costs
        distinct = list({id(c): c for c in costs}.values())
        at = {id(c): k for k, c in enumerate(distinct)}
        content = {"costs": distinct, "of": [at[id(c)] for c in costs]}
        return self.places.keep(name, content, lambda found: checked_costs(found, self.s, usage), costs)


def checked_costs(found: dict[str, Any], s: S_graph, usage: Usage) -> list[Cost]:
    """The costs of the nodes of ``s`` in a file. Raises ``ValueError`` or ``LookupError`` for what these cannot be."""
    distinct: tuple[Cost, ...] = from_json(found["costs"], tuple[Cost, ...], "costs")
    of: tuple[int, ...] = from_json(found["of"], tuple[int, ...], "of")
    if len(of) != len(s.nodes):
        raise ValueError(f"it has the costs of {len(of)} nodes, and the graph has {len(s.nodes)}")
    if not all(0 <= k < len(distinct) for k in of):
        raise ValueError("a node has costs that are not there")
    costs = [distinct[k] for k in of]
    for node, fed, cost in zip(s.nodes, differentiated(s, usage.root_values(s.d)), costs, strict=True):
        if reason := _no_costs_of(node, fed, cost):
            raise ValueError(f"{node.name} {reason}")
    return costs


def _no_costs_of(node: S_node, fed: tuple[int, ...], cost: Cost) -> str:
    """Why these cannot be the costs of ``node``, whose results ``fed`` get gradients; empty if they can."""
    figures = [
        cost.forward_time,
        cost.warm_time or 0,
        cost.forward_peak,
        cost.backward_time,
        cost.backward_peak,
        cost.held_peak,
        cost.together_peak,
        cost.incoming,
        *(g.bytes for g in cost.inputs if g),
    ]
    if not all(0 <= figure <= MOST for figure in figures):
        return "has a figure that is negative, or too large"
    if cost.results != fed or len(cost.inputs) != (len(node.reads) if fed else 0):
        return "has other gradients"
    if not cost.views <= set(range(len(cost.inputs))):
        return "has a view that it does not read"
    for k, gradient in enumerate(cost.inputs):
        if gradient is None or gradient.shares is None:
            continue
        kind, other = gradient.shares
        limit = {"result": len(fed), "input": k}.get(kind, 0)
        if not 0 <= other < limit or (kind == "input" and cost.inputs[other] is None):
            return "has a gradient in memory that is not there"
    return ""


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
        schedule = parse_schedule(problem, "\n".join(from_json(found["program"], tuple[str, ...], "program")))
        walked = walk(problem, schedule)
        solver, reason, bound = found["solver"], found["reason"], found["bound"]
        if walked.peak > room:
            raise ValueError(f"its schedule takes {walked.peak} bytes, and {room} are there")
        if type(solver) is not str or type(reason) is not str:
            raise ValueError("solver and reason are no texts")
        if bound is not None and (type(bound) is not int or not 0 <= bound <= walked.time):
            raise ValueError(f"its bound is {bound!r}, and the step takes {walked.time} ns")
        return Bounded(ChainPlan(schedule, walked, solver + LOADED), bound, reason)

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
