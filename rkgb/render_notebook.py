"""How a graph shows itself in a notebook: as a picture, or as text where there is no ``dot`` program."""

from __future__ import annotations

from typing import Any


class Drawn:
    """Base of the graph classes. A notebook asks for ``_repr_mimebundle_``; ``print`` and ``repr`` stay as they are."""

    __slots__ = ()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """The graph as text, and as SVG if the ``dot`` program is installed."""
        from rkgb.render import to_svg  # a graph needs no pictures until somebody looks at it

        picture = to_svg(self)
        return {"text/plain": str(self)} | ({} if picture is None else {"image/svg+xml": picture})
