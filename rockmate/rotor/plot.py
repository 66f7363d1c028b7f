"""Memory over time of a computed sequence; matplotlib comes with the extra ``plot``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rockmate.rotor.checkpointable import Checkpointable
from solvers.figures import MIB, new_figure
from solvers.rotor.ops import B, Fck, Fe, Fn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {Fn: "tab:gray", Fck: "tab:orange", Fe: "tab:blue", B: "tab:green"}


def plot_memory(model: Checkpointable) -> Figure:
    """A figure: the predicted memory (MiB) at each operation of ``model.sequence`` over the predicted time (ms).

    A bar per operation, as wide as it takes and as high as its peak; the line is what stays between operations. Raises
    ``InputError`` if there is no sequence yet, and ``ImportError`` where matplotlib is missing.
    """
    walked = model.walked()
    figure, axes = new_figure()
    edges = [0.0, *(moment.end / 1e6 for moment in walked.moments)]
    for kind, color in _COLOURS.items():
        shown = [moment.peak / MIB if isinstance(moment.operation, kind) else 0.0 for moment in walked.moments]
        axes.stairs(shown, edges, fill=True, color=color, label=kind.sign)
    levels = [0.0, *(moment.after / MIB for moment in walked.moments)]
    axes.step(edges, levels, where="post", color="black", linewidth=1, label="after each operation")
    if model.mem_limit is not None:
        axes.axhline(model.mem_limit / MIB, color="tab:red", linestyle="--", label="limit")
    title = f"{len(walked.moments)} operations, {100 * walked.overhead:.1f} % longer than without recomputation"
    top = 1.3 * max(walked.peak, model.mem_limit or 0) / MIB
    axes.set(xlabel="predicted time (ms)", ylabel="memory (MiB)", title=title, ylim=(0, top))
    axes.legend(loc="upper left", fontsize="small", ncols=3)
    return figure
