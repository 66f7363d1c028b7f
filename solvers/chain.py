"""Plans for a whole chain: the dynamic program's choices, spelled out, walked, and kept if they pay.

The table works in slots and with conservative constants, so its memory is only nominal. Its distinct
optima (``WALKS`` per table at most, evenly taken) are spelled out as schedules and walked; a budget gets
the cheapest schedule whose walked peak fits. That wins back what rounding lost, and makes time
non-increasing in the budget, whatever the order of the questions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from solvers.baselines import all_baselines, keep_everything
from solvers.chain_costs import ChainCosts, Options, chain_costs, kind_options
from solvers.chain_table import ChainTable
from solvers.errors import InfeasibleError
from solvers.ilp import Grid, Option
from solvers.problem import Problem
from solvers.schedule import Bwd, Loss, Run, Schedule, Step, drop_useless_runs, with_deletes
from solvers.text import format_bytes
from solvers.walker import Walk, step_name, walk

WALKS = 100
"""Schedules walked per table: about 1 s for 14 transformer layers, 4 s for 48."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule and what the walker says of it; ``source`` names the solver that found it."""

    schedule: Schedule
    walk: Walk
    source: str

    @property
    def peak(self) -> int:
        """Bytes."""
        return self.walk.peak

    @property
    def time(self) -> int:
        """Nanoseconds of the whole step."""
        return self.walk.time

    @property
    def overhead(self) -> float:
        """Recompute time as a fraction of the step without recomputation."""
        return self.walk.overhead


@dataclass(frozen=True, slots=True)
class Frontier:
    """Time against memory: ``points`` are (budget in bytes, overhead), overhead falling as the budget grows.

    Below ``min_budget`` there is no plan; from ``max_budget`` on, nothing is recomputed.
    """

    min_budget: int
    max_budget: int
    points: tuple[tuple[int, float], ...]


class ChainPlanner:
    """Plans one problem for any number of budgets. Setting up solves the blocks and fills the table."""

    def __init__(
        self, problem: Problem, options: Options | None = None, slots: int = 500, grid: Grid | None = None
    ) -> None:
        self.problem = problem
        self.options: Options = kind_options(problem, grid or Grid()) if options is None else options
        self.costs = chain_costs(problem, self.options)
        self._solutions = _cheapest_per_peak([*_known(problem), *_planned(problem, self.costs, slots)])

    def solve(self, budget: int) -> Solution:
        """The cheapest plan with a peak of at most ``budget`` bytes; ``InfeasibleError`` says what would do."""
        fitting = bisect_right([s.peak for s in self._solutions], budget)
        if fitting:
            return self._solutions[fitting - 1]
        least = self._solutions[0]
        at = least.schedule[least.walk.peak_step]
        step = f"step {least.walk.peak_step} ({step_name(self.problem, at)})"
        raise InfeasibleError(
            f"a budget of {format_bytes(budget)} is too small: the least this solver can plan for is "
            f"{format_bytes(least.peak)} ({least.peak} bytes), set by {step}; "
            "raise the budget or use a smaller batch",
            least.peak,
            step,
        )

    def frontier(self) -> Frontier:
        """The whole time-against-memory curve."""
        keep = walk(self.problem, keep_everything(self.problem))
        points = tuple((s.peak, s.overhead) for s in self._solutions)
        return Frontier(self._solutions[0].peak, keep.peak, points)


def solve_chain(problem: Problem, budget: int, options: Options | None = None, slots: int = 500) -> Solution:
    """The cheapest schedule for one budget (bytes); keep-everything without any solving if that fits."""
    schedule = keep_everything(problem)
    walked = walk(problem, schedule)
    if walked.peak <= budget:
        return Solution(schedule, walked, "keep everything")
    return ChainPlanner(problem, options, slots).solve(budget)


def frontier(problem: Problem, options: Options | None = None, slots: int = 500) -> Frontier:
    """The time-against-memory curve of ``problem``."""
    return ChainPlanner(problem, options, slots).frontier()


