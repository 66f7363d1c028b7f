"""Memory over time of a computed sequence; matplotlib comes with the extra ``plot``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rockmate.rotor.checkpointable import Checkpointable
from solvers.rotor.ops import B, Fck, Fe, Fn, Operation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS: dict[type[Operation], tuple[str, str]] = {
    Fn: ("F_∅", "tab:gray"),
    Fck: ("F_ck", "tab:orange"),
    Fe: ("F_all", "tab:blue"),
    B: ("B", "tab:green"),
}
_MIB = 2**20


def plot_memory(model: Checkpointable) -> Figure:
    """A figure: the predicted memory (MiB) at each operation of ``model.sequence`` over the predicted time (ms).

    A bar per operation, as wide as it takes and as high as its peak; the line is what stays between operations. Raises
    ``InputError`` if there is no sequence yet.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    walked = model.walked()
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    times, levels = [0.0], [0.0]
    for moment in walked.moments:
        start, end = times[-1], moment.end / 1e6
        kind = _KINDS.get(type(moment.operation))
        if kind is not None:
            look: Any = {"align": "edge", "color": kind[1], "edgecolor": "white", "linewidth": 0.3}
            axes.bar(start, moment.peak / _MIB, end - start, **look)
        times.append(end)
        levels.append(moment.after / _MIB)
    axes.step(times, levels, where="post", color="black", linewidth=1, label="after each operation")
    for name, color in _KINDS.values():
        axes.bar(0, 0, 0, color=color, label=name)
    if model.mem_limit is not None:
        axes.axhline(model.mem_limit / _MIB, color="tab:red", linestyle="--", label="limit")
    axes.set_xlabel("predicted time (ms)")
    axes.set_ylabel("memory (MiB)")
    axes.set_title(f"{len(walked.moments)} operations, {100 * walked.overhead:.1f} % longer than without recomputation")
    axes.legend(loc="upper left", fontsize="small", ncols=3)
    axes.set_ylim(0, 1.3 * max(walked.peak, model.mem_limit or 0) / _MIB)
    return figure
