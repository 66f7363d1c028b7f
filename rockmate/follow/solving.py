"""Plans of followed steps for the budget of now, which a share becomes when the first step was seen; and the ways in
which a followed call that was observed can share a step's budget with others.
"""

from __future__ import annotations

import time
from dataclasses import replace

from rockmate.budget import show_at_least, show_at_most
from rockmate.calls.front import Front
from rockmate.calls.terms import least_instead
from rockmate.errors import InfeasibleBudgetError
from rockmate.follow.known import CallKinds, Known
from rockmate.follow.plan import FollowedPlan, Found, fastest_of_least, find, find_least, frontier_of, moment_of
from rockmate.follow.planned import FollowedProgram, program_of
from rockmate.planning.least import saves_nothing
from rockmate.planning.options import PlanOptions
from rockmate.planning.report import line_of_call
from rockmate.planning.ways import FoundWays, peak_of
from rockmate.progress import Progress, Report
from solvers import Frontier, InfeasibleError, Problem, Schedule, walk
from solvers.calls import Way
from solvers.interrupts import Heeded


class Solving:
    """``why`` the calls are followed. ``kinds``: all of them, whose plans may do for one another. ``spent``: seconds of
    the attempt to capture the first call.
    """

    def __init__(self, front: Front, why: str, kinds: CallKinds) -> None:
        self.front, self.why, self.kinds = front, why, kinds
        self.spent: dict[str, float] = {}

    def settle_anew(self, rehearsed: Known) -> None:
        """Such calls come in training now: a share of the step that was ``rehearsed`` is to be one of theirs."""
        terms = self.front.terms
        if terms.asked.share is not None and terms.budget == terms.bytes_of(terms.asked, rehearsed):
            terms.budget = terms.asked

    def solve(self, known: Known) -> None:
        """Plan ``known`` for the budget of now."""
        budget = self.front.terms.settle(known, largest=True)
        if budget == known.budget:
            return
        began, terms = time.perf_counter(), self.front.terms
        problem = known.found.problem
        known.problem = None
        with Heeded(), Progress(terms.progress) as report:
            report("solve", 0.0)
            carried = self._carried(known, budget)
            found = carried or self._searched(known, budget, report)
            known.carried = carried is not None
        setup = {**self.spent, "observe": known.seconds, "solve": time.perf_counter() - began}
        self.spent = {}
        bound = found.bound if found.bound > 0 else None
        found_for = budget, known.call, problem, found.schedule, found.walk
        known.plan_as(FollowedPlan(*found_for, known.places, self.why, setup, bound))
        terms.planned = True

    def frontier(self, known: Known) -> Frontier:
        """Time against memory for ``known``, as it was told the first time: a second search may end elsewhere."""
        if known.frontier is None:
            terms, plans = self.front.terms, known.judged([known.schedule, known.least])
            with Heeded(), Progress(terms.progress) as report:
                known.frontier, known.least = frontier_of(known.found.problem, terms.options, plans, report)
        return known.frontier

    def _searched(self, known: Known, budget: int, report: Report) -> Found:
        """The plan that a search finds, or that is known and faster: a search that its time ends may find it or not."""
        fits = known.fastest([known.schedule, known.least], budget)
        try:
            found = find(known.found.problem, budget, self.front.terms.options, report)
        except InfeasibleError:
            return fits or self._least(known, budget, report)
        return replace(fits, bound=found.bound) if fits and fits.walk.time < found.walk.time else found

    def _least(self, known: Known, budget: int, report: Report) -> Found:
        """The plan of least memory, where none is known for ``budget``, and what is said of that."""
        problem, terms = known.found.problem, self.front.terms
        found = fastest_of_least(problem, terms.options, report) if terms.least else find_least(problem, report)
        outputs = problem.held | known.found.outputs  # for callers that hold these through the backward
        held = find_least(replace(problem, held=outputs, returned=problem.returned - outputs), report).walk.peak
        message = self._infeasible(budget, found, held, known)
        known.least = found.schedule
        if terms.least:
            least_instead(InfeasibleBudgetError(message, found.walk.peak), self.front.name)
        else:
            known.problem = message, max(found.walk.peak, held)
        return found

    def _carried(self, known: Known, budget: int) -> Found | None:
        """The fastest schedule of another size of what ``known`` computes that fits here, where some operations have to
        run again, until it is worth a plan of its own; None if there is none.
        """
        if known.uses or known.eager_peak <= budget:
            return None
        others = (k for kind in self.kinds.values() for k in kind.known if k is not known)
        like = (k for k in others if k.seen.forms == known.seen.forms and k.found.is_like(known.found))
        return known.fastest([*known.alike, *(k.schedule for k in like)], budget)

    def _infeasible(self, budget: int, found: Found, held: int, known: Known) -> str:
        """``found``: of least memory. ``held``: the least where the caller holds the outputs."""
        least, at = found.walk.peak, found.schedule[found.walk.peak_step]
        holds = f", or {show_at_least(held)} where outputs are held through the backward" if held > least else ""
        sets = f"What sets it is {moment_of(known.found.problem, known.places, at)}. "
        nothing = _NOTHING if saves_nothing(least, known.eager_peak) else ""
        return (
            f"no plan fits a budget of {show_at_most(budget)} for {line_of_call(known.call)}: the forward of "
            f"{self.front.name} is followed operation by operation ({self.why.rstrip('.')}), and the smallest that can "
            "be planned is "
            f"{show_at_least(least)}{holds}; without recomputation the step takes "
            f"{show_at_least(known.eager_peak)}. {sets}{nothing}Raise the budget or make the batch smaller."
            f"{self.front.terms.as_share(max(least, held), known.eager_peak)}"
        )


_NOTHING = (
    "Recomputation saves next to nothing here: nearly all of it is gradients of parameters, results that may not be "
    "computed again (random numbers), and what one operation needs. "
)


SECONDS = 0.1
"""How long one way is looked for."""


class FollowedWays(FoundWays[tuple[FollowedPlan, FollowedProgram]]):
    """Those of calls that compute as ``known``."""

    def __init__(self, known: Known, owner: object, options: PlanOptions) -> None:
        assert known.plan is not None and known.program is not None
        figures, runs = (known.found.problem, known.plan.schedule, known.plan.walk, 0), (known.plan, known.program)
        super().__init__(*figures, known.waits, known.searched, runs)
        self.known, self.plan = known, known.plan
        self.owner, self.made, self.call, self.device = owner, known.made, known.call, known.device
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
