"""The whole-graph solver: relax, solve, find the cells over budget, and limit memory there too.

``solve_staged`` is exact for the class of ``solvers.whole.stages``. It ends with a schedule and a lower bound that
meet, or with a proof that no schedule fits, or at the time limit with the best schedule and bound so far. Each round
solves a ``Relaxation`` for the known positions, whose bound holds for all schedules of the class. If the reruns of its
solution do not fit, ``solvers.whole.repair`` makes a schedule of them: an upper bound, and the start of the next round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from solvers.milp.milp import INFINITY, Effort, Interrupted, Outcome, run
from solvers.solve import Request
from solvers.text import format_bytes
from solvers.whole.neighbourhood import Neighbourhoods
from solvers.whole.relaxation import Cover, Relaxation, relax
from solvers.whole.relaxation_runs import overstepped, spell, start_values
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


@dataclass
class _Best:
    """The cheapest schedule so far, as reruns that fit, and the proven lower bound; costs are times of reruns."""

    runs: Reruns | None
    cost: int
    bound: int = 0

    def offer(self, staged: Staged, runs: Reruns | None) -> None:
        """Take ``runs``, which fit, if they cost less than the best."""
        if runs is not None and (self.runs is None or staged.cost(runs) < self.cost):
            self.runs, self.cost = runs, staged.cost(runs)

    def proven(self, gap: float) -> bool:
        """Whether cost and bound meet, up to ``gap`` of the cost of reruns (not of the whole step: stricter)."""
        return self.runs is not None and self.cost - self.bound <= gap * self.cost


@dataclass
class _Learned:
    """What the rounds have learned: cells whose memory decides, and covers that a solver overstepped."""

    positions: set[Cell]
    covers: list[Cover]


@dataclass
class _End:
    """Why the rounds end: nothing fits, Ctrl-C, or no round can prove more."""

    infeasible: str = ""
    interrupted: bool = False
    done: bool = False


class _Search:
    """The rounds of one solve. ``cap``: seconds of a round at most. ``hierarchical``: as for ``solve_staged``."""

    def __init__(self, staged: Staged, request: Request, best: _Best, learned: _Learned, hierarchical: bool) -> None:
        self.staged, self.request = staged, request
        self.best, self.learned, self.end = best, learned, _End()
        self.cap = max(CAP, request.time_limit / 12)
        self.neighbourhoods: Neighbourhoods | None = None
        self.hierarchical = hierarchical

    @property
    def ended(self) -> bool:
        """Whether another round would be of no use, or no time is left for one."""
        end, request = self.end, self.request
        stopped = end.interrupted or end.done or bool(end.infeasible)
        return self.best.proven(request.gap) or stopped or request.remaining() <= 0

    def report(self, doing: str) -> None:
        """Tell the caller the best cost and bound so far."""
        eager, best = sum(op.time for op in self.staged.operations), self.best
        self.request.report(eager + best.cost if best.runs is not None else None, eager + best.bound, doing)

    def round(self) -> None:
        """Solve the relaxation for the positions known so far, and learn from it."""
        positions = len(self.learned.positions)
        model = relax(self.staged, self.request.budget, self.learned.positions, self.learned.covers)
        before = self.request.seconds()
        outcome = self._solve(model)
        spent = self.request.seconds() - before
        if outcome.bound == INFINITY and self.best.runs is None:
            self.end.infeasible = _no_solution(positions, self.request.budget)
            return
        # Tolerances of the solver: 1e-5 of the unit, which is 1e-9 of the time of all operations.
        if outcome.bound < INFINITY:
            self.best.bound = max(self.best.bound, ceil((outcome.bound - 1e-5) * model.time_unit))
        if outcome.values is not None:
            self._learn(model, outcome)
        else:
            self.end.done = outcome.optimal
        if self.best.runs is not None:
            self.best.bound = min(self.best.bound, self.best.cost)
        if not outcome.optimal:
            self.cap *= 2
        self.report(f"{len(self.learned.positions)} positions")
        if spent > CAP / 2 and not self.ended:
            self._search_around(3.0 * spent if self.hierarchical else spent)

    def _solve(self, model: Relaxation) -> Outcome:
        """Solve ``model``, starting from the best schedule so far; remember Ctrl-C."""
        request, best = self.request, self.best.runs
        seconds = min(self.cap, max(0.1, request.remaining()))
        effort = Effort(request.milp, request.threads, request.gap, seconds)
        start = start_values(model, timeline(self.staged, best)) if best is not None else None
        try:
            return run(model.program, effort, start)
        except Interrupted as interrupt:
            self.end.interrupted = True
            return interrupt.outcome

    def _learn(self, model: Relaxation, outcome: Outcome) -> None:
        """Take from a solution a schedule, or the cells in which it is over budget.

        An optimum that fits ends the search, and so does one that shows no new cell and no cover: what the costs still
        differ by is within the solver's tolerances.
        """
        assert outcome.values is not None
        staged, budget, best, learned = self.staged, self.request.budget, self.best, self.learned
        spelled = spell(model, outcome.values)
        spread = timeline(staged, spelled.runs)
        if spread.peak <= budget:
            best.offer(staged, spelled.runs)
            self.end.done = outcome.optimal
            return
        if best.runs is None or staged.cost(spelled.runs) < best.cost:
            best.offer(staged, repair(staged, budget, spelled.runs, self._repair_time()))
        cells = peaks(spread, budget)
        new = {*cells, *spelled.conflicts} - learned.positions
        learned.positions |= new
        if not new:
            covers = overstepped(model, outcome.values, cells)
            learned.covers += covers
            self.end.done = not covers

    def _repair_time(self) -> Callable[[], float]:
        """Seconds left for a repair: half the cap of a round, more while there is no schedule yet."""
        request = self.request
        share = self.cap / 2 if self.best.runs is not None else max(self.cap / 2, request.time_limit / 8)
        end = request.seconds() + min(share, request.remaining())
        return lambda: end - request.seconds()

    def _search_around(self, seconds: float) -> None:
        """Improve the best schedule by neighbourhoods, for ``seconds`` at most."""
        if self.best.runs is None:
            return
        request = self.request
        if self.neighbourhoods is None:
            self.neighbourhoods = Neighbourhoods(self.staged, request, self.learned.positions)
        end = request.seconds() + min(seconds, request.remaining())

        def offer(runs: Reruns) -> None:
            self.best.offer(self.staged, runs)
            self.report("neighbourhoods")

        self.neighbourhoods.improve(self.best.runs, lambda: end - request.seconds(), self.best.bound, offer)


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
    least, step = least_step(staged)
    if least > request.budget:
        return StagedSolution(None, 0, _too_large(least, step, request.budget))
    none = timeline(staged, staged.none())
    if none.peak <= request.budget:
        return StagedSolution(staged.none(), 0)
    best = _Best(start, staged.cost(start) if start else 0)
    learned = _Learned(set(positions or peaks(none, request.budget)), [])
    search = _Search(staged, request, best, learned, hierarchical)
    try:
        if start is None:  # a quarter of the time limit for the heuristic
            best.offer(
                staged,
                repair(staged, request.budget, staged.none(), lambda: request.remaining() - 0.75 * request.time_limit),
            )
        while not search.ended:
            search.round()
    except KeyboardInterrupt:
        search.end.interrupted = True
    end = search.end
    if end.interrupted and best.runs is None:
        raise KeyboardInterrupt
    return StagedSolution(best.runs, best.bound, end.infeasible, end.interrupted, frozenset(learned.positions))


def _too_large(least: int, step: int, budget: int) -> str:
    return (
        f"step {step} alone needs {format_bytes(least)} ({least} bytes) with what it reads, "
        f"more than the budget of {budget} bytes"
    )


def _no_solution(positions: int, budget: int) -> str:
    return (
        f"no frontier-advancing schedule in the fixed order of first runs fits {format_bytes(budget)} ({budget} bytes; "
        "frontier-advancing: between two first runs, operations run again in order, each at most once): the integer "
        f"program that limits memory in only {positions} of its cells has no solution"
    )
