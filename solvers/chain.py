"""Plans for a whole chain: the dynamic program's choices, spelled out, walked, and kept if they pay.

The table works in slots and with conservative constants, so its memory is only nominal. Its distinct
optima (``WALKS`` per table at most, evenly taken) are spelled out as schedules and walked; a budget gets
the cheapest schedule whose walked peak fits. That wins back what rounding lost, and makes time
non-increasing in the budget, whatever the order of the questions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from solvers.baselines import all_baselines, keep_everything
from solvers.chain_costs import Options, chain_costs, kind_options
from solvers.chain_table import ChainTable
from solvers.errors import InfeasibleError
from solvers.ilp import LOOSE, TIGHT, Grid, Option, pareto
from solvers.problem import Problem
from solvers.schedule import Bwd, Loss, Run, Schedule, Step, drop_useless_runs, with_deletes
from solvers.solution import Frontier
from solvers.text import format_bytes
from solvers.walker import Walk, step_name, walk

WALKS = 200
"""Schedules walked per table at most."""

NEIGHBOURS = 4
"""Candidates looked at on both sides of where bisection ends."""

TIGHT_BELOW = 2
"""Budgets below so many times the largest block's need get options with a limited peak."""


@dataclass(frozen=True, slots=True)
class ChainPlan:
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


class ChainPlanner:
    """Plans one problem for any number of budgets; blocks are solved, and schedules walked, when first needed.

    Options with a limited peak cost most of the solver's time and serve only budgets that are small
    beside a single block: they are left out for budgets above ``TIGHT_BELOW`` times what the largest
    block needs to keep everything. ``options`` (per kind) or ``grid`` replace the default ones. ``report`` is told
    what is being done, and which part of it is (0 to 1).
    """

    def __init__(
        self,
        problem: Problem,
        options: Options | None = None,
        slots: int = 500,
        grid: Grid | None = None,
        report: Callable[[str, float], None] = lambda doing, part: None,
    ) -> None:
        self.problem, self.slots, self.report = problem, slots, report
        self._given: Options | None = kind_options(problem, grid) if grid else options
        self._loose: _Candidates | None = None
        self._all: _Candidates | None = None
        self._known = [ChainPlan(s, walk(problem, s), name) for name, s in all_baselines(problem).items()]

    @property
    def options(self) -> Options:
        """All options per kind."""
        return self._full().options

    def _full(self) -> _Candidates:
        if self._all is None:
            options = self._given
            if options is None:
                loose = self._partial().options
                tight = kind_options(self.problem, TIGHT, partial(self.report, "blocks (tight)"))
                options = {kind: pareto((*loose[kind], *tight[kind])) for kind in loose}
            self.report("chain", 0.0)
            self._all = _Candidates(self.problem, options, self.slots)
        return self._all

    def _partial(self) -> _Candidates:
        if self._loose is None:
            options = kind_options(self.problem, LOOSE, partial(self.report, "blocks"))
            self.report("chain", 0.0)
            self._loose = _Candidates(self.problem, options, self.slots)
        return self._loose

    def solve(self, budget: int) -> ChainPlan:
        """The cheapest plan with a peak of at most ``budget`` bytes; ``InfeasibleError`` says what would do."""
        found = None
        if self._given is None and budget >= TIGHT_BELOW * _largest_need(self._partial().options):
            found = self._partial().cheapest(budget)
        pool: list[ChainPlan] = [*self._known, *(self._all.walked.values() if self._all else ())]
        if found is None:  # small budgets, where peaks do not rise evenly: look at everything
            pool += self._full().all()
        fitting: list[ChainPlan] = [s for s in (*pool, found) if s is not None and s.peak <= budget]
        if fitting:
            return min(fitting, key=lambda s: (s.time, s.peak))
        least = min((*self._known, *self._full().all()), key=lambda s: (s.peak, s.time))
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
        solutions = _cheapest_per_peak([*self._known, *self._full().all()])
        keep = walk(self.problem, keep_everything(self.problem))
        return Frontier(solutions[0].peak, keep.peak, tuple((s.peak, s.overhead) for s in solutions))


def solve_chain(problem: Problem, budget: int, options: Options | None = None, slots: int = 500) -> ChainPlan:
    """The cheapest schedule for one budget (bytes); keep-everything without any solving if that fits."""
    schedule = keep_everything(problem)
    walked = walk(problem, schedule)
    if walked.peak <= budget:
        return ChainPlan(schedule, walked, "keep everything")
    return ChainPlanner(problem, options, slots).solve(budget)


