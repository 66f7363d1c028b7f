"""Plans for a chain of blocks: the choices of the dynamic program as schedules, walked, the cheapest that fits.

The table counts memory in slots and with conservative constants, so its memory is only nominal. Its distinct optima are
candidates. They become schedules and are walked as bisection needs them, or at even distances. The plan for a budget is
the cheapest schedule walked so far whose peak fits. So what rounding lost is not lost for the plan.

What is optimal: each option of a block, within the class of ``solvers.block.ilp_model`` and up to its gap; and the
composition of the given options, in slots, for persistent checkpoints and conservative constants. The plan as a whole
is not claimed to be optimal. ``lower_bound`` says how far from the best of all schedules it is at most.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain

from solvers.baselines import all_baselines, keep_everything
from solvers.block.ilp import Grid, TimeLimit, pareto
from solvers.chain.bound import least_budget, lower_bound
from solvers.chain.costs import Options, SolvedViews, chain_costs, kind_options
from solvers.chain.expand import expand
from solvers.chain.table import ChainTable
from solvers.curve import Baseline, Frontier
from solvers.errors import InfeasibleError
from solvers.liveness import drop_useless_runs, with_deletes
from solvers.pareto import evenly, front
from solvers.problem import Block, Problem
from solvers.schedule import Schedule
from solvers.text import format_bytes
from solvers.walker import Walk, step_name, walk

SLOTS = 1000
"""Slots of a table for chains of up to ``SHORT`` blocks."""

SHORT = 100
"""Blocks up to which a table has ``SLOTS`` slots. Longer chains, whose tables take long, have half of them."""

SINGLES = 60
"""Nodes up to which each is tried as a block of its own."""

WALKS = 100
"""Most schedules walked, per set of options, for the frontier and for small budgets."""

NEIGHBOURS = 8
"""Candidates walked on each side of the one at which bisection ends."""

TIGHT_BELOW = 1.5
"""Options with a limited peak are solved for budgets below so many times what the largest block needs."""


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """A schedule and the walker's figures; ``source`` names the solver that found it."""

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
    """Plans one problem for any number of budgets. Blocks are solved, and schedules walked, when first needed.

    Options with a limited peak take most of the solver's time, and are of use only for budgets that are small beside a
    single block. They are not solved for budgets above ``TIGHT_BELOW`` times what the largest block needs to keep
    everything.

    ``options``: per kind of block, in place of solved ones. ``slots``: of a table; 0 for the default. ``report``:
    called with the current work and the part of it that is done, from 0 to 1. ``remaining``: seconds left for the
    search for options; at 0, the options found so far are used, and ``stopped`` counts the programs that were not
    solved to the end. ``solved``: options of blocks that other planners have solved; this one adds to it.
    """

    def __init__(
        self,
        problem: Problem,
        options: Options | None = None,
        slots: int = 0,
        grid: Grid | None = None,
        report: Callable[[str, float], None] = lambda doing, part: None,
        remaining: Callable[[], float] | None = None,
        solved: SolvedViews | None = None,
    ) -> None:
        self.problem, self.grid, self.report = problem, grid or Grid(), report
        self.limit = TimeLimit(remaining) if remaining else TimeLimit()
        self.slots = slots or (SLOTS if len(problem.blocks) <= SHORT else SLOTS // 2)
        self._given = options
        self._solved: SolvedViews = {} if solved is None else solved
        # That which keeps everything is the first.
        self._known = [ChainPlan(s, walk(problem, s), name) for name, s in all_baselines(problem).items()]

    @property
    def options(self) -> Options:
        """All options per kind."""
        return self._all.options

    @property
    def loose(self) -> Options:
        """Options per kind without a limit on the peak."""
        return self._loose.options

    @property
    def solved(self) -> Options | None:
        """The options per kind that were solved so far; None if no block was."""
        return next((found.options for found in self._so_far("_all", "_loose")), None)

    @property
    def stopped(self) -> int:
        """How many integer programs were stopped or skipped at a time limit, so that options may not be the best."""
        return self.limit.stopped

    @cached_property
    def _loose(self) -> _Candidates:
        """With options that were given, or those without a limit on the peak."""
        options = self._given
        if options is None:
            options = self._solve(dataclasses.replace(self.grid, peaks=(), fresh_peaks=()), "blocks")
        return self._candidates(options)

    @cached_property
    def _all(self) -> _Candidates:
        loose = self._loose
        if self._given is not None:
            return loose
        tight = self._solve(dataclasses.replace(self.grid, unlimited=False), "blocks (tight)")
        return self._candidates({kind: pareto((*of, *tight[kind])) for kind, of in loose.options.items()})

    @cached_property
    def _single(self) -> _Candidates | None:
        """With each node as a block of its own, if they are few. There is nothing to solve in a block of one node.

        Where a graph has few blocks, the table has little to choose from, and where most blocks would have one node
        that saves one tensor, its choices are the best ones.
        """
        if len(self.problem.nodes) > SINGLES:
            return None
        problem = with_single_nodes(self.problem)
        return _Candidates(problem, kind_options(problem, Grid(unlimited=False, peaks=(), fresh_peaks=())), self.slots)

    def _candidates(self, options: Options) -> _Candidates:
        self.report("chain", 0.0)
        return _Candidates(self.problem, options, self.slots)

    def _so_far(self, *names: str) -> Iterator[_Candidates]:
        """Those of these names that were needed so far."""
        return (found for name in names if (found := vars(self).get(name)) is not None)

    def _solve(self, grid: Grid, doing: str) -> Options:
        return kind_options(self.problem, grid, partial(self.report, doing), self.limit, self._solved)

    def solve(self, budget: int) -> ChainPlan:
        """The cheapest plan with a peak of at most ``budget`` bytes. ``InfeasibleError`` has the least budget known."""
        best = self.found(budget)
        if best is None or self._is_small(budget):  # peaks do not rise evenly there, where bisection may miss the best
            self.walked()
            best = self.best_known(budget)
        if best:
            return best
        least = min(self.walked(), key=lambda s: (s.peak, s.time))
        at = least.schedule[least.walk.peak_step]
        step = f"step {least.walk.peak_step} ({step_name(self.problem, at)})"
        raise InfeasibleError(
            f"a budget of {format_bytes(budget)} is too small: the least this solver can plan for is "
            f"{format_bytes(least.peak)} ({least.peak} bytes), set by {step}; "
            "raise the budget or use a smaller batch",
            least.peak,
            step,
            at,
        )

    def found(self, budget: int) -> ChainPlan | None:
        """The cheapest plan within ``budget`` bytes that is found by bisection; None if it finds none."""
        plan = self._loose.cheapest(budget)
        if self._single:
            self._single.cheapest(budget)
        if plan is None or self._is_small(budget):
            self._all.cheapest(budget)
        return self.best_known(budget)

    def _is_small(self, budget: int) -> bool:
        """Whether it is small beside what the largest block needs to keep everything."""
        keeping = (o.backward_peak for of_kind in self._loose.options.values() for o in of_kind if not o.time)
        return budget < TIGHT_BELOW * max(keeping, default=0)

    def best_known(self, budget: int) -> ChainPlan | None:
        """The cheapest plan within ``budget`` bytes of all that were walked so far."""
        walked = (candidates.walked.values() for candidates in self._so_far("_loose", "_all", "_single"))
        return _cheapest((*self._known, *chain.from_iterable(walked)), budget)

    def walked(self) -> list[ChainPlan]:
        """Plans of all kinds, from those that keep little to those that keep everything."""
        return [*self._known, *self._loose.all(), *(self._single.all() if self._single else ()), *self._all.all()]

    def lower_bound(self, budget: int) -> int:
        """Nanoseconds that every schedule within ``budget`` bytes takes at least, whatever its class."""
        return lower_bound(self.problem, budget, self.grid.solver.name)

    def frontier(self) -> Frontier:
        """Time against memory for all budgets. No schedule of any class needs less than its ``lower``."""
        solutions = front(self.walked(), lambda s: (s.peak, s.time))
        points = tuple((s.peak, s.overhead) for s in solutions)
        keep, least = self._known[0].peak, least_budget(self.problem)[0]
        usual = tuple(Baseline(plan.source, plan.peak, plan.overhead) for plan in self._known)
        return Frontier(solutions[0].peak, keep, points, least, usual)


def with_single_nodes(problem: Problem) -> Problem:
    """``problem`` with each node as a block, of a kind of its own."""
    return dataclasses.replace(problem, blocks=tuple(Block(i, i + 1, i) for i in range(len(problem.nodes))))


def solve_chain(problem: Problem, budget: int) -> ChainPlan:
    """The cheapest schedule for one budget (bytes). If keeping everything fits, nothing is solved.

    Raises ``InfeasibleError`` if the solver has no schedule that fits.
    """
    schedule = keep_everything(problem)
    walked = walk(problem, schedule)
    if walked.peak <= budget:
        return ChainPlan(schedule, walked, "keep everything")
    return ChainPlanner(problem).solve(budget)


class _Candidates:
    """The distinct optima of the table for one set of options. Each becomes a schedule when it is first asked for.

    A second table has finer slots, for budgets in the lowest quarter.
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
        self.points += [(fine, m) for m in fine.breakpoints() if m * fine.unit < covered]
        self.points += [(coarse, m) for m in coarse.breakpoints() if m * coarse.unit >= covered]

    def at(self, k: int) -> ChainPlan:
        """Candidate k as a schedule."""
        if k not in self.walked:
            table, m = self.points[k]
            order = drop_useless_runs(self.problem, expand(self.problem, table, m))
            schedule = with_deletes(self.problem, order)
            self.walked[k] = ChainPlan(schedule, walk(self.problem, schedule), "chain")
        return self.walked[k]

    def all(self) -> list[ChainPlan]:
        """``WALKS`` candidates at even distances, and those walked before."""
        for k in evenly(range(len(self.points)), WALKS):
            self.at(k)
        return list(self.walked.values())

    def cheapest(self, budget: int) -> ChainPlan | None:
        """The cheapest candidate that fits, among the neighbours of the one at which bisection over peaks ends."""
        count = len(self.points)
        end = bisect_right(range(count), budget, key=lambda k: self.at(k).peak)
        return _cheapest(map(self.at, range(max(0, end - NEIGHBOURS), min(count, end + NEIGHBOURS))), budget)


def _cheapest(plans: Iterable[ChainPlan], budget: int) -> ChainPlan | None:
    return min((plan for plan in plans if plan.peak <= budget), key=lambda plan: (plan.time, plan.peak), default=None)
