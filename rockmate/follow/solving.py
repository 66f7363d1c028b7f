"""Plans of followed steps for the budget of now, which a share becomes when the first step was seen."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rockmate.budget import Budget, show_at_least, show_at_most
from rockmate.calls.front import Front
from rockmate.calls.terms import least_instead
from rockmate.errors import InfeasibleBudgetError
from rockmate.follow.known import CallKind, Known
from rockmate.follow.plan import FollowedPlan, Found, fastest_of_least, find, find_least, moment_of
from rockmate.follow.planned import program_of
from rockmate.planning.least import least_and_share, saves_nothing
from rockmate.progress import Progress, Report
from solvers import InfeasibleError, walk
from solvers.interrupts import Heeded


class Solving:
    """``why`` the calls are followed. ``asked``: the budget as it was given, once it has become bytes. ``spent``:
    seconds of the attempt to capture the first call.
    """

    def __init__(self, front: Front, why: str) -> None:
        self.front, self.why = front, why
        self.asked: Budget | None = None
        self.spent: dict[str, float] = {}

    def _settled(self, known: Known) -> int:
        """The budget in bytes: a share is of the largest step so far."""
        terms = self.front.terms
        if isinstance(terms.budget, Budget):
            self.asked, terms.settled = terms.budget, (terms.budget, known.eager_peak)
            terms.budget = terms.bytes_of(terms.budget, known)
        elif self.asked is not None and self.asked.share is not None:
            terms.budget = max(terms.budget, terms.bytes_of(self.asked, known))
        return terms.budget

    def solve(self, known: Known, kind: CallKind, every: Iterable[CallKind]) -> None:
        """Plan ``known``, which is of ``kind``, for the budget of now; ``every``: kinds, whose plans may do."""
        budget = self._settled(known)
        if budget == known.budget:
            return
        began, terms = time.perf_counter(), self.front.terms
        problem = known.found.problem
        known.problem = None
        with Heeded(), Progress(terms.progress) as report:
            report("solve", 0.0)
            try:
                carried = None if known.uses else self._carried(known, every, budget)
                found = carried or find(problem, budget, terms.options, report)
                known.carried = carried is not None
            except InfeasibleError:
                fits = known.fitting(budget)  # a search that its time ends finds it or not
                found = fits or self._least(known, budget, report)
        known.budget = budget
        known.plan = self._plan(known, kind, found, budget, time.perf_counter() - began)
        known.program = program_of(known.found, found.schedule, known.observed.seen)
        known.schedule = found.schedule

    def _least(self, known: Known, budget: int, report: Report) -> Found:
        """The plan of least memory, where none is known for ``budget``, and what is said of that."""
        problem, terms = known.found.problem, self.front.terms
        found = fastest_of_least(problem, terms.options, report) if terms.least else find_least(problem, report)
        held = find_least(known.found.with_outputs_held(), report).walk.peak
        message = self._infeasible(budget, found, held, known)
        known.least = found.schedule
        if terms.least:
            least_instead(InfeasibleBudgetError(message, found.walk.peak), self.front.name)
        else:
            known.problem = message, max(found.walk.peak, held)
        return found

    @staticmethod
    def _carried(known: Known, every: Iterable[CallKind], budget: int) -> Found | None:
        """The fastest schedule of another size of what ``known`` computes that fits here, if there is one."""
        others = (other for kind in every for other in kind.known)
        like = (k for k in others if k is not known and k.forms == known.forms and k.schedule is not None)
        found = [*known.alike, *(k.schedule for k in like if k.found.is_like(known.found))]
        walked = [(s, walk(known.found.problem, s)) for s in dict.fromkeys(found) if s is not None]
        fitting = [(s, w) for s, w in walked if w.peak <= budget]
        if not fitting or known.eager_peak <= budget:
            return None
        schedule, figures = min(fitting, key=lambda x: x[1].time)
        return Found(schedule, figures, 0)

    def _plan(self, known: Known, kind: CallKind, found: Found, budget: int, seconds: float) -> FollowedPlan:
        setup = {**self.spent, "observe": known.seconds, "solve": seconds}
        self.spent = {}
        bound = None if found.bound <= 0 else found.bound
        return FollowedPlan(
            budget,
            kind.call,
            known.found.problem,
            found.schedule,
            found.walk,
            known.places,
            self.why,
            setup,
            bound,
        )

    def _infeasible(self, budget: int, found: Found, held: int, known: Known) -> str:
        """``found``: of least memory. ``held``: the least where the caller holds the outputs."""
        least, at = found.walk.peak, found.schedule[found.walk.peak_step]
        holds = f", or {show_at_least(held)} where outputs are held through the backward" if held > least else ""
        sets = f"What sets it is {moment_of(known.found.problem, known.places, at)}. "
        nothing = _NOTHING if saves_nothing(least, known.eager_peak) else ""
        return (
            f"no plan fits a budget of {show_at_most(budget)}: the forward of {self.front.name} is followed operation "
            f"by operation ({self.why.rstrip('.')}), and the smallest that can be planned is "
            f"{least_and_share(least, known.eager_peak)}{holds}; without recomputation the step takes "
            f"{show_at_least(known.eager_peak)}. {sets}{nothing}Raise the budget or make the batch smaller."
        )


_NOTHING = (
    "Recomputation saves next to nothing here: nearly all of it is gradients of parameters, results that may not be "
    "computed again (random numbers), and what one operation needs. "
)
