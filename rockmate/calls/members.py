"""Which members run the calls of a model's graphs, where a step is several graphs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rkgb.cost.memory import refuse_within_measurements
from rkgb.errors import GraphError, MeasureError
from rkgb.probe.resize import same_constants
from rkgb.sample import Call
from rkgb.trace.patches import TRACING
from rockmate.calls.families import Family
from rockmate.calls.member import (
    NO_ROOM,
    Graph,
    Member,
    carried_schedules,
    choice_of,
    moved,
    outside,
    schedules_of,
    shapes_of,
)
from rockmate.calls.structure import rounds
from rockmate.errors import CannotBeCalledError
from rockmate.planning.planner import Planner
from rockmate.planning.problem import problem_of
from rockmate.progress import Progress
from rockmate.tell import LOG
from solvers.interrupts import Heeded

if TYPE_CHECKING:
    from rockmate.calls.front import Front

SMALL, VARYING = 100, 16
"""A graph all of whose results take no more than this part of the budget runs as it is: the first number is for all
graphs, the second for those whose sizes differ in every step, as they follow from values."""

MANY_SIZES = 3
"""Sizes of a graph, from which on they are said to be others in every step."""

MOST_KINDS = 256
"""Kinds of calls that are remembered, unless no other can stand for them."""


class Members:
    """The members of one model's steps, by the kind of call; ``as_they_are``: kinds of calls that are not planned."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.as_they_are: set[Hashable] = set()
        self._of: dict[Hashable, list[Member]] = {}
        self._latest: dict[Family, Member] = {}
        self._free: dict[Hashable, list[Member]] = {}  # by programs and their numbers; the last one first
        self._sizes: Counter[Hashable] = Counter()  # members of each kind of call, sizes apart

    @property
    def every(self) -> list[Member]:
        """All members, in the order in which they came."""
        return list(dict.fromkeys(member for members in self._of.values() for member in members))

    def find(self, key: Hashable, missing: frozenset[str]) -> Member | None:
        """The member for calls of exactly this kind."""
        return next((m for m in self._of.get(key, ()) if missing <= m.planner.missing), None)

    def larger(self, graph: Graph, call: Call, sizeless: Hashable, missing: frozenset[str]) -> Member | None:
        """A member of larger sizes whose program is the same at those of ``call``."""
        found = self._free.get(_program_key(graph, call, sizeless), ())
        return next((m for m in found if missing <= m.planner.missing and m.serves(call)), None)

    def small_from(self, graph: Graph, sizeless: Hashable, arguments: tuple[Any, ...]) -> int:
        """The bytes of a budget from which on planning such calls would gain next to nothing."""
        varies = self._sizes[sizeless] >= MANY_SIZES
        size = graph.results.rough_bytes(graph.results.counts(arguments))
        return int(size * (VARYING if varies else SMALL))

    def rough_budget(self, arguments: tuple[Any, ...]) -> int:
        """The budget in bytes; where it is a share, the bytes of the parameters."""
        device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
        return self.front.terms.bytes_known(device) or self.front.parameter_bytes

    def run_as_it_is(self, key: Hashable) -> None:
        """Calls of this kind need no plan."""
        if len(self.as_they_are) > MOST_KINDS:
            self.as_they_are.clear()
        self.as_they_are.add(key)
        self._of.pop(key, None)

    def make(self, graph: Graph, call: Call, key: Hashable, sizeless: Hashable, small_from: int = 0) -> Member | None:
        """Plan a graph as a part of longer steps; None, and it runs as it is, if that cannot be done. ``small_from``:
        see ``Member``.
        """
        refuse_within_measurements()
        try:
            with TRACING, Heeded(), Progress(self.front.terms.progress) as report:
                resized = graph.resized_planner(call, self._latest.get, report)
                if resized is not None:
                    planner, like = resized
                    member = _member(graph, planner, call, like.family, like)
                else:
                    planner, family = graph.traced_planner(call, report, usage_of=outside)
                    member = _member(graph, planner, call, family, self._latest.get(family))
        except MeasureError:
            raise  # that says nothing of the graph
        except (GraphError, CannotBeCalledError) as error:
            LOG.info("%s: a graph of the step runs as it is, since it cannot be planned: %s", self.front.name, error)
            self.run_as_it_is(key)
            return None
        member.small_from = small_from
        self._sizes[sizeless] += 1
        if member.free:
            self._free.setdefault(_program_key(graph, call, sizeless), []).insert(0, member)
        alike = (m for m in self.every if m.family is member.family and member.planner.missing <= m.planner.missing)
        same = (m for m in alike if m.base is m and m.covers(call))
        member.base = next(same, member)
        self._remember(key, member)
        return member

    def _remember(self, key: Hashable, member: Member) -> None:
        """``member`` is for calls of this kind. Of many kinds, the oldest ones go that a larger member stands for."""
        self._of.setdefault(key, []).append(member)
        self._latest[member.family] = member
        if len(self._of) > MOST_KINDS:
            spare = (k for k, found in self._of.items() if k != key and all(m.base is not m for m in found))
            for oldest in list(itertools.islice(spare, 1)):
                del self._of[oldest]


def _member(graph: Graph, planner: Planner, call: Call, family: Family, like: Member | None) -> Member:
    """The member that ``planner`` is for, with the schedules of ``like``, which is of other sizes, or new ones."""
    said = graph.front.described(graph.names(call), call.leaves)
    planner = replace(
        planner, room=NO_ROOM, problem=problem_of(planner.graphs, NO_ROOM, planner.options.costs), call=said
    )
    schedules = schedules_of(planner) if like is None else carried_schedules(planner, like.schedules)
    choices = tuple(choice_of(planner.problem, plan, planner.beside) for plan in schedules)
    shapes = shapes_of(call)
    same = like is not None and same_constants(planner.graphs.S, like.planner.graphs.S)
    free = moved(shapes, like.shapes) if like is not None and same and not rounds(graph.program) else frozenset()
    return Member(planner, said, family, schedules, choices, shapes, free)


def _program_key(graph: Graph, call: Call, sizeless: Hashable) -> Hashable:
    """The program and the whole numbers that it is given, on which its constants may depend."""
    return id(graph), sizeless, call.numbers
