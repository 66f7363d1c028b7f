"""Options of a block: a Pareto set of ways to run it, each an optimum of an integer program.

Where the peak is free the program is ``solvers.block.closure``, where it is limited ``solvers.block.ilp_model``. The
grid runs from loose to tight. A point is not solved when a looser one was infeasible, or when the
optimum of a looser one fits it, which makes it the optimum here too.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from solvers.block.block import BlockView, Figures, Runs, Solved, block_view, figures
from solvers.block.closure import ClosureModel, late_runs
from solvers.block.ilp_model import StagedModel, useful_nodes
from solvers.milp.memory_program import SolverOptions
from solvers.problem import Block, Problem
from solvers.work import Work


@dataclass(frozen=True, slots=True)
class Grid:
    """Where to solve: fractions of what keep-everything saves, and of its backward peak above the least possible.

    Every save level is solved without a limit on the peak, if ``unlimited``, and every ``stride``-th one for
    each of ``peaks``; options that need nothing saved and no interface (fresh) for each of ``fresh_peaks``.
    ``threads`` series are solved at a time.
    """

    saves: tuple[float, ...] = tuple(1 - k / 40 for k in range(1, 41))
    peaks: tuple[float, ...] = (0.3,)
    fresh_peaks: tuple[float, ...] = (0.5, 0.15)
    unlimited: bool = True
    stride: int = 20
    solver: SolverOptions = field(default_factory=SolverOptions)
    threads: int = 2


class Limit:
    """The time that a search has. ``remaining()``: seconds left; ``stopped``: how many programs ended without proof."""

    def __init__(self, remaining: Callable[[], float] = lambda: inf) -> None:
        self.remaining = remaining
        self.stopped = 0


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a block; bytes and nanoseconds, exact.

    ``runs``: per backward of the block, the nodes (positions in the block) that run again before it.
    ``save``: bytes kept from forward to backward, interface not included. ``forward_peak``: most bytes
    of the forward phase above what was live before it. ``backward_peak``: most bytes of the backward
    phase above the block's base gradients. ``time``: reruns. ``forward_time``: the block's forward
    phase when it is a rerun. ``fresh``: needs neither saved data nor the block's interface, so that
    ``time`` includes a first forward. ``bound``: within the limits that the option was solved for (so within its
    own ``save`` and ``backward_peak`` too), no schedule of the class of ``solvers.block.ilp_model`` takes less time;
    ``optimal`` if that is proven to be ``time`` up to the solver's gap.
    """

    runs: Runs
    save: int
    forward_peak: int
    backward_peak: int
    time: int
    forward_time: int
    fresh: bool
    optimal: bool
    bound: int


def option(found: Figures, fresh: bool, optimal: bool, bound: int) -> Option:
    """The option with the figures ``found``."""
    return Option(
        found.runs,
        found.save,
        found.forward_peak,
        found.backward_peak,
        found.time,
        found.forward_time,
        fresh,
        optimal,
        bound,
    )


def keep_runs(view: BlockView) -> Runs:
    """No reruns."""
    return ((),) * len(view.stages)


def rerun_runs(view: BlockView) -> Runs:
    """Everything useful once, before the first backward that reads any of it."""
    useful = [tuple(nodes) for nodes, _ in useful_nodes(view)]
    first = next((s for s, nodes in enumerate(useful) if nodes), None)
    return tuple(nodes if s == first else () for s, nodes in enumerate(useful))


def least_peak(view: BlockView) -> int:
    """A lower bound on the backward peak (bytes above base): each backward needs what it reads."""
    return max((s.peak + sum(view.sizes[d] for d in s.reads) for s in view.stages), default=0)


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a grid: limits in bytes (``peak`` None: free), and the best for them, None where none fits.

    ``seconds``: CPU time of the process meanwhile; next to none where an earlier point decided it.
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
    limit: Limit | None = None,
) -> list[Point]:
    """Solve ``grid``, loose to tight; points for which ``limit`` leaves no time are missing.

    ``report`` is told which part of the work is done.
    """
    keep, low, limit = figures(view, keep_runs(view)), least_peak(view), limit or Limit()
    levels = list(dict.fromkeys(round(fraction * keep.save) for fraction in grid.saves))
    some = list(dict.fromkeys(round(fraction * keep.save) for fraction in grid.saves[:: grid.stride]))
    above = max(0, keep.backward_peak - low)
    series: list[tuple[bool, int | None, list[int]]] = [(False, None, levels)] if grid.unlimited else []
    series += [(False, low + round(fraction * above), some) for fraction in grid.peaks]
    series += [(True, low + round(fraction * above), [0]) for fraction in grid.fresh_peaks]
    runs = [_Series(view, grid.solver, fresh, peak, limit) for fresh, peak, _ in series]
    # HiGHS releases the interpreter while it runs; every series is independent, so the result is the same.
    work = Work([partial(run.points, saves) for run, (_, _, saves) in zip(runs, series, strict=True)], grid.threads)
    try:
        work.start()
        while not work.look():
            report(work.ended / len(series))
    finally:  # after Ctrl-C nothing new is begun
        work.stop()
    limit.stopped += sum(run.stopped for run in runs)
    return [point for points in work.results() for point in points]


