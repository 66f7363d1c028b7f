"""Plots; matplotlib comes with the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from solvers import Bwd, Frontier, Loss, Problem, Run, Schedule, Walk, all_baselines, keep_everything, walk

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20


def plot_memory(problem: Problem, schedule: Schedule, budget: int, path: str | Path | None = None) -> Figure:
    """Memory over the time of one training step, as predicted: under ``schedule``, and with everything kept.

    A point is what is allocated while one operation runs, its temporary memory included. With ``path`` the figure is
    also written there; the name's ending says in which format. Raises ``ImportError`` where matplotlib is missing.
    """
    figure, axes = _figure()
    eager = _Levels(problem, keep_everything(problem))
    ours = _Levels(problem, schedule)
    for kind, color in (("forward", "#8fb4d9"), ("run again", "#5b7f3f"), ("backward", "#f0b48a")):
        sizes = [size if k == kind else 0.0 for size, k in zip(ours.bytes, ours.kinds, strict=True)]
        axes.stairs(sizes, ours.edges, fill=True, color=color, label=kind)
    axes.vlines([ours.loss], 0, [ours.loss_bytes], color="#b04a4a", label="loss")
    axes.stairs(eager.bytes, eager.edges, color="#777777", label="if everything were kept")
    axes.axhline(budget / MIB, color="#b04a4a", linestyle="--", label="budget")
    axes.set_xlabel("time of the step, by the plan's costs (ms)")
    axes.set_ylabel("memory above the level at the call (MiB)")
    axes.set_xlim(0, max(eager.edges[-1], ours.edges[-1]))
    axes.set_ylim(0)
    axes.legend()
    return _finish(figure, path)


class _Levels:
    """The steps that take time: their edges (ms), and what is allocated meanwhile (MiB); the loss likewise."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.edges: list[float] = [0.0]
        self.bytes: list[float] = []
        self.kinds: list[str] = []
        self.loss = self.loss_bytes = 0.0
        in_backward = False
        for step, size in zip(schedule, walk(problem, schedule).timeline, strict=True):
            if isinstance(step, Loss):
                in_backward = True
                self.loss, self.loss_bytes = self.edges[-1], size / MIB
            elif isinstance(step, Run | Bwd):
                node = problem.nodes[step.node]
                time = node.time if isinstance(step, Run) else node.backward.time if node.backward else 0
                self.edges.append(self.edges[-1] + time / 1e6)
                self.bytes.append(size / MIB)
                self.kinds.append("backward" if isinstance(step, Bwd) else "run again" if in_backward else "forward")


def plot_frontier(
    frontier: Frontier,
    path: str | Path | None = None,
    *,
    measured: Sequence[tuple[int, float]] = (),
    problem: Problem | None = None,
) -> Figure:
    """Time against memory, as ``Rockmate.frontier`` and ``rockmate.frontier`` return it.

    ``measured``: (peak in bytes, overhead as a fraction) of runs; ``problem``: that of a plan, for which the usual ways
    to checkpoint are marked. With ``path`` the figure is also written there. Raises ``ImportError`` where matplotlib
    is missing.
    """
    figure, axes = _figure()
    axes.step(
        [budget / MIB for budget, _ in frontier.points],
        [100 * overhead for _, overhead in frontier.points],
        where="post",
        label="Rockmate, predicted",
    )
    if measured:
        axes.plot([p / MIB for p, _ in measured], [100 * t for _, t in measured], "o", label="Rockmate, measured")
    for name, found in _usual_ways(problem).items():
        axes.plot([found.peak / MIB], [100 * found.overhead], "x", label=name.replace("_", " "))
    axes.set_xlabel("peak memory of a training step (MiB)")
    axes.set_ylabel("longer than without recomputation (%)")
    axes.set_ylim(
        top=min(axes.get_ylim()[1], 100)
    )  # the smallest budgets take many times longer; others are of interest
    axes.legend()
    return _finish(figure, path)


def _usual_ways(problem: Problem | None) -> dict[str, Walk]:
    return {name: walk(problem, schedule) for name, schedule in all_baselines(problem).items()} if problem else {}


def _figure() -> tuple[Figure, Any]:
    """An empty figure and its axes, without the state of pyplot."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plots need matplotlib, which is not installed: pip install "rockmate[plot]"') from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    return figure, axes


def _finish(figure: Figure, path: str | Path | None) -> Figure:
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure
