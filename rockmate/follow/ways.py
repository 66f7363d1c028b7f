"""The ways in which a followed call that was observed can share a step's budget with others."""

from __future__ import annotations

from dataclasses import replace

from rockmate.follow.known import Known
from rockmate.follow.plan import FollowedPlan, find, find_least
from rockmate.follow.planned import FollowedProgram, program_of
from rockmate.planning.options import PlanOptions
from rockmate.planning.ways import FoundWays, peak_of
from solvers import InfeasibleError, Problem, Schedule, walk
from solvers.calls import Way

SECONDS = 0.1
"""How long one way is looked for."""


class FollowedWays(FoundWays[tuple[FollowedPlan, FollowedProgram]]):
    """Those of calls that compute as ``known``. ``made``: bytes of the gradients that their backward makes."""

    def __init__(self, known: Known, owner: object, made: int, options: PlanOptions) -> None:
        assert known.plan is not None and known.program is not None
        figures, runs = (known.found.problem, known.plan.schedule, 0), (known.plan, known.program)
        super().__init__(*figures, known.waits, known.searched, runs)
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

    def lowered(self, way: Way, schedule: Schedule) -> tuple[FollowedPlan, FollowedProgram]:
        walked = walk(self.problem, schedule)
        plan = replace(self.plan, budget=peak_of(way), schedule=schedule, walk=walked, lower_bound=None)
        return plan, program_of(self.known.found, schedule, self.known.seen)
