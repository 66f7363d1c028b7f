"""A plan's memory over the time of a step, as one HTML page; plotly comes with the extra ``plot``.

Under the mouse, each step says which operation it is, where that is in the model, and what becomes of its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from rkgb.units import format_time
from rockmate.budget import show_bytes
from rockmate.planning.fates import Fate, fates
from rockmate.planning.plot import COLOURS, Levels
from solvers import Bwd, Problem, Schedule, keep_everything
from solvers.figures import MIB


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