def _known(problem: Problem) -> Iterator[Solution]:
    for name, schedule in all_baselines(problem).items():
        yield Solution(schedule, walk(problem, schedule), name)


def _planned(problem: Problem, costs: ChainCosts, slots: int) -> Iterator[Solution]:
    """Every distinct optimum of the table; a second table has finer slots for budgets in the lowest quarter."""
    need = costs.keep_everything_need()
    if not costs.blocks or not need:
        return
    coarse = ChainTable(costs, -(-need // slots), slots + costs.blocks + 2)
    fine = ChainTable(costs, -(-need // (4 * slots)), slots + costs.blocks + 2)
    covered = fine.unit * slots
    for table, nominal in ((fine, 0), (coarse, covered)):
        for m in _evenly([m for m in table.breakpoints() if m * table.unit >= nominal], WALKS):
            schedule = with_deletes(problem, drop_useless_runs(problem, expand(problem, table, m)))
            yield Solution(schedule, walk(problem, schedule), "chain")


def _evenly(points: list[int], most: int) -> list[int]:
    """At most ``most`` of ``points``, both ends among them."""
    if len(points) <= most:
        return points
    return [points[index * (len(points) - 1) // (most - 1)] for index in range(most)]


def _cheapest_per_peak(solutions: list[Solution]) -> list[Solution]:
    """Solutions by rising peak, each cheaper than all before it."""
    kept: list[Solution] = []
    for s in sorted(solutions, key=lambda s: (s.peak, s.time)):
        if not kept or s.time < kept[-1].time:
            kept.append(s)
    return kept


def expand(problem: Problem, table: ChainTable, m: int) -> list[Step]:
    """The order of steps that the table's choices for ``m`` slots stand for."""
    out: list[Step] = []
    _expand_top(problem, table, m, out)
    return out


def _expand_top(problem: Problem, table: ChainTable, m: int, out: list[Step]) -> None:
    costs = table.costs
    later: list[tuple[int, int, int, Option | None]] = []
    i = 0
    while i < costs.blocks:
        choice = int(table.top[i].choices[m])
        option = costs.options[i][choice] if choice >= 0 else None
        k = i + 1 if option else -choice
        out += [Run(n) for n in range(problem.blocks[i].start, problem.blocks[k - 1].stop)]
        later.append((i, k - 1, m, option))
        m -= table.slots(costs.interface_bytes[i][k] + (option.save if option else 0))
        i = k
    out.append(Loss())
    for first, last, memory, option in reversed(later):
        if option:
            _expand_backward(problem, first, option, out)
        else:
            _expand_inner(problem, table, first, last, memory, out)


def _expand_inner(problem: Problem, table: ChainTable, i: int, j: int, m: int, out: list[Step]) -> None:
    costs = table.costs
    choice = int(table.inner[i, j].choices[m])
    option = costs.options[i][choice] if choice >= 0 else None
    k = i + 1 if option else -choice
    if not (option and option.fresh and i == j):
        span = range(problem.blocks[i].start, problem.blocks[k - 1].stop)
        out += [Run(n) for n in span if problem.nodes[n].rerun]
    if k <= j:
        used = table.slots(costs.interface_bytes[i][k] + (option.save if option else 0))
        _expand_inner(problem, table, k, j, m - used, out)
    if option:
        _expand_backward(problem, i, option, out)
    else:
        _expand_inner(problem, table, i, k - 1, m, out)


def _expand_backward(problem: Problem, block: int, option: Option, out: list[Step]) -> None:
    start, stop = problem.blocks[block].start, problem.blocks[block].stop
    backwards = [n for n in reversed(range(start, stop)) if problem.nodes[n].backward]
    for runs, node in zip(option.runs, backwards, strict=True):
        out += [Run(start + i) for i in runs]
        out.append(Bwd(node))
