"""Plots; matplotlib comes with the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from solvers import ChainPlanner, Problem, all_baselines, walk


def plot_frontier(problem: Problem, measured: Sequence[tuple[int, float]], path: Path) -> Path:
    """Write time against memory as PNG: ours predicted and measured, and the baselines, on the same problem.

    ``measured``: (peak in bytes, overhead as a fraction) of runs.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mib = 2**20
    frontier = ChainPlanner(problem).frontier()
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.step(
        [budget / mib for budget, _ in frontier.points],
        [100 * overhead for _, overhead in frontier.points],
        where="post",
        label="Rockmate, predicted",
    )
    if measured:
        axes.plot([p / mib for p, _ in measured], [100 * t for _, t in measured], "o", label="Rockmate, measured")
    for name, schedule in all_baselines(problem).items():
        found = walk(problem, schedule)
        axes.plot([found.peak / mib], [100 * found.overhead], "x", label=name.replace("_", " "))
    axes.set_xlabel("peak memory of a training step (MiB)")
    axes.set_ylabel("longer than without recomputation (%)")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