class _Series:
    """Falling save levels for one peak: what was solved so far decides some of those that follow."""

    def __init__(
        self,
        view: BlockView,
        solver: SolverOptions,
        fresh: bool,
        peak: int | None,
        limit: Limit,
    ) -> None:
        self.fresh, self.peak, self.solver, self.limit = fresh, peak, solver, limit
        self.loose = None if fresh else ClosureModel(view)
        self.tight = None if peak is None else StagedModel(view, fresh)
        self.solved: list[tuple[int, Solved]] = []
        self.infeasible = -1
        self.stopped = 0

    def points(self, saves: Sequence[int]) -> list[Point]:
        """The points for ``saves``, which fall."""
        found: list[Point] = []
        for save in saves:
            start = time.process_time()
            try:
                solved = self._at(save)
            except TimeoutError:
                self.stopped += 1
                continue
            found.append(Point(self.fresh, save, self.peak, solved, time.process_time() - start))
        return found

    def _at(self, save: int) -> Solved | None:
        """The best for ``save``, from an earlier solve where it decides."""
        if save <= self.infeasible:
            return None
        for limit, known in self.solved:
            if limit >= save >= known.figures.save and known.optimal:
                return known
        answer = self._solve(save)
        if answer is None:
            self.infeasible = save
        else:
            self.stopped += not answer.optimal
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
    limit: Limit | None = None,
) -> tuple[Option, ...]:
    """The Pareto set of options of the block seen as ``view``; other arguments as for ``grid_points``."""
    keep = figures(view, keep_runs(view))
    found = [option(keep, _is_fresh(keep), True, 0)]
    for runs in (late_runs(view, range(len(view.nodes))), rerun_runs(view)):
        # With nothing saved, whatever is needed runs again at least once, which is all that these do.
        again = figures(view, runs)
        found.append(option(again, _is_fresh(again), True, again.time if _is_fresh(again) else 0))
    if any(found[1].runs):
        for point in grid_points(view, grid, report, limit):
            if point.solved:
                s = point.solved
                found.append(option(s.figures, point.fresh or _is_fresh(s.figures), s.optimal, s.bound))
    return pareto(found)


def _is_fresh(found: Figures) -> bool:
    return found.save == 0 and not found.uses_interface


def pareto(options: Iterable[Option]) -> tuple[Option, ...]:
    """Options that no other beats in (save, backward peak, time), by time; fresh ones compete among themselves."""
    kept: list[Option] = []
    for o in sorted(options, key=lambda o: (o.time, o.save, o.backward_peak, not o.fresh, not o.optimal)):
        if not any(_beats(k, o) for k in kept):
            kept.append(o)
    return tuple(kept)


def _beats(k: Option, o: Option) -> bool:
    return k.fresh >= o.fresh and k.time <= o.time and k.save <= o.save and k.backward_peak <= o.backward_peak


def block_options(problem: Problem, block: Block, grid: Grid | None = None) -> tuple[Option, ...]:
    """The Pareto set of options of ``block``: keep-everything (time 0) and fresh ones always among them."""
    return view_options(block_view(problem, block), grid or Grid())


def member_options(view: BlockView, options: Sequence[Option]) -> tuple[Option, ...]:
    """``options`` of another block of the same kind, with the figures they have in ``view``."""
    result = []
    for o in options:
        found = figures(view, o.runs)
        result.append(option(found, _is_fresh(found), False, 0))
    return pareto(result)
