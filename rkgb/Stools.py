"""S: the simplified graph. ``D_to_S`` makes it, ``cut`` cuts it into blocks, ``print_S_graph`` draws it.

``parse_S`` reads its text back.
"""

from __future__ import annotations

from pathlib import Path

from rkgb.blocks.cut import cut
from rkgb.blocks.parse import TextError, parse_S
from rkgb.blocks.simplify import D_to_S
from rkgb.graphs import S_graph
from rkgb.render import print_graph

__all__ = ["D_to_S", "TextError", "cut", "parse_S", "print_S_graph"]


def print_S_graph(
    s: S_graph,
    name: str | None = None,
    open: bool = False,
    render_format: str = "svg",
    directory: str | Path = "graphviz_dir",
) -> Path:
    """Write the picture of an S graph and return its path: ``rkgb.print_graph`` by the seed's name."""
    return print_graph(s, name, open, render_format, directory)
