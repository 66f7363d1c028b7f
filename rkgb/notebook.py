"""Display of graphs in a notebook: as a picture, or as text where Graphviz is not installed."""

from __future__ import annotations

from typing import Any


class Displayed:
    """Base of the graph classes: ``str`` is the program, ``repr`` one line; a notebook shows the picture."""

    __slots__ = ()
    nodes: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.nodes)} nodes>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """The graph as text, and as SVG if the ``dot`` program is installed."""
        from rkgb.render import to_svg  # a graph needs no pictures until somebody looks at it

        picture = to_svg(self)
        return {"text/plain": str(self)} | ({} if picture is None else {"image/svg+xml": picture})
