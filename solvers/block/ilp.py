"""The options of a block: a Pareto set of ways to run it, each the optimum of an integer program.

The points of a grid are limits on saved bytes and on the peak. Without a limit on the peak, the program is that of
``solvers.block.closure``; with one, it is that of ``solvers.block.ilp_model``. Points are solved from loose to tight. A
point is infeasible if a looser one is. If the optimum of a looser point is within a point's limits, it is the optimum
of that point too, and nothing is solved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from solvers.block.block import BlockView, Option, Reruns, Solved, block_view, option
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
    """The best within the limits of one point of a grid, None if nothing fits.

    ``seconds``: processor time of the process meanwhile; almost none if an earlier point decided it.
    """

    solved: Option | None
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
    keep, low, limit = option(view, view.no_runs), least_peak(view), limit or TimeLimit()
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

    def __init__(self, view: BlockView, solver: SolverOptions, fresh: bool, peak: int | None, limit: TimeLimit) -> None:
        # Loaded here: `import solvers` is to be quick, and saved plans need no integer program.
        from solvers.block.closure import ClosureModel
        from solvers.block.ilp_model import StagedModel

        self.peak, self.solver, self.limit = peak, solver, limit
        self.loose = None if fresh else ClosureModel(view)
        self.tight = None if peak is None else StagedModel(view, fresh)
        self.solved: list[tuple[int, Option]] = []
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
            points.append(Point(solved, time.process_time() - start))
        return points

    def _at(self, save: int) -> Option | None:
        """The best for ``save``, from an earlier solve if that decides it."""
        if save <= self.infeasible:
            return None
        for limit, known in self.solved:
            if limit >= save >= known.save and known.optimal:
                return known
        answer = self._solve(save)
        if answer is None:
            self.infeasible = save
            return None
        self.stopped += not answer.searched
        self.solved.append((save, answer.option))
        return answer.option

    def _solve(self, save: int) -> Solved | None:
        left = self.limit.remaining()
        if left <= 0:
            raise TimeoutError("no time is left")
        options = replace(self.solver, time_limit=min(left, self.solver.time_limit))
        if self.loose:
            answer = self.loose.solve(save, options)
            if self.peak is None or (answer.option.optimal and answer.option.backward_peak <= self.peak):
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
    options = [option(view, view.no_runs, optimal=True)]
    for runs in (late_runs(view, range(len(view.nodes))), rerun_runs(view)):
        # With nothing saved, whatever is needed runs again at least once, which is all that these do.
        again = option(view, runs, optimal=True)
        options.append(replace(again, bound=again.time) if again.fresh else again)
    if any(options[1].runs):
        options += [point.solved for point in grid_points(view, grid, report, limit) if point.solved]
    return pareto(options)


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
    return pareto(option(view, o.runs) for o in options)
