"""Pictures in the form of a screen: what is drawn goes into columns that stand beside each other.

No edge leads from one column to another, so that ``dot`` puts them in a row. How many there are is decided by estimated
sizes, in points, as the text of a picture is made without ``dot``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import log, sqrt
from typing import Any

from rkgb.render.parts import put_below

SHAPE = 1.3
"""The width of a picture in the middle of a screen, for a height of one."""

NARROW, LOW = 0.7, 620
"""A picture of this width for a height of one, or of no more points of height, is not cut further: what a cut divides
is harder to read."""

HEAD = 90
"""Points above all columns: title and legend."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of a picture that stands on its own, of about ``width`` and ``height`` points.

    ``draw`` adds it to a column, and returns the keys at its top and the one at its end.
    """

    width: float
    height: float
    draw: Callable[[Any], tuple[list[str], str]]


@dataclass(frozen=True, slots=True)
class Size:
    """About how large a stretch of a picture is, in points: ``head`` and ``row`` high, ``base`` and ``letter`` wide.

    ``row`` is added for each row, ``letter`` for each letter of the longest name. The figures are of pictures that
    ``dot`` has drawn.
    """

    head: float
    row: float
    base: float
    letter: float

    def height(self, rows: int) -> float:
        return self.head + rows * self.row

    def width(self, names: Iterable[str]) -> float:
        return self.base + self.letter * max(map(len, names), default=0)

    def columns(self, rows: int, names: Iterable[str]) -> int:
        """Into how many columns to cut ``rows`` rows with these names."""
        width = self.width(names)
        counts = range(1, max(1, rows // 3) + 1)
        heights = [HEAD + self.height(-(-rows // n)) for n in counts]
        fit = (n for n, height in zip(counts, heights, strict=True) if n * width > NARROW * height or height < LOW)
        return next(fit, counts[-1])


SIZES = {
    "B": Size(90, 46, 240, 7),
    "D": Size(170, 46, 250, 19),
    "S": Size(110, 58, 250, 19),
    "K": Size(100, 61, 180, 29),
}
"""Of the blocks of each kind of graph."""


def pages(rows: int, count: int, crossing: Callable[[int], float]) -> list[tuple[int, int]]:
    """``count`` ranges of consecutive rows, cut near equal lengths, where ``crossing`` is least.

    ``crossing`` says for a row how much passes from the rows before it to it and later ones.
    """
    length = rows / count
    ends = [0]
    for k in range(1, count):
        middle, slack = round(k * length), int(length / 4)
        near = range(max(ends[-1] + 1, middle - slack), min(rows - 1, middle + slack) + 1)
        ends.append(min(near, key=lambda at: (crossing(at), abs(at - middle)), default=middle))
    return [(a, b) for a, b in zip(ends, [*ends[1:], rows], strict=True) if a < b]


def crossing(
    reads: Sequence[Sequence[int]], makes: Sequence[Sequence[int]], blocks: Sequence[tuple[int, int]] = ()
) -> Callable[[int], float]:
    """For each of some computations how many values pass from those before it to it and later ones; within one of
    ``blocks`` more.
    """
    made = {v: i for i, values in enumerate(makes) for v in values}
    last = {v: i for i, values in enumerate(reads) for v in values}
    counts = [0] * (len(reads) + 1)
    for v, i in made.items():
        for at in range(i + 1, last.get(v, i) + 1):
            counts[at] += 1
    starts = {start for start, _ in blocks} or range(len(counts))
    return lambda at: float(counts[at] + (0 if at in starts else 1000))


def chain_pages(rows: int, size: Size, others: float) -> list[tuple[int, int]]:
    """The ranges of a chain of ``rows`` rows that stands beside ``others`` square points."""
    height = size.height(rows)
    best = sqrt((height * size.base + others) / SHAPE)  # of the whole picture
    return pages(rows, min(max(1, rows // 4), max(1, round(height / best))), lambda _: 0.0)


def stand(picture: Any, panels: Sequence[Panel]) -> None:
    """Add ``panels`` in their order: down a column, then down the next one."""
    columns = _columns(panels)
    for k, column in enumerate(columns):
        with new_column(picture, k, len(columns)) as where:
            above = ""
            for panel in column:
                tops, end = panel.draw(where)
                if above:
                    put_below(where, above, tops, weight=0)
                above = end


@contextmanager
def new_column(picture: Any, k: int, of: int) -> Iterator[Any]:
    """Column ``k`` of ``of``, to be filled; the only one is the picture itself."""
    if of == 1:
        yield picture
        return
    from graphviz import Digraph

    column = Digraph(f"cluster_column{k}")
    column.attr("graph", peripheries="0", label="", margin="4", style="")
    yield column
    picture.subgraph(column)


def _columns(panels: Sequence[Panel]) -> list[list[Panel]]:
    """``panels`` in columns, in order, for the best form of the whole."""
    heights = sorted({sum(p.height for p in panels[i:j]) for i in range(len(panels)) for j in range(i + 1, i + 9)})
    return min((_filled(panels, height) for height in heights), key=_distance_of, default=[])


def _filled(panels: Sequence[Panel], height: float) -> list[list[Panel]]:
    """Columns of ``height`` points at most, where no panel alone is higher."""
    columns: list[list[Panel]] = []
    left = -1.0
    for panel in panels:
        if panel.height > left:
            columns.append([])
            left = height
        columns[-1].append(panel)
        left -= panel.height
    return columns


def _distance_of(columns: list[list[Panel]]) -> float:
    """How far from the best form a picture of these is."""
    width = sum(max(p.width for p in column) for column in columns)
    height = HEAD + max(sum(p.height for p in column) for column in columns)
    return abs(log(width / height / SHAPE))
