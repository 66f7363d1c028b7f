"""The ways in which a followed call that was observed can share a step's budget with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from rockmate.calls.turns import fitting
from rockmate.follow.known import CallKind, Known
from rockmate.follow.plan import FollowedPlan, find, find_least
from rockmate.follow.planned import FollowedProgram, program_of
from rockmate.planning.options import PlanOptions
from rockmate.planning.ways import schedules_of, way_of
from solvers import Problem, Schedule, keep_everything, walk
from solvers.calls import Way

SECONDS = 0.1
"""How long one way is looked for."""


class FollowedWays:
    """Those of ``known``, which is of ``kind``: see ``rockmate.calls.steps.Ways``.

    ``made``: bytes of the gradients that its backward makes.
    """

    rough = False

    def __init__(self, known: Known, kind: CallKind, owner: object, made: int, options: PlanOptions) -> None:
        self.known, self.owner, self.made, self.call, self.device = known, owner, made, kind.call, known.device
        self.options = replace(options, time_limit=min(SECONDS, options.time_limit))
        self.plan, self._problem, self._waits = known.plan, known.found.problem, max(0, known.waits)
        self._asked: set[tuple[int, bool]] = set()
        self._found: dict[Way, Schedule] = {}

    @cached_property
    def alone(self) -> Way:
        """As in ``Ways``."""
        assert self.plan is not None
        return way_of(self._problem, self.plan.schedule, waits=self._waits)

    @cached_property
    def eager(self) -> Way:
        """As in ``Ways``."""
        return way_of(self._problem, keep_everything(self._problem), waits=self._waits)

    def within(self, budget: int, *, tight: bool = False) -> Sequence[Way]:
        """As in ``Ways``."""
        if (budget, tight) not in self._asked:

            def solve(problem: Problem, limit: int) -> Schedule:
                return find(problem, limit, self.options).schedule

            least = find_least(self._problem) if tight else None
            found = [] if least is None else [least.schedule]
            found += schedules_of(self._problem, budget, None if least is None else least.walk.peak, solve)
            self._found.update((way_of(self._problem, schedule, waits=self._waits), schedule) for schedule in found)
            self._asked.add((budget, tight))
        return fitting([self.alone, *self._found], budget)

    def placed(self, way: Way) -> tuple[FollowedPlan, FollowedProgram]:
        """The plan of this way, ready to run."""
        known = self.known
        assert self.plan is not None and known.program is not None
        if way == self.alone:
            return self.plan, known.program
        schedule = self._found[way]
        plan = replace(
            self.plan,
            budget=max(way.forward, way.backward),
            schedule=schedule,
            walk=walk(self._problem, schedule),
            lower_bound=None,
        )
        return plan, program_of(known.found, schedule, known.observed.seen)
