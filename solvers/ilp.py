"""Options of a block: a Pareto set of ways to run it, each an optimum of the staged integer program.

The grid runs from loose to tight. A point is not solved when a looser one was infeasible, or when the
optimum of a looser one fits it, which makes it the optimum here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

from solvers.block import BlockView, Figures, Runs, block_view, figures
from solvers.ilp_model import Solved, SolverOptions, StagedModel, useful_nodes
from solvers.problem import Block, Problem


@dataclass(frozen=True, slots=True)
class Grid:
    """Where to solve: fractions of what keep-everything saves, and of its backward peak above the least possible.

    Every save level is solved without a limit on the peak, if ``unlimited``, and every other one for
    each of ``peaks``; fresh options likewise for ``fresh_peaks``. ``threads`` series are solved at a time.
    """

    saves: tuple[float, ...] = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0)
    peaks: tuple[float, ...] = (0.3,)
    fresh_peaks: tuple[float, ...] = (0.5, 0.15)
    unlimited: bool = True
    solver: SolverOptions = field(default_factory=SolverOptions)
    threads: int = 2


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a block; bytes and nanoseconds, exact.

    ``runs``: per backward of the block, the nodes (positions in the block) that run again before it.
    ``save``: bytes kept from forward to backward, interface not included. ``forward_peak``: most bytes
    of the forward phase above what was live before it. ``backward_peak``: most bytes of the backward
    phase above the block's base gradients. ``time``: reruns. ``forward_time``: the block's forward
    phase when it is a rerun. ``fresh``: needs neither saved data nor the block's interface, so that
    ``time`` includes a first forward. No option with as little memory takes less than ``bound``;
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
    bound: float


def option(found: Figures, fresh: bool, optimal: bool, bound: float) -> Option:
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


class _Solves:
    """The save levels solved so far for one model and peak, and what they imply for others."""

    def __init__(self, model: StagedModel, peak: int | None) -> None:
        self.model, self.peak = model, peak
        self.solved: list[tuple[int, Solved]] = []
        self.infeasible = -1

    def at(self, save: int) -> Solved | None:
        """The best for ``save``, from an earlier solve where it decides."""
        if save <= self.infeasible:
            return None
        for limit, known in self.solved:
            if limit >= save >= known.figures.save and known.optimal:
                return known
        try:
            answer = self.model.solve(save, self.peak)
        except TimeoutError:
            return None
        if answer is None:
            self.infeasible = save
        else:
            self.solved.append((save, answer))
        return answer


def view_options(view: BlockView, grid: Grid, report: Callable[[float], None] = lambda _: None) -> tuple[Option, ...]:
    """The Pareto set of options of the block seen as ``view``; ``report`` is told which part of the work is done."""
    keep = figures(view, keep_runs(view))
    rerun = figures(view, rerun_runs(view))
    found = [option(keep, _is_fresh(keep), True, 0.0), option(rerun, _is_fresh(rerun), False, 0.0)]
    if not any(rerun_runs(view)):
        return pareto(found)
    low = least_peak(view)
    saves = [round(fraction * keep.save) for fraction in grid.saves]
    series: list[tuple[bool, int | None, list[int]]] = []
    if grid.unlimited:
        series += [(False, None, saves[::2]), (False, None, saves[1::2]), (True, None, [0])]
    for fraction in grid.peaks:
        series.append((False, low + round(fraction * max(0, keep.backward_peak - low)), saves[::4]))
    for fraction in grid.fresh_peaks:
        series.append((True, low + round(fraction * max(0, keep.backward_peak - low)), [0]))
    # HiGHS releases the interpreter while it runs; every series is independent, so the result is the same.
    with ThreadPoolExecutor(max_workers=grid.threads) as pool:
        solves = [pool.submit(_solve_series, view, grid.solver, *s) for s in series]
        for done, _ in enumerate(as_completed(solves), 1):
            report(done / len(series))
        for solve in solves:
            found += solve.result()
    return pareto(found)


def _solve_series(
    view: BlockView, solver: SolverOptions, fresh: bool, peak: int | None, saves: list[int]
) -> list[Option]:
    """Options for one peak and falling save levels."""
    solves = _Solves(StagedModel(view, fresh, solver, merge=True), peak)
    answers = [solves.at(save) for save in saves]
    return [option(a.figures, fresh or _is_fresh(a.figures), a.optimal, a.bound) for a in answers if a]


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


LOOSE = Grid(peaks=(), fresh_peaks=())
TIGHT = Grid(unlimited=False)
"""The two halves of the default grid: without limits on a block's peak, and with them."""


def block_options(problem: Problem, block: Block, grid: Grid | None = None) -> tuple[Option, ...]:
    """The Pareto set of options of ``block``: keep-everything (time 0) and fresh ones always among them."""
    return view_options(block_view(problem, block), grid or Grid())


def member_options(view: BlockView, options: Sequence[Option]) -> tuple[Option, ...]:
    """``options`` of another block of the same kind, with the figures they have in ``view``."""
    result = []
    for o in options:
        found = figures(view, o.runs)
        result.append(option(found, _is_fresh(found), False, 0.0))
    return pareto(result)
