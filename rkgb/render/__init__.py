"""Graphs as files: pictures made by Graphviz' ``dot``, or text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from rkgb.errors import RenderWarning
from rkgb.graphs import S_graph
from rkgb.Ktools import K_graph
from rkgb.pipeline import Graph, Graphs, make_all_graphs
from rkgb.render.compact import compact
from rkgb.sample import Sample
from rkgb.warn import warn


@runtime_checkable
class Drawable(Protocol):
    """What draws itself, such as a plan."""

    def picture(self) -> Any:
        """The picture, a ``graphviz.Digraph``."""


ENDINGS = {"svg": ".svg", "pdf": ".pdf", "png": ".png", "text": ".txt"}
"""Of the files in each format."""


def print_graph(
    g: Graph | Graphs | Drawable,
    name: str | None = None,
    open: bool = False,
    render_format: str | None = None,
    directory: str | Path = "graphviz_dir",
    *,
    block: int | None = None,
) -> Path:
    """Write the picture of ``g``, or of the chain of blocks of all ``Graphs``, and return the file's path.

    ``g`` can also be what draws itself, such as a plan of rockmate's: ``print_graph(rk.plan)``.

    The source is ``<directory>/<name>.gv``, the picture ``<directory>/<name>.<render_format>``. The picture of a large
    graph has its distinct blocks only, that of a large K the chain of its blocks. If ``dot`` is not installed or fails,
    the .gv file alone is written, with a ``RenderWarning``, and its path is returned.

    Args:
        g: A graph, all ``Graphs``, or what draws itself.
        name: Of the files; by default the graph's class.
        open: Whether to show the file with the system's viewer.
        render_format: "svg" (its boxes show the user's source lines under the mouse), "pdf", "png", or "text" for
            ``str(g)`` in ``<name>.txt``. By default it is what ``name`` ends with ("plan.png"), or else "svg". Such an
            ending is not written twice.
        directory: The folder of the files.
        block: The number of a block in the chain, which is drawn on its own: its operations in S, its forwards, data
            and backwards in K and of all ``Graphs``.

    Raises:
        TypeError: ``g`` is no graph.
        ValueError: ``render_format`` is none of these, or there is no such ``block``.
    """
    if not isinstance(g, Graph | Graphs | Drawable) or isinstance(g, type):
        hint = "; the plan of an attached model is None until one is needed" if g is None else ""
        raise TypeError(
            f"{type(g).__name__} is no graph: give one of the graphs B, D, S, K, what make_all_graphs made, or a plan"
            f"{hint}"
        )
    name = name or type(g).__name__ + ("" if block is None else f"_block{block}")
    folder, (name, render_format) = Path(directory), _name_and_format(name, render_format)
    if render_format == "text" and block is not None:
        raise ValueError(f"block={block!r} is drawn, not written: give render_format= svg, pdf or png")
    picture = None if render_format == "text" else _picture(g, block)
    path = folder / f"{name}{ENDINGS[render_format]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if picture is None:
        path.write_text(str(g) + "\n", encoding="utf-8")
    else:
        source = folder / f"{name}.gv"
        source.write_text(picture.source, encoding="utf-8")
        if not _rendered(source, path, render_format):
            return source
    if open:
        _view(path)
    return path


def _name_and_format(name: str, render_format: str | None) -> tuple[str, str]:
    """The name without the ending of a format, and the format: the one that was asked for, or that of the ending.

    Raises ``ValueError`` if there is no such format.
    """
    if render_format is not None and render_format not in ENDINGS:
        raise ValueError(f"render_format is {render_format!r}; it can be {', '.join(ENDINGS)}")
    for known, ending in ENDINGS.items():
        if name.lower().endswith(ending):
            return name[: -len(ending)], render_format or known
    return name, render_format or "svg"


def _rendered(source: Path, path: Path, render_format: str) -> bool:
    """Whether the ``dot`` program made the picture; warns the caller of ``print_graph`` if not."""
    import graphviz

    try:
        graphviz.render("dot", render_format, source, outfile=path)
    except (graphviz.ExecutableNotFound, graphviz.CalledProcessError) as error:
        missing = isinstance(error, graphviz.ExecutableNotFound)
        reason = "the program dot is not installed" if missing else f"the program dot failed: {error}"
        remedy = "install Graphviz (for example: apt install graphviz) and call again" if missing else "open that file"
        warn(
            f"{reason}; {source} was written, but not {path.name}; {remedy}, or pass render_format='text'",
            RenderWarning,
        )
        return False
    return True


def _view(path: Path) -> None:
    """Show the file; warns the caller of ``print_graph`` where there is no viewer."""
    import graphviz

    try:
        graphviz.view(str(path))
    except OSError as error:
        warn(f"{path} was written, but there is no viewer: {error}", RenderWarning)


def print_all_graphs(
    result: Graphs,
    name: str = "graphs",
    open: bool = False,
    render_format: str | None = None,
    directory: str | Path = "graphviz_dir",
) -> list[Path]:
    """Write the pictures of all stages, ``<name>_B``, ``_D``, ``_S``, ``_K``; see ``print_graph``."""
    if not isinstance(result, Graphs):
        raise TypeError(f"{type(result).__name__} is not what rkgb.make_all_graphs(model, sample) makes: give that")
    name, render_format = _name_and_format(name, render_format)
    stages: dict[str, Graph] = {"B": result.B, "D": result.D, "S": result.S, "K": result.K}
    return [print_graph(g, f"{name}_{stage}", open, render_format, directory) for stage, g in stages.items()]


def test_rkgb(
    model: torch.nn.Module,
    sample: Sample,
    name: str | None = None,
    render_format: str | None = None,
    *,
    sample_kwargs: dict[str, Any] | None = None,
    directory: str | Path = "graphviz_dir",
    costs: str = "measured",
) -> Graphs:
    """Build all graphs of ``model`` on ``sample``, check the invariants of each, and return them.

    With ``render_format`` they are also printed, as ``name`` or the class of the model; see
    ``print_all_graphs``. ``sample_kwargs``, ``costs``: see ``make_all_graphs``.

    Raises:
        AssertionError: a graph breaks its invariants.
        TraceError: the module cannot be traced.
    """
    result = make_all_graphs(model, sample, sample_kwargs, costs=costs)
    for g in (result.B, result.D, result.S, result.K):
        g.verify()
    if render_format is not None:
        print_all_graphs(result, name or type(model).__name__, render_format=render_format, directory=directory)
    return result


vars(test_rkgb)["__test__"] = False  # pytest must not collect it from a file that imports it


def _picture(g: Graph | Graphs | Drawable, block: int | None = None) -> Any:
    from rkgb.render.drawing import draw, draw_block, draw_chain  # most who import rkgb draw nothing

    if block is not None:
        of = g.K if isinstance(g, Graphs) else g
        if not isinstance(of, S_graph | K_graph):
            raise TypeError(
                f"block={block!r}: {type(g).__name__} has no blocks; give S, K, or what make_all_graphs made"
            )
        return draw_block(of, block)
    if isinstance(g, Graphs):
        return draw_chain(g.K)
    return draw(g) if isinstance(g, Graph) else g.picture()


def to_svg(g: object) -> str | None:
    """The picture of a graph, or of the chain of blocks, as SVG; None where the ``dot`` program is missing or fails."""
    if not isinstance(g, Graph | Graphs):
        return None
    import graphviz

    try:
        svg: str = _picture(g).pipe("svg", encoding="utf-8")
    except (graphviz.ExecutableNotFound, graphviz.CalledProcessError):
        return None
    return compact(svg)
