"""The whole graph by lazily generated positions: relax, solve, look where the schedule oversteps, look there too.

``solve_staged`` is exact for the class of ``solvers.whole.stages``: it ends with a schedule and a lower bound that
meet, or a proof that none fits, or at the time limit with the best of both so far. Each round solves a ``Relaxation``
for the positions known; its bound holds for all schedules. The reruns of its solution, where they do not fit, are
repaired by ``solvers.whole.repair``, which gives a schedule (an upper bound, and the next round's start).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from solvers.milp.milp import INFINITY, Effort, Interrupted, Outcome, run
from solvers.solve import Request
from solvers.text import format_bytes
from solvers.whole.neighbourhood import Neighbourhoods
from solvers.whole.relaxation import Cover, Relaxation
from solvers.whole.relaxation_runs import overstepped, spell, start_values
from solvers.whole.repair import repair
from solvers.whole.stages import Cell, Runs, Staged, peaks, timeline

CAP = 2.0
"""Seconds of the first rounds at most; it doubles when a round does not end."""


@dataclass(frozen=True, slots=True)
class Found:
    """``runs``: the best found, if any; ``bound``: proven least time of reruns; ``infeasible``: why nothing fits."""

    runs: Runs | None
    bound: int
    infeasible: str = ""
    interrupted: bool = False
    positions: frozenset[Cell] = frozenset()


def least_step(staged: Staged) -> tuple[int, int]:
    """A bound on every budget: the bytes of the step that needs most, with what it reads and is held; and which."""
    held = least = at = 0
    for t, operation in enumerate(staged.operations):
        read = sum(staged.sizes[d] for d in staged.reads[t] if d not in staged.held)
        need = read + held + operation.own + staged.base[t]
        if need > least:
            least, at = need, t
        held += sum(staged.sizes[d] for d in operation.makes if d in staged.held)
    return least, at


class _Search:
    """The rounds of one solve, and what they have proven so far."""

    def __init__(self, staged: Staged, request: Request, start: Runs | None, around_share: float) -> None:
        self.staged, self.request = staged, request
        self.best, self.cost = start, staged.cost(start) if start else 0
        self.bound = 0
        self.positions: set[Cell] = set()
        self.covers: list[Cover] = []
        self.infeasible = ""
        self.interrupted = self.done = False
        self.cap = max(CAP, request.time_limit / 12)
        self.around: Neighbourhoods | None = None
        self.around_share = around_share
        self.eager = sum(op.time for op in staged.operations)

    def offer(self, runs: Runs | None) -> None:
        """Take ``runs``, which fit, if they cost less than the best."""
        if runs is not None and (self.best is None or self.staged.cost(runs) < self.cost):
            self.best, self.cost = runs, self.staged.cost(runs)

    @property
    def proven(self) -> bool:
        """Whether cost and bound meet, up to the gap asked for of the cost of reruns (not of the whole: stricter)."""
        return self.best is not None and self.cost - self.bound <= self.request.gap * self.cost

    @property
    def over(self) -> bool:
        """Whether the search is to end."""
        return self.proven or self.interrupted or self.done or bool(self.infeasible) or self.request.remaining() <= 0

    def share(self) -> float:
        """Seconds left for the heuristic: a quarter of the time limit."""
        return self.request.remaining() - 0.75 * self.request.time_limit

    def report(self, doing: str) -> None:
        """Tell how far it is."""
        best = self.eager + self.cost if self.best is not None else None
        self.request.report(best, self.eager + self.bound, doing)

    def round(self) -> None:
        """Solve the relaxation for the positions known so far, and learn from it."""
        model = Relaxation(self.staged, self.request.budget, self.positions, self.covers)
        seconds = min(self.cap, max(0.1, self.request.remaining()))
        effort = Effort(self.request.milp, self.request.threads, self.request.gap, seconds)
        start = start_values(model, timeline(self.staged, self.best)) if self.best is not None else None
        before = self.request.seconds()
        try:
            outcome = run(model.program, effort, start)
        except Interrupted as interrupt:
            outcome, self.interrupted = interrupt.outcome, True
        spent = self.request.seconds() - before
        if outcome.bound == INFINITY and self.best is None:
            self.infeasible = _no_solution(len(self.positions), self.request.budget)
            return
        # Tolerances of the solver: 1e-5 of the unit, which is 1e-9 of the time of all operations.
        if outcome.bound < INFINITY:
            self.bound = max(self.bound, ceil((outcome.bound - 1e-5) * model.time_unit))
        if outcome.values is not None:
            self.learn(model, outcome)
        else:
            self.done = outcome.optimal
        if self.best is not None:
            self.bound = min(self.bound, self.cost)
        if not outcome.optimal:
            self.cap *= 2
        self.report(f"{len(self.positions)} positions")
        if spent > CAP / 2 and not self.over:
            self.search_around(self.around_share * spent)

    def learn(self, model: Relaxation, outcome: Outcome) -> None:
        """Take what a solution teaches: a schedule, or cells where it oversteps.

        An optimum that fits, or shows nothing new, ends the search: the solver's tolerances leave no more to prove.
        """
        assert outcome.values is not None
        spelled = spell(model, outcome.values)
        spread = timeline(self.staged, spelled.runs)
        if spread.peak <= self.request.budget:
            self.offer(spelled.runs)
            self.done = outcome.optimal
            return
        if self.best is None or self.staged.cost(spelled.runs) < self.cost:
            self.offer(repair(self.staged, self.request.budget, spelled.runs, self.share_of_round()))
        cells = peaks(spread, self.request.budget)
        new = {*cells, *spelled.conflicts} - self.positions
        self.positions |= new
        if not new:
            covers = overstepped(model, outcome.values, cells)
            self.covers += covers
            self.done = not covers

    def share_of_round(self) -> Callable[[], float]:
        """Seconds left for a repair: half the cap of a round, more where there is no schedule yet."""
        share = self.cap / 2 if self.best is not None else max(self.cap / 2, self.request.time_limit / 8)
        end = self.request.seconds() + min(share, self.request.remaining())
        return lambda: end - self.request.seconds()

    def search_around(self, seconds: float) -> None:
        """Improve the best schedule for about as long as the last round took."""
        if self.best is None:
            return
        if self.around is None:
            self.around = Neighbourhoods(self.staged, self.request, self.positions)
        end = self.request.seconds() + min(seconds, self.request.remaining())

        def told(runs: Runs) -> None:
            self.offer(runs)
            self.report("neighbourhoods")

        self.around.improve(self.best, lambda: end - self.request.seconds(), self.bound, told)


def solve_staged(
    staged: Staged,
    request: Request,
    start: Runs | None = None,
    positions: frozenset[Cell] = frozenset(),
    hierarchical: bool = False,
) -> Found:
    """The cheapest reruns within ``request.budget``.

    ``start``: a schedule that fits; ``positions``: cells worth looking at; both where known from another solve.
    ``hierarchical``: neighbourhoods get three times as long as programs of the whole graph. Ctrl-C ends the search;
    it is raised again only where there is no schedule to return.
    """
    least, step = least_step(staged)
    if least > request.budget:
        return Found(None, 0, _too_large(least, step, request.budget))
    none = timeline(staged, staged.none())
    if none.peak <= request.budget:
        return Found(staged.none(), 0)
    search = _Search(staged, request, start, 3.0 if hierarchical else 1.0)
    search.positions.update(positions or peaks(none, request.budget))
    try:
        if start is None:
            search.offer(repair(staged, request.budget, staged.none(), search.share))
        while not search.over:
            search.round()
    except KeyboardInterrupt:
        search.interrupted = True
    if search.interrupted and search.best is None:
        raise KeyboardInterrupt
    return Found(search.best, search.bound, search.infeasible, search.interrupted, frozenset(search.positions))


def _too_large(least: int, step: int, budget: int) -> str:
    return (
        f"step {step} alone needs {format_bytes(least)} ({least} bytes) with what it reads, "
        f"more than the budget of {budget} bytes"
    )


def _no_solution(positions: int, budget: int) -> str:
    return (
        f"no schedule in the fixed order of first runs fits {format_bytes(budget)} ({budget} bytes): "
        f"an integer program that looks at {positions} of its cells only has no solution"
    )
