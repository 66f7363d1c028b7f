"""A plan's memory over the time of a step, as a figure and as one HTML page; matplotlib and plotly come with the extra
``plot``.

On the page, under the mouse, each step says which operation it is, where that is in the model, and what becomes of its
results.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rkgb.units import format_time
from rockmate.budget import show_bytes
from rockmate.errors import InputError
from rockmate.planning.report import Fate, fates
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


class MemoryPage:
    """The page that was written. As the last line of a notebook's cell it shows itself there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<memory page: {self.path}>"

    def _repr_html_(self) -> str:
        """The page in a frame of its own, as the file is then, so that it needs no server and no network."""
        page = escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 520px; border: 0"></iframe>'


class Place(NamedTuple):
    """Where a node comes from: its operation, the path of its submodule and its source line, "" where not known."""

    operation: str
    path: str
    line: str


def save_memory_html(
    problem: Problem, schedule: Schedule, places: Sequence[Place], budget: int, title: str, path: str | Path
) -> MemoryPage:
    """Write the page to ``path``, and return it; it reads no other file, and nothing from a network.

    ``places``: of each node. ``budget``: bytes. Raises ``ImportError`` where plotly is missing.
    """
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise ImportError(
            'interactive pages need plotly, which is not installed: pip install plotly, or the extra "plot"'
        ) from error
    ours, eager = Levels(problem, schedule), Levels(problem, keep_everything(problem))
    figure = graph_objects.Figure()
    figure.add_bar(
        x=ours.edges[:-1],
        y=ours.bytes,
        width=[after - before for before, after in zip(ours.edges, ours.edges[1:], strict=False)],
        offset=0,
        marker={"color": [COLOURS[kind] for kind in ours.kinds], "line": {"width": 0}},
        hovertext=_texts(problem, schedule, places, ours),
        hoverinfo="text",
        showlegend=False,
    )
    for kind, colour in COLOURS.items():
        figure.add_bar(x=[None], y=[None], name=kind, marker={"color": colour})
    figure.add_scatter(
        x=eager.edges,
        y=[*eager.bytes, eager.bytes[-1]],
        name="if everything were kept",
        line={"shape": "hv", "color": "#777777", "width": 1},
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=[ours.loss, ours.loss],
        y=[0, ours.loss_bytes],
        name="loss",
        line={"color": "#b04a4a"},
        hovertext=f"the loss<br>{ours.loss_bytes:.1f} MiB live",
        hoverinfo="text",
    )
    figure.add_hline(y=budget / MIB, line={"dash": "dash", "color": "#b04a4a"}, annotation_text="budget")
    figure.update_layout(
        title={"text": title, "font": {"size": 13}, "x": 0.02},
        template="plotly_white",
        legend={"orientation": "h", "y": -0.2},
        margin={"l": 50, "r": 20},
        hovermode="closest",
        hoverlabel={"align": "left"},
        bargap=0,
        xaxis={"title": "time of the step, by the plan's costs (ms)"},
        yaxis={"title": "memory above the level at the call (MiB)", "rangemode": "tozero"},
    )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(target, include_plotlyjs=True, config={"displaylogo": False, "scrollZoom": True})
    return MemoryPage(target)


def _texts(problem: Problem, schedule: Schedule, places: Sequence[Place], levels: Levels) -> list[str]:
    known = fates(problem, schedule)
    found = []
    for step, size, kind in zip(levels.steps, levels.bytes, levels.kinds, strict=True):
        node, place = problem.nodes[step.node], places[step.node]
        backward = isinstance(step, Bwd)
        taken = node.time if not backward else node.backward.time if node.backward else 0
        named = f"{node.name} ({place.operation})" if place.operation not in ("", node.name) else node.name
        words = [f"<b>{escape(named)}</b>, {kind}"]
        words += [f"in {escape(place.path)}"] if place.path else []
        words += [f"at {escape(place.line)}"] if place.line else []
        words.append(f"{show_bytes(size * MIB)} live, {format_time(taken)}")
        found.append("<br>".join(words if backward else [*words, _fate(problem, known[step.node])]))
    return found


def _fate(problem: Problem, fate: Fate) -> str:
    if fate.again:
        before = ", ".join(escape(problem.nodes[i].name) for i in fate.again)
        dropped = show_bytes(fate.made - fate.kept)
        kept = f"{show_bytes(fate.kept)} kept, " if fate.kept else ""
        return f"{kept}{dropped} dropped and computed again, before the backward of {before}"
    if fate.kept:
        of = f" of {show_bytes(fate.made)}" if fate.kept < fate.made else ""
        return f"{show_bytes(fate.kept)}{of} kept for the backward"
    return f"{show_bytes(fate.made)} freed: the backward does not need them"
