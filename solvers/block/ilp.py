"""The options of a block: a Pareto set of ways to run it, each the optimum of an integer program.

The points of a grid are limits on saved bytes and on the peak. Without a limit on the peak, the program is that of
``solvers.block.closure``; with one, it is that of ``solvers.block.ilp_model``. Points are solved from loose to tight. A
point is infeasible if a looser one is. If the optimum of a looser point is within a point's limits, it is the optimum
of that point too, and nothing is solved.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from solvers.block.block import BlockView, Figures, Reruns, Solved, block_view, figures
from solvers.block.useful import late_runs, useful_nodes
from solvers.milp.options import SolverOptions
from solvers.pareto import undominated
from solvers.problem import Block, Problem
from solvers.work import Work


@dataclass(frozen=True, slots=True)
class Grid:
    """The points to solve. Limits are fractions: of the bytes that keeping everything saves, and of its backward peak
    above the least possible one.

    Each of ``saves`` is solved without a limit on the peak, if ``unlimited``, and every ``stride``-th with each of
    ``peaks``. Fresh options, which need neither saved data nor the interface, are solved for each of ``fresh_peaks``.
    Points of one peak are a series; ``threads`` series are solved at a time.
    """

    saves: tuple[float, ...] = tuple(1 - k / 40 for k in range(1, 41))
    peaks: tuple[float, ...] = (0.3,)
    fresh_peaks: tuple[float, ...] = (0.5, 0.15, 0.0)
    unlimited: bool = True
    stride: int = 20
    solver: SolverOptions = field(default_factory=SolverOptions)
    threads: int = 2


class TimeLimit:
    """The time of a search. ``remaining()``: seconds left. ``stopped``: how many programs it ended."""

    def __init__(self, remaining: Callable[[], float] = lambda: inf) -> None:
        self.remaining = remaining
        self.stopped = 0


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a block. Bytes and nanoseconds are exact.

    ``runs``: for each backward of the block, the nodes (positions in the block) that run again before it. ``save``:
    bytes kept from forward to backward, without the interface. ``forward_peak``: most bytes of the forward phase above
    what was live before it. ``backward_peak``: most bytes of the backward phase above the block's base gradients.
    ``time``: nanoseconds of reruns. ``forward_time``: nanoseconds of the forward phase when it is a rerun. ``fresh``:
    the option needs neither saved data nor the block's interface, so that ``time`` includes a forward phase. ``bound``:
    no schedule of the class of ``solvers.block.ilp_model`` takes less time within the limits that the option was solved
    for, nor within its own ``save`` and ``backward_peak``. ``optimal``: ``bound`` is ``time``, up to the solver's gap.
    """

    runs: Reruns
    save: int
    forward_peak: int
    backward_peak: int
    time: int
    forward_time: int
    fresh: bool
    optimal: bool
    bound: int


def option(costs: Figures, fresh: bool, optimal: bool, bound: int) -> Option:
    """The option with the figures ``costs``."""
    return Option(
        costs.runs,
        costs.save,
        costs.forward_peak,
        costs.backward_peak,
        costs.time,
        costs.forward_time,
        fresh,
        optimal,
        bound,
    )


def keep_runs(view: BlockView) -> Reruns:
    """No reruns."""
    return ((),) * len(view.stages)


def rerun_runs(view: BlockView) -> Reruns:
    """All useful nodes once, before the first backward that needs a rerun."""
    useful = [tuple(nodes) for nodes, _ in useful_nodes(view)]
    first = next((s for s, nodes in enumerate(useful) if nodes), None)
    return tuple(nodes if s == first else () for s, nodes in enumerate(useful))


