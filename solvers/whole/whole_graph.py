"""The whole-graph solver: relax, solve, find the cells over budget, and limit memory there too.

``solve_staged`` is exact for the class of ``solvers.whole.stages``. It ends with a schedule and a lower bound that
meet, or with a proof that no schedule fits, or at the time limit with the best schedule and bound so far. Each round
solves a ``Relaxation`` for the known positions, whose bound holds for all schedules of the class. If the reruns of its
solution do not fit, ``solvers.whole.repair`` makes a schedule of them: an upper bound, and the start of the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil

from solvers.milp.milp import INFINITY, Interrupted, Outcome, run
from solvers.milp.options import SolverOptions
from solvers.solve import Request
from solvers.text import format_bytes
from solvers.whole.neighbourhood import Neighbourhoods
from solvers.whole.relaxation import Cover, Relaxation
from solvers.whole.relaxation_runs import Values, overstepped, spell, start_values
from solvers.whole.repair import repair
from solvers.whole.stages import Cell, Reruns, Staged, peaks, timeline

CAP = 2.0
"""Least limit in seconds on the first rounds; the limit doubles when a round reaches it."""


@dataclass(frozen=True, slots=True)
class StagedSolution:
    """The result of ``solve_staged``. ``runs``: the best reruns, or None. ``bound``: proven least time of reruns.

    ``infeasible``: why no schedule of the class fits, if that is proven. ``positions``: cells whose memory decides.
    """

    runs: Reruns | None
    bound: int
    infeasible: str = ""
    interrupted: bool = False
    positions: frozenset[Cell] = frozenset()


def least_step(staged: Staged) -> tuple[int, int]:
    """Bytes that every budget needs: the most that one step takes with what it reads and held data; and that step."""
    held = least = at = 0
    for t, operation in enumerate(staged.operations):
        read = sum(staged.sizes[d] for d in staged.reads[t] if d not in staged.held)
        need = read + held + operation.own + staged.base[t]
        if need > least:
            least, at = need, t
        held += sum(staged.sizes[d] for d in operation.makes if d in staged.held)
    return least, at


class _Search:
    """The rounds of one solve: what they have learned, and why they end.

    ``runs``, ``cost``: the cheapest reruns that fit so far, and their time. ``bound``: proven least time of reruns.
    ``positions``: cells whose memory decides. ``covers``: those that a solver overstepped. ``infeasible``: why nothing
    fits. ``done``: no round can prove more. ``cap``: seconds of a round at most. ``hierarchical``: as for
    ``solve_staged``.
    """

    def __init__(
        self, staged: Staged, request: Request, start: Reruns | None, positions: Iterable[Cell], hierarchical: bool
    ) -> None:
        self.staged, self.request, self.hierarchical = staged, request, hierarchical
        self.runs = start
        self.cost = staged.cost(start) if start else 0
        self.bound = 0
        self.positions = set(positions)
        self.covers: list[Cover] = []
        self.infeasible = ""
        self.interrupted = self.done = False
        self.cap = max(CAP, request.time_limit / 12)
        self.neighbourhoods: Neighbourhoods | None = None

    def offer(self, runs: Reruns | None) -> None:
        """Take ``runs``, which fit, if they cost less than the best."""
        if runs is not None and (self.runs is None or self.staged.cost(runs) < self.cost):
            self.runs, self.cost = runs, self.staged.cost(runs)

    @property
    def ended(self) -> bool:
        """Whether another round would be of no use, or no time is left for one.

        Cost and bound are to meet up to the gap of the cost of reruns (not of the whole step: stricter).
        """
        proven = self.runs is not None and self.cost - self.bound <= self.request.gap * self.cost
        return proven or self.interrupted or self.done or bool(self.infeasible) or self.request.remaining() <= 0

    def report(self, doing: str) -> None:
        """Tell the caller the best cost and bound so far."""
        eager = self.staged.eager_time
        cost = None if self.runs is None else eager + self.cost
        self.request.report(cost, eager + self.bound, doing)

    def round(self) -> None:
        """Solve the relaxation for the positions known so far, and learn from it."""
        count = len(self.positions)
        model = Relaxation(self.staged, self.request.budget, self.positions, self.covers)
        before = self.request.seconds()
        outcome = self._solve(model)
        spent = self.request.seconds() - before
        if outcome.bound == INFINITY and self.runs is None:
            self.infeasible = _no_solution(count, self.request.budget)
            return
        # Tolerances of the solver: 1e-5 of the unit, which is 1e-9 of the time of all operations.
        if outcome.bound < INFINITY:
            self.bound = max(self.bound, ceil((outcome.bound - 1e-5) * model.time_unit))
        if outcome.values is not None:
            self._learn(model, outcome.values, outcome.optimal)
        else:
            self.done = outcome.optimal
        if self.runs is not None:
            self.bound = min(self.bound, self.cost)
        if not outcome.optimal:
            self.cap *= 2
        self.report(f"{len(self.positions)} positions")
        if spent > CAP / 2 and not self.ended:
            self._search_around(3.0 * spent if self.hierarchical else spent)

    def _solve(self, model: Relaxation) -> Outcome:
        """Solve ``model``, starting from the best schedule so far; remember Ctrl-C."""
        request = self.request
        seconds = min(self.cap, max(0.1, request.remaining()))
        start = start_values(model, timeline(self.staged, self.runs)) if self.runs is not None else None
        try:
            return run(model.program, SolverOptions(request.milp, request.gap, seconds, request.threads), start)
        except Interrupted as interrupt:
            self.interrupted = True
            return interrupt.outcome

    def _learn(self, model: Relaxation, values: Values, optimal: bool) -> None:
        """Take from a solution a schedule, or the cells in which it is over budget.

        An optimum that fits ends the search, and so does one that shows no new cell and no cover: what the costs still
        differ by is within the solver's tolerances.
        """
        staged, budget = self.staged, self.request.budget
        spelled = spell(model, values)
        spread = timeline(staged, spelled.runs)
        if spread.peak <= budget:
            self.offer(spelled.runs)
            self.done = optimal
            return
        if self.runs is None or staged.cost(spelled.runs) < self.cost:
            self.offer(repair(staged, budget, spelled.runs, self._repair_time()))
        cells = peaks(spread, budget)
        new = {*cells, *spelled.conflicts} - self.positions
        self.positions |= new
        if not new:
            covers = overstepped(model, values, cells)
            self.covers += covers
            self.done = not covers

    def _repair_time(self) -> Callable[[], float]:
        """Seconds left for a repair: half the cap of a round, more while there is no schedule yet."""
        share = self.cap / 2 if self.runs is not None else max(self.cap / 2, self.request.time_limit / 8)
        return self._within(share)

    def _within(self, seconds: float) -> Callable[[], float]:
        """Seconds left of ``seconds`` from now, or of those that are left in all."""
        end = self.request.seconds() + min(seconds, self.request.remaining())
        return lambda: end - self.request.seconds()

    def _search_around(self, seconds: float) -> None:
        """Improve the best schedule by neighbourhoods, for ``seconds`` at most."""
        if self.runs is None:
            return
        if self.neighbourhoods is None:
            self.neighbourhoods = Neighbourhoods(self.staged, self.request, self.positions)

        def offer(runs: Reruns) -> None:
            self.offer(runs)
            self.report("neighbourhoods")

        self.neighbourhoods.improve(self.runs, self._within(seconds), self.bound, offer)


def solve_staged(
    staged: Staged,
    request: Request,
    start: Reruns | None = None,
    positions: frozenset[Cell] = frozenset(),
    hierarchical: bool = False,
) -> StagedSolution:
    """The cheapest reruns within ``request.budget``.

    ``start``: a schedule that fits, and ``positions``: cells whose memory decides, if known from another solve.
    ``hierarchical``: neighbourhoods get three times as long as programs of the whole graph. Ctrl-C ends the search. It
    is raised again only if there is no schedule to return.
    """
    budget = request.budget
    least, step = least_step(staged)
    if least > budget:
        alone = f"step {step} alone needs {format_bytes(least)} ({least} bytes) with what it reads"
        return StagedSolution(None, 0, f"{alone}, more than the budget of {budget} bytes")
    none = timeline(staged, staged.none())
    if none.peak <= budget:
        return StagedSolution(staged.none(), 0)
    search = _Search(staged, request, start, positions or peaks(none, budget), hierarchical)
    try:
        if start is None:  # a quarter of the time limit for the heuristic
            some = repair(staged, budget, staged.none(), lambda: request.remaining() - 0.75 * request.time_limit)
            search.offer(some)
        while not search.ended:
            search.round()
    except KeyboardInterrupt:
        search.interrupted = True
    if search.interrupted and search.runs is None:
        raise KeyboardInterrupt
    known = frozenset(search.positions)
    return StagedSolution(search.runs, search.bound, search.infeasible, search.interrupted, known)


def _no_solution(positions: int, budget: int) -> str:
    return (
        f"no frontier-advancing schedule in the fixed order of first runs fits {format_bytes(budget)} ({budget} bytes; "
        "frontier-advancing: between two first runs, operations run again in order, each at most once): the integer "
        f"program that limits memory in only {positions} of its cells has no solution"
    )
