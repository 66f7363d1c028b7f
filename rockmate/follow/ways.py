"""The ways in which a followed call that was observed can share a step's budget with others."""

from __future__ import annotations

from dataclasses import replace

from rockmate.follow.known import Known
from rockmate.follow.plan import FollowedPlan, find, find_least
from rockmate.follow.planned import FollowedProgram, program_of
from rockmate.planning.options import PlanOptions
from rockmate.planning.ways import FoundWays
from solvers import InfeasibleError, Problem, Schedule, walk
from solvers.calls import Way

SECONDS = 0.1
"""How long one way is looked for."""


class FollowedWays(FoundWays):
    """Those of calls that compute as ``known``. ``made``: bytes of the gradients that their backward makes."""

    def __init__(self, known: Known, owner: object, made: int, options: PlanOptions) -> None:
        assert known.plan is not None
        super().__init__(known.found.problem, known.plan.schedule, 0, known.waits, known.searched)
        self.known, self.plan = known, known.plan
        self.owner, self.made, self.call, self.device = owner, made, known.call, known.device
        self.options = replace(options, time_limit=min(SECONDS, options.time_limit))

    def least(self) -> tuple[int, Schedule]:
        found = find_least(self.problem)
        return found.walk.peak, found.schedule

    def solve(self, problem: Problem, limit: int) -> Schedule | None:
        try:
            return find(problem, limit, self.options).schedule
        except InfeasibleError:
            return None

    def placed(self, way: Way) -> tuple[FollowedPlan, FollowedProgram]:
        """The plan of this way, ready to run."""
        known = self.known
        assert known.program is not None
        if way == self.alone:
            return self.plan, known.program
        schedule = self.found[way]
        plan = replace(
            self.plan,
            budget=max(way.forward, way.backward),
            schedule=schedule,
            walk=walk(self.problem, schedule),
            lower_bound=None,
        )
        return plan, program_of(known.found, schedule, known.seen)