def least_peak(view: BlockView) -> int:
    """A lower bound on the backward peak, in bytes above the base: each backward with the data that it reads."""
    return max((s.peak + sum(view.sizes[d] for d in s.reads) for s in view.stages), default=0)


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a grid: its limits in bytes (``peak`` None: no limit), and the best within them, None if none fits.

    ``seconds``: processor time of the process meanwhile; almost none if an earlier point decided it.
    """

    fresh: bool
    save: int
    peak: int | None
    solved: Solved | None
    seconds: float


def grid_points(
    view: BlockView,
    grid: Grid,
    report: Callable[[float], None] = lambda _: None,
    limit: TimeLimit | None = None,
) -> list[Point]:
    """Solve ``grid``, from loose to tight. Points for which ``limit`` leaves no time are missing.

    ``report``: called with the part of the work that is done, from 0 to 1.
    """
    keep, low, limit = figures(view, keep_runs(view)), least_peak(view), limit or TimeLimit()
    levels = list(dict.fromkeys(round(fraction * keep.save) for fraction in grid.saves))
    some = list(dict.fromkeys(round(fraction * keep.save) for fraction in grid.saves[:: grid.stride]))
    above = max(0, keep.backward_peak - low)
    series: list[tuple[bool, int | None, list[int]]] = [(False, None, levels)] if grid.unlimited else []
    series += [(False, low + round(fraction * above), some) for fraction in grid.peaks]
    series += [(True, low + round(fraction * above), [0]) for fraction in grid.fresh_peaks]
    runs = [_Series(view, grid.solver, fresh, peak, limit) for fresh, peak, _ in series]
    # HiGHS releases Python's lock while it runs. Series are independent, so the result does not depend on threads.
    work = Work([partial(run.points, saves) for run, (_, _, saves) in zip(runs, series, strict=True)], grid.threads)
    try:
        work.start()
        while not work.look():
            report(work.ended / len(series))
    finally:  # after Ctrl-C no more tasks are begun
        work.stop()
    limit.stopped += sum(run.stopped for run in runs)
    return [point for points in work.results() for point in points]


class _Series:
    """The points of one peak, by falling limits on saved bytes; some are decided by those solved before."""

    def __init__(
        self,
        view: BlockView,
        solver: SolverOptions,
        fresh: bool,
        peak: int | None,
        limit: TimeLimit,
    ) -> None:
        # Loaded here: `import solvers` is to be quick, and saved plans need no integer program.
        from solvers.block.closure import ClosureModel
        from solvers.block.ilp_model import StagedModel

        self.fresh, self.peak, self.solver, self.limit = fresh, peak, solver, limit
        self.loose = None if fresh else ClosureModel(view)
        self.tight = None if peak is None else StagedModel(view, fresh)
        self.solved: list[tuple[int, Solved]] = []
        self.infeasible = -1
        self.stopped = 0

    def points(self, saves: Sequence[int]) -> list[Point]:
        """The points for ``saves``, which fall; those that end at a time limit without a solution are missing."""
        points: list[Point] = []
        for save in saves:
            start = time.process_time()
            try:
                solved = self._at(save)
            except TimeoutError:
                self.stopped += 1
                continue
            points.append(Point(self.fresh, save, self.peak, solved, time.process_time() - start))
        return points

    def _at(self, save: int) -> Solved | None:
        """The best for ``save``, from an earlier solve if that decides it."""
        if save <= self.infeasible:
            return None
        for limit, known in self.solved:
            if limit >= save >= known.figures.save and known.optimal:
                return known
        answer = self._solve(save)
        if answer is None:
            self.infeasible = save
        else:
            self.stopped += not answer.searched
            self.solved.append((save, answer))
        return answer

    def _solve(self, save: int) -> Solved | None:
        left = self.limit.remaining()
        if left <= 0:
            raise TimeoutError("no time is left")
        options = dataclasses.replace(self.solver, time_limit=min(left, self.solver.time_limit))
        if self.loose:
            answer = self.loose.solve(save, options)
            if self.peak is None or (answer.optimal and answer.figures.backward_peak <= self.peak):
                return answer
        assert self.tight is not None and self.peak is not None
        return self.tight.solve(save, self.peak, options)


def view_options(
    view: BlockView,
    grid: Grid,
    report: Callable[[float], None] = lambda _: None,
    limit: TimeLimit | None = None,
) -> tuple[Option, ...]:
    """The Pareto set of options of ``view``. The other arguments are those of ``grid_points``."""
    keep = figures(view, keep_runs(view))
    options = [option(keep, _is_fresh(keep), True, 0)]
    for runs in (late_runs(view, range(len(view.nodes))), rerun_runs(view)):
        # With nothing saved, whatever is needed runs again at least once, which is all that these do.
        again = figures(view, runs)
        options.append(option(again, _is_fresh(again), True, again.time if _is_fresh(again) else 0))
    if any(options[1].runs):
        for point in grid_points(view, grid, report, limit):
            if point.solved:
                s = point.solved
                options.append(option(s.figures, point.fresh or _is_fresh(s.figures), s.optimal, s.bound))
    return pareto(options)


def _is_fresh(costs: Figures) -> bool:
    return costs.save == 0 and not costs.uses_interface


def pareto(options: Iterable[Option]) -> tuple[Option, ...]:
    """The options that no other beats in save, backward peak and time, by time. Only fresh ones beat fresh ones."""
    proven_first = sorted(options, key=lambda o: not o.optimal)
    return tuple(undominated(proven_first, lambda o: (o.time, o.save, o.backward_peak, not o.fresh)))


def block_options(problem: Problem, block: Block, grid: Grid | None = None) -> tuple[Option, ...]:
    """The Pareto set of options of ``block``. Keeping everything (time 0) and fresh options are always among them.

    Raises ``SolverError`` if there is no solver for integer programs.
    """
    return view_options(block_view(problem, block), grid or Grid())


def member_options(view: BlockView, options: Sequence[Option]) -> tuple[Option, ...]:
    """``options`` of another block of the same kind, with the figures they have in ``view``."""
    result = []
    for o in options:
        here = figures(view, o.runs)
        result.append(option(here, _is_fresh(here), False, 0))
    return pareto(result)
