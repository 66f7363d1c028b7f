"""Time against memory: ours as a line, the peers as points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peers_run.points import Point, Row

COLORS = {"checkpoint": "#b04a4a", "compile": "#5b7f3f", "gradient": "#8b6bb1"}
MARKERS = "osD^vP*X<>hpd"


def plot(found: Row, points: Sequence[Point], ours: Mapping[str, Sequence[Row]], path: Path) -> None:
    """An SVG that is the same for the same results; nothing where matplotlib is missing. ``ours``: by ``SIDES``."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.size": 9}
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(8, 4))
        peak = found["eager"]["peak"]
        axes.plot(1, 1, "ko", label="eager")
        if curve := found.get("frontier"):
            x, y = zip(*((b / peak, 1 + o) for b, o in curve["points"]), strict=True)
            axes.plot(x, y, ":", color="#4a78b0", label="Rockmate, predicted")
        for side, label, form in (("ours", "measured", ".-"), ("ours compiled", "compiled, measured", ".--")):
            if ours[side]:
                x, middle, low, high = zip(*sorted(our_point(row, peak) for row in ours[side]), strict=True)
                axes.errorbar(x, middle, (low, high), fmt=form, color="#4a78b0", capsize=2, label=f"Rockmate, {label}")
        for k, p in enumerate(points):
            color = COLORS.get(p.row["peer"].partition(",")[0].partition("_")[0], "#777777")
            t = p.processor
            error = ([t.middle - t.low], [t.high - t.middle])
            marker = MARKERS[k % len(MARKERS)]
            axes.errorbar(p.share, t.middle, error, fmt=marker, color=color, capsize=2, label=p.row["peer"])
        axes.set_xlabel("peak, of eager mode's")
        axes.set_ylabel("processor time, of eager mode's")
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7)
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)


def our_point(row: Row, peak: int) -> tuple[float, float, float, float]:
    t = row["processor"]
    return row["peak"] / peak, t.middle, t.middle - t.low, t.high - t.middle
