"""One kind of call of a graph that is part of a longer step, with the schedules that it can run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import fx

from rkgb.cost.usage import Usage, all_used
from rkgb.graphs import D_graph, Structure
from rkgb.Ktools import with_roots
from rkgb.sample import Call
from rockmate.calls.bound import Results
from rockmate.calls.captured import Captured
from rockmate.calls.families import Family
from rockmate.calls.front import Front
from rockmate.planning.artefact import SavedPlan
from rockmate.planning.plan import Plan
from rockmate.planning.planner import CARRIED, Planner
from rockmate.planning.problem import problem_of
from rockmate.planning.room import Room
from rockmate.progress import Report
from rockmate.run.compiled import compile_schedule
from rockmate.run.draws import draw_whole
from rockmate.run.program import Program
from solvers import Bwd, ChainPlan, ChainPlanner, Loss, Problem, Run, Schedule, keep_everything, walk
from solvers.pareto import evenly, undominated
from solvers.sequence import Choice

MOST_CHOICES = 32
"""Schedules that a graph offers."""

NO_ROOM = Room(0, 0, 0, 0)
"""What happens between forward and backward is other graphs' and the step's."""


def outside(d: D_graph) -> Usage:
    """What the step does with the outputs of a graph: all may get gradients, which may lie in any way, and all stay."""
    return dataclasses.replace(all_used(d), turned=None)


class Graph(Protocol):
    """A captured graph: see ``rockmate.calls.captured_calls.CapturedCalls``."""

    front: Front
    program: fx.GraphModule
    tensors: fx.GraphModule
    module: Captured

    @property
    def results(self) -> Results:
        """Sizes of what the program computes."""

    def kind(self, call: Call) -> tuple[Hashable, frozenset[str]]:
        """What tells calls apart, and the parameters whose gradients are missing."""

    def sizeless(self, call: Call) -> Hashable:
        """What tells calls apart, sizes left out."""

    def names(self, call: Call) -> list[str]:
        """What arguments are called."""

    def resized_planner(
        self, call: Call, latest: Callable[[Family], Member | None], report: Report
    ) -> tuple[Planner, Member] | None:
        """A planner for other sizes of a known graph."""

    def traced_planner(
        self, call: Call, report: Report, saved: SavedPlan | None = None, usage_of: Callable[[D_graph], Usage] = ...
    ) -> tuple[Planner, Family]:
        """A planner for a call that is traced."""

    def returned(self, structure: Structure, outputs: list[torch.Tensor]) -> Any:
        """What the graph returns, from its program's outputs."""


