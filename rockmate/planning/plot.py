"""Plots; matplotlib comes with the extra ``plot``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rockmate.errors import InputError
from rockmate.run.watch import MeasuredStep
from solvers import Bwd, Del, Loss, Problem, Run, Schedule, keep_everything, walk
from solvers.figures import MIB, finished, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"forward": "#8fb4d9", "run again": "#5b7f3f", "backward": "#f0b48a"}
"""Of what runs."""


def plot_memory(
    problem: Problem,
    schedule: Schedule,
    budget: int,
    path: str | Path | None = None,
    measured: MeasuredStep | None = None,
) -> Figure:
    """Memory over the time of one training step, as predicted: under ``schedule``, and with everything kept.

    A point is what is allocated while one operation runs, its temporary memory included. ``measured``: what
    ``rockmate.measure_step`` saw of a step under this plan, drawn as points at the same operations. With ``path`` the
    figure is also written there; the name's ending says in which format. Raises ``ImportError`` where matplotlib is
    missing, and ``InputError`` if ``measured`` is of another plan.
    """
    if measured is not None:
        _check(problem, schedule, measured)
    figure, axes = new_figure()
    eager = Levels(problem, keep_everything(problem))
    ours = Levels(problem, schedule)
    for kind, color in COLOURS.items():
        shown = [size if k == kind else 0.0 for size, k in zip(ours.bytes, ours.kinds, strict=True)]
        axes.stairs(shown, ours.edges, fill=True, color=color, label=kind)
    axes.vlines([ours.loss], 0, [ours.loss_bytes], color="#b04a4a", label="loss")
    axes.stairs(eager.bytes, eager.edges, color="#777777", label="if everything were kept")
    if measured is not None:
        sizes = [size / MIB for size in measured.bytes]
        loss = sizes.pop(measured.steps.index(Loss()))
        axes.stairs(sizes, ours.edges, color="black", linewidth=1.2, baseline=None, label="measured")
        axes.plot([ours.loss], [loss], "o", markersize=3, color="black")
    axes.set_xlabel("time of the step, by the plan's costs (ms)")
    axes.set_xlim(0, max(eager.edges[-1], ours.edges[-1]))
    axes.axhline(budget / MIB, color="#b04a4a", linestyle="--", label="budget")
    axes.set_ylabel("memory above the level at the call (MiB)")
    axes.set_ylim(0)
    axes.legend()
    return finished(figure, path)


def _check(problem: Problem, schedule: Schedule, measured: MeasuredStep) -> None:
    """Raise ``InputError`` unless the operations that were measured are those of ``schedule``."""
    if not isinstance(measured, MeasuredStep):
        raise InputError(
            f"measured is of type {type(measured).__name__}: give what rockmate.measure_step(step) returned for a step "
            "under this plan"
        )
    planned = tuple(step for step in schedule if not isinstance(step, Del))
    if measured.nodes != tuple(node.name for node in problem.nodes) or measured.steps != planned:
        raise InputError(
            f"measured has {len(measured.steps)} operations that are not the {len(planned)} of this plan, in their "
            "order: measure a step whose loss uses what the plan supposes, and take the plan that is in force then "
            "(rk.plan after the step; another kind of call, a budget or a first step gives another plan)"
        )


class Levels:
    """The ``steps`` that take time: their edges (ms), what is allocated meanwhile (MiB); the loss likewise."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.edges: list[float] = [0.0]
        self.bytes: list[float] = []
        self.kinds: list[str] = []
        self.steps: list[Run | Bwd] = []
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
                self.steps.append(step)
                self.kinds.append("backward" if isinstance(step, Bwd) else "run again" if in_backward else "forward")