def frontier(problem: Problem, options: Options | None = None, slots: int = 500) -> Frontier:
    """The time-against-memory curve of ``problem``."""
    return ChainPlanner(problem, options, slots).frontier()


def _largest_need(options: Options) -> int:
    """Bytes of the backward of the largest block that keeps everything."""
    return max((o.backward_peak for of_kind in options.values() for o in of_kind if not o.time), default=0)


class _Candidates:
    """The distinct optima of the table for one set of options, spelled out as schedules when asked for.

    A second table has finer slots for budgets in the lowest quarter.
    """

    def __init__(self, problem: Problem, options: Options, slots: int) -> None:
        self.problem, self.options = problem, options
        costs = chain_costs(problem, options)
        need = costs.keep_everything_need()
        self.points: list[tuple[ChainTable, int]] = []  # by rising nominal memory
        self.walked: dict[int, ChainPlan] = {}
        if not costs.blocks or not need:
            return
        coarse = ChainTable(costs, -(-need // slots), slots + costs.blocks + 2)
        fine = ChainTable(costs, -(-need // (4 * slots)), slots + costs.blocks + 2)
        covered = fine.unit * slots
        for table, nominal in ((fine, 0), (coarse, covered)):
            self.points += [
                (table, m) for m in _evenly([m for m in table.breakpoints() if m * table.unit >= nominal], WALKS)
            ]

    def at(self, k: int) -> ChainPlan:
        """Candidate k as a schedule."""
        if k not in self.walked:
            table, m = self.points[k]
            order = drop_useless_runs(self.problem, expand(self.problem, table, m))
            schedule = with_deletes(self.problem, order)
            self.walked[k] = ChainPlan(schedule, walk(self.problem, schedule), "chain")
        return self.walked[k]

    def all(self) -> list[ChainPlan]:
        """Every candidate."""
        return [self.at(k) for k in range(len(self.points))]

    def cheapest(self, budget: int) -> ChainPlan | None:
        """The cheapest candidate that fits: by bisection, then among its neighbours (peaks rise nearly always)."""
        low, high = 0, len(self.points)
        while low < high:
            middle = (low + high) // 2
            if self.at(middle).peak <= budget:
                low = middle + 1
            else:
                high = middle
        near = [self.at(k) for k in range(max(0, low - NEIGHBOURS), min(len(self.points), low + NEIGHBOURS))]
        return min((s for s in near if s.peak <= budget), key=lambda s: (s.time, s.peak), default=None)


def _evenly(points: list[int], most: int) -> list[int]:
    """At most ``most`` of ``points``, both ends among them."""
    if len(points) <= most:
        return points
    return [points[index * (len(points) - 1) // (most - 1)] for index in range(most)]


def _cheapest_per_peak(solutions: list[ChainPlan]) -> list[ChainPlan]:
    """Solutions by rising peak, each cheaper than all before it."""
    kept: list[ChainPlan] = []
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
    later: list[tuple[int, int, int, int | None]] = []
    i = 0
    while i < table.costs.blocks:
        option, k, left = table.top_choice(i, m)
        out += [Run(n) for n in range(problem.blocks[i].start, problem.blocks[k - 1].stop)]
        later.append((i, k - 1, m, option))
        i, m = k, left
    out.append(Loss())
    for first, last, memory, option in reversed(later):
        if option is None:
            _expand_inner(problem, table, first, last, memory, out)
        else:
            _expand_backward(problem, first, table.costs.options[first][option], out)


def _expand_inner(problem: Problem, table: ChainTable, first: int, last: int, memory: int, out: list[Step]) -> None:
    """Without recursion: chains are long."""
    todo: list[tuple[int, int, int] | tuple[int, Option]] = [(first, last, memory)]
    while todo:
        item = todo.pop()
        if len(item) == 2:
            _expand_backward(problem, *item, out)
            continue
        i, j, m = item
        choice, k, left = table.inner_choice(i, j, m)
        option = None if choice is None else table.costs.options[i][choice]
        if not (option and option.fresh and i == j):
            span = range(problem.blocks[i].start, problem.blocks[k - 1].stop)
            out += [Run(n) for n in span if problem.nodes[n].rerun]
        todo.append((i, option) if option else (i, k - 1, m))
        if k <= j:
            todo.append((k, j, left))


def _expand_backward(problem: Problem, block: int, option: Option, out: list[Step]) -> None:
    start, stop = problem.blocks[block].start, problem.blocks[block].stop
    backwards = [n for n in reversed(range(start, stop)) if problem.nodes[n].backward]
    for runs, node in zip(option.runs, backwards, strict=True):
        out += [Run(start + i) for i in runs]
        out.append(Bwd(node))
