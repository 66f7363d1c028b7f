"""Time against memory of a graph: a solve for each of many budgets, which starts from the solves before it.

The positions that decide one budget mostly decide the next one, so each solve starts with those known. A schedule for a
smaller budget fits a larger one, so time never rises with the budget.
"""

from __future__ import annotations

from solvers.curve import Frontier
from solvers.pareto import front
from solvers.solve import Request
from solvers.whole.stages import Cell, Reruns, Staged, timeline
from solvers.whole.whole_graph import StagedSolution, least_step, solve_staged

POINTS = 16
"""Budgets between the smallest feasible one and that of keeping everything."""

SHARE = 0.4
"""Part of the time limit for the smallest feasible budget."""


class _Curve:
    """The schedules so far, with peak and cost, and the positions known."""

    def __init__(self, staged: Staged, request: Request) -> None:
        self.staged, self.request = staged, request
        self.positions: frozenset[Cell] = frozenset()
        self.schedules: list[tuple[int, int, Reruns]] = []  # peak, cost, runs
        self.keep(staged.none())

    def keep(self, runs: Reruns) -> int:
        """Remember a schedule, and return its peak."""
        peak = timeline(self.staged, runs).peak
        self.schedules.append((peak, self.staged.cost(runs), runs))
        return peak

    def solve(self, budget: int, seconds: float) -> StagedSolution:
        """The best within ``budget`` bytes that is found in ``seconds``."""
        fitting = [s for s in self.schedules if s[0] <= budget]
        start = min(fitting, key=lambda s: s[1])[2] if fitting else None
        request = Request(budget, seconds, self.request.threads, self.request.gap, self.request.milp)
        solution = solve_staged(self.staged, request, start, self.positions)
        self.positions |= solution.positions
        return solution

    def smallest(self, until: float) -> int:
        """Bisect for the smallest feasible budget; return the largest budget proven to be too small, plus 1."""
        low = least_step(self.staged)[0]
        high = min(peak for peak, _, _ in self.schedules)
        guess, doubtful = low, low  # budgets below ``doubtful`` are too small or were not decided
        while doubtful < high and self.request.seconds() < until:
            solution = self.solve(guess, max(0.5, (until - self.request.seconds()) / 6))
            if solution.runs is not None:
                high = min(high, self.keep(solution.runs))
            else:
                doubtful = guess + 1
                low = guess + 1 if solution.infeasible else low
            if solution.interrupted:
                raise KeyboardInterrupt
            guess = (doubtful + high) // 2
        return low


def frontier_staged(staged: Staged, request: Request) -> Frontier:
    """The curve, within ``request.time_limit`` seconds. After Ctrl-C, the schedules so far make the curve."""
    curve = _Curve(staged, request)
    low = least_step(staged)[0]
    keep = curve.schedules[0][0]
    try:
        low = curve.smallest(SHARE * request.time_limit)
        start = min(peak for peak, _, _ in curve.schedules)
        budgets = [start + (keep - start) * k // POINTS for k in range(POINTS)]
        for left, budget in zip(range(POINTS, 0, -1), budgets, strict=True):
            solution = curve.solve(budget, max(0.2, request.remaining() / left))
            if solution.runs is not None:
                curve.keep(solution.runs)
            request.report(None, 0, f"budget {budget}")
            if solution.interrupted:
                break
    except KeyboardInterrupt:
        pass
    eager = staged.eager_time or 1
    points = tuple((peak, cost / eager) for peak, cost, _ in front(curve.schedules, lambda s: s[:2]))
    return Frontier(points[0][0], keep, points, min(low, points[0][0]))