@dataclass(eq=False)
class Member:
    """``planner``: of the graph at these sizes. ``schedules``: what it can run, with the ``choices`` that they are to
    the step. ``call``: the call in a few words. ``family``: calls of other sizes. ``shapes``: of the tensors that it is
    given; ``free``: their sizes, by tensor and dimension, on which no constant of its program depends. ``base``: a
    member of larger sizes, whose schedules these are and for which steps are planned, or the member itself.
    ``small_from``: bytes of a budget from which on such calls run as they are, where they have not been planned.
    """

    planner: Planner
    call: tuple[str, ...]
    family: Family
    schedules: list[ChainPlan]
    choices: tuple[Choice, ...]
    shapes: tuple[tuple[int, ...], ...]
    free: frozenset[tuple[int, int]]
    small_from: int = 0
    _programs: dict[int, Program] = field(default_factory=dict)
    _needed: dict[int, set[int]] = field(default_factory=dict)
    _choices: dict[frozenset[int], tuple[Choice, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base = self

    @property
    def least(self) -> int:
        """The choice for a step that nothing is known of."""
        return min(range(len(self.choices)), key=lambda k: _need(self.choices[k]))

    def covers(self, call: Call) -> bool:
        """Whether the tensors of ``call`` are of these sizes or smaller."""
        return all(
            size <= most
            for t, shape in zip(call.tensors, self.shapes, strict=True)
            for size, most in zip(t.shape, shape, strict=True)
        )

    def serves(self, call: Call) -> bool:
        """Whether ``call``, whose tensors are of these sizes or smaller, runs the same program."""
        return self.covers(call) and self.free >= moved(self.shapes, shapes_of(call))

    def program(self, k: int) -> Program:
        """The program of choice ``k``, which draws masks whole where the peak of its forward leaves the memory."""
        if k not in self._programs:
            plan = self.schedules[k]
            program, forward = compile_schedule(self.planner.graphs.K, plan.schedule), plan.schedule.index(Loss())
            levels = plan.walk.timeline[:forward]
            self._programs[k] = draw_whole(program, self.planner.problem, plan.schedule, levels)
        return self._programs[k]

    @cached_property
    def output_data(self) -> tuple[int | None, ...]:
        """The data of each output that the step may hold; None for memory that the graph was given."""
        k = self.planner.graphs.K
        held = {k.data[x].storage: x for x in k.held}
        return tuple(held.get(k.s.d.values[v].storage) for v in k.s.d.outputs)

    def spare(self, k: int, gone: Collection[int]) -> int:
        """Bytes of the outputs ``gone``, by their data, that choice ``k`` neither reads in the backward nor makes
        again: they go where the step lets them go.
        """
        problem = self.planner.problem
        if k not in self._needed:
            self._needed[k] = needed_behind_the_loss(problem, self.schedules[k].schedule)
        return sum(problem.data[x].size for x in gone if x not in self._needed[k])

    def choices_in(
        self, released: Collection[int], unread: Collection[int], roots: frozenset[int]
    ) -> tuple[Choice, ...]:
        """The choices in a step that lets these outputs go, before its backward and before that of the graph, and that
        gives gradients to the outputs ``roots``, by position.
        """
        if roots not in self._choices:
            planner = self.planner_for(roots)
            walked = (ChainPlan(p.schedule, walk(planner.problem, p.schedule), p.source) for p in self.schedules)
            self._choices[roots] = tuple(choice_of(planner.problem, plan, planner.beside) for plan in walked)
        choices = enumerate(self._choices[roots])
        return tuple(c.without(self.spare(k, released), self.spare(k, unread)) for k, c in choices)

    def planner_for(self, roots: frozenset[int]) -> Planner:
        """The planner, where only these outputs get gradients from outside of the graph."""
        k, known = self.planner.graphs.K, self.planner.graphs.known
        graphs = dataclasses.replace(
            self.planner.graphs, K=with_roots(k, known, tuple(x for x in k.usage.roots if x in roots))
        )
        problem = problem_of(graphs, NO_ROOM, self.planner.options.costs)
        return dataclasses.replace(self.planner, graphs=graphs, problem=problem, _chain=None)

    def plan(self, k: int, budget: int, roots: frozenset[int]) -> Plan:
        """Choice ``k`` as a plan, for people."""
        planner, plan = self.planner_for(roots), self.schedules[k]
        return planner.described(budget, ChainPlan(plan.schedule, walk(planner.problem, plan.schedule), plan.source))


def _need(choice: Choice) -> tuple[int, int]:
    return max(choice.forward, choice.backward) + choice.kept, choice.time


def shapes_of(call: Call) -> tuple[tuple[int, ...], ...]:
    """Of the tensors of ``call``."""
    return tuple(tuple(t.shape) for t in call.tensors)


def moved(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> frozenset[tuple[int, int]]:
    """Where shapes differ: the tensor and the dimension."""
    pairs = enumerate(zip(a, b, strict=True))
    return frozenset((k, i) for k, (m, n) in pairs for i, (x, y) in enumerate(zip(m, n, strict=True)) if x != y)


def schedules_of(planner: Planner) -> list[ChainPlan]:
    """Schedules of the planner's graph that no other beats: in what it keeps, the peaks of both phases, and time.

    They are looked for twice: with nothing between forward and backward, for small peaks of the graph itself, and with
    as much as the graph keeps at most, for small memory between the two.
    """
    problem = planner.problem
    keep = walk(problem, keep_everything(problem))
    found: list[ChainPlan] = []
    for room in (0, 2 * keep.peak):
        between = problem_of(planner.graphs, dataclasses.replace(NO_ROOM, between=room), planner.options.costs)
        chain = ChainPlanner(between, solved=planner.solved)
        found += [ChainPlan(p.schedule, walk(problem, p.schedule), p.source) for p in chain.walked()]
    found.append(ChainPlan(keep_everything(problem), keep, "keep everything"))
    return _selected(problem, found, planner.beside)


def carried_schedules(planner: Planner, schedules: list[ChainPlan]) -> list[ChainPlan]:
    """The schedules of another size of the graph."""
    return [ChainPlan(p.schedule, walk(planner.problem, p.schedule), CARRIED) for p in schedules]


def needed_behind_the_loss(problem: Problem, schedule: Schedule) -> set[int]:
    """The data that runs behind the loss read or make, and that backwards read."""
    found: set[int] = set()
    for step in schedule[schedule.index(Loss()) :]:
        node = problem.nodes[step.node] if isinstance(step, (Run, Bwd)) else None
        if node is not None and isinstance(step, Run):
            found.update(node.reads, node.makes)
        elif node is not None and node.backward is not None:
            found.update(node.backward.reads)
    return found


def choice_of(problem: Problem, plan: ChainPlan, beside: int) -> Choice:
    """What ``plan`` is to the step; ``beside``: bytes beside the problem."""
    at = plan.schedule.index(Loss())
    begins = next((k for k, step in enumerate(plan.schedule) if isinstance(step, Bwd)), at)
    levels = plan.walk.timeline
    return Choice(
        levels[at] - problem.loss + beside,
        max(levels[: at + 1]) + beside,
        max(levels[at:]) + beside,
        plan.walk.time,
        max(levels[begins + 1 :], default=0) + beside,
    )


def _selected(problem: Problem, plans: list[ChainPlan], beside: int) -> list[ChainPlan]:
    """Those that no other beats, evenly taken by what they keep if there are many."""
    measured = [(choice_of(problem, plan, beside), plan) for plan in plans]
    found = undominated(measured, lambda x: (x[0].kept, x[0].time, x[0].forward, x[0].backward))
    if len(found) > MOST_CHOICES:
        least = min(found, key=lambda x: _need(x[0]))
        fastest = min(found, key=lambda x: x[0].time)
        few = [*evenly(found, MOST_CHOICES), least, fastest]
        found = [x for x in found if any(x is y for y in few)]
    return [plan for _, plan in found]
