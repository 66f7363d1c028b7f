"""Display of graphs in a notebook: as a picture, or as text where Graphviz is not installed."""

from __future__ import annotations

from typing import Any

MOST_LINES = 30
"""Of the text beside a picture, which notebooks keep in their files and show nowhere."""


class Displayed:
    """Base of the graph classes: ``str`` is the program, ``repr`` one line; a notebook shows the picture."""

    __slots__ = ()
    nodes: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.nodes)} nodes>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """The graph as text; if the ``dot`` program is installed as SVG, with the beginning of the text."""
        from rkgb.render import to_svg  # a graph needs no pictures until somebody looks at it

        picture = to_svg(self)
        if picture is None:
            return {"text/plain": str(self)}
        lines = str(self).splitlines()
        if len(lines) > MOST_LINES:
            lines[MOST_LINES:] = [f"… and {len(lines) - MOST_LINES} lines more: print the graph"]
        return {"text/plain": "\n".join(lines), "image/svg+xml": picture}
