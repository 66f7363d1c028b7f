"""The whole graph by lazily generated positions: relax, solve, look where the schedule oversteps, look there too.

``solve_staged`` is exact for the class of ``solvers.stages``: it ends with a schedule and a lower bound that meet, or
a proof that none fits, or at the time limit with the best of both so far. Each round solves a ``Relaxation`` for the
positions known; its bound holds for all schedules. The reruns of its solution, where they do not fit, are
repaired by ``solvers.repair``, which gives a schedule (an upper bound, and the next round's start).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from solvers.milp import Effort, Outcome, run
from solvers.relaxation import Cover, Relaxation
from solvers.relaxation_runs import overstepped, spell, start_values
from solvers.repair import repair
from solvers.solve import Request
from solvers.stages import Cell, Runs, Staged, Timeline, timeline
from solvers.text import format_bytes

MOST_NEW = 12
"""Positions added per round at most: those that overstep most."""


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


def peaks(found: Timeline, budget: int, most: int = MOST_NEW) -> list[Cell]:
    """Of each stretch of cells over ``budget``, the one with most memory; the ``most`` worst of them."""
    over = found.memory > budget
    worst: list[tuple[int, Cell]] = []
    start = None
    for p in range(len(found.cells) + 1):
        inside = p < len(found.cells) and over[p]
        if inside and start is None:
            start = p
        if not inside and start is not None:
            top = start + int(found.memory[start:p].argmax())
            worst.append((int(found.memory[top]), found.cells[top]))
            start = None
    return [cell for _, cell in sorted(worst, reverse=True)[:most]]


class _Search:
    """The rounds of one solve, and what they have proven so far."""

    def __init__(self, staged: Staged, request: Request, start: Runs | None) -> None:
        self.staged, self.request = staged, request
        self.best, self.cost = start, staged.cost(start) if start else 0
        self.bound = 0
        self.positions: set[Cell] = set()
        self.covers: list[Cover] = []
        self.eager = sum(op.time for op in staged.operations)

    def offer(self, runs: Runs | None) -> None:
        """Take ``runs``, which fit, if they cost less than the best."""
        if runs is not None and (self.best is None or self.staged.cost(runs) < self.cost):
            self.best, self.cost = runs, self.staged.cost(runs)

    @property
    def proven(self) -> bool:
        return self.best is not None and self.cost - self.bound <= self.request.gap * self.cost

    def share(self) -> float:
        """Seconds left for the heuristic: a tenth of the time limit."""
        return self.request.remaining() - 0.9 * self.request.time_limit

    def report(self, doing: str) -> None:
        best = self.eager + self.cost if self.best is not None else None
        self.request.report(best, self.eager + self.bound, doing)

    def solve(self, seconds: float) -> tuple[Relaxation, Outcome]:
        """One round: the relaxation for the positions known so far."""
        model = Relaxation(self.staged, self.request.budget, self.positions, self.covers)
        effort = Effort(self.request.milp, self.request.threads, self.request.gap, seconds)
        start = start_values(model, timeline(self.staged, self.best)) if self.best is not None else None
        outcome = run(model.program, effort, start)
        if outcome.bound < 1e20:
            # Tolerances of the solver: 1e-5 of the unit, which is 1e-9 of the time of all operations.
            bound = ceil((outcome.bound - 1e-5) * model.time_unit)
            self.bound = max(self.bound, min(bound, self.cost) if self.best is not None else bound)
        self.report(f"{len(self.positions)} positions")
        return model, outcome

    def add(self, model: Relaxation, outcome: Outcome) -> bool:
        """Take what a solution teaches; False if it teaches nothing new, so that the search ends."""
        assert outcome.values is not None
        spelled = spell(model, outcome.values)
        spread = timeline(self.staged, spelled.runs)
        if spread.peak <= self.request.budget:
            self.offer(spelled.runs)
            return not self.proven and not outcome.optimal
        self.offer(repair(self.staged, self.request.budget, spelled.runs, self.request.remaining))
        cells = peaks(spread, self.request.budget)
        new = {*cells, *spelled.conflicts} - self.positions
        self.positions |= new
        if not new:
            self.covers += [overstepped(model, outcome.values, cell) for cell in cells]
        return True


def solve_staged(
    staged: Staged, request: Request, start: Runs | None = None, positions: frozenset[Cell] = frozenset()
) -> Found:
    """The cheapest reruns within ``request.budget``.

    ``start``: a schedule that fits; ``positions``: cells worth looking at; both where known from another solve.
    """
    least, step = least_step(staged)
    if least > request.budget:
        return Found(None, 0, _too_large(least, step, request.budget))
    none = timeline(staged, staged.none())
    if none.peak <= request.budget:
        return Found(staged.none(), 0)
    search = _Search(staged, request, start)
    search.positions.update(positions or peaks(none, request.budget))
    if start is None:
        search.offer(repair(staged, request.budget, staged.none(), search.share))
    interrupted, infeasible = False, ""
    while request.remaining() > 0 and not search.proven and not interrupted:
        model, outcome = search.solve(max(0.1, request.remaining()))
        interrupted = outcome.interrupted
        if outcome.values is None:
            if outcome.optimal and not interrupted:
                infeasible = _no_solution(len(search.positions), request.budget)
            break
        if not search.add(model, outcome):
            break
    return Found(search.best, search.bound, infeasible, interrupted, frozenset(search.positions))


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
