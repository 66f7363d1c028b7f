"""Cut S into blocks: at positions where little crosses, and so that repeated structure gives equal blocks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rkgb.blocks.classes import block_keys
from rkgb.graphs import S_graph

Piece = tuple[int, int]
"""A stretch of nodes: the first, and the one behind the last."""


def cut(s: S_graph, target: int = 12, largest: int = 24) -> S_graph:
    """Cut where one tensor crosses; then merge to blocks of about ``target`` nodes, at most ``largest``.

    Values that need no gradient and depend on none (ambient) do not count as crossing, nor do values that live longer
    than the largest block: an encoder's output that every layer of a decoder reads, the skips of a U-Net. These cross
    some limit wherever it lies. Repeated structure is kept: equal stretches give equal blocks. Where no single tensor
    crosses for more than ``largest`` nodes, cut at the position of least crossing bytes.
    """
    n = len(s.nodes)
    count = [0, *itertools.accumulate(int(not node.fixed) for node in s.nodes)]  # ambient nodes are no decision
    crossing, carried = _crossing(s, count, largest)
    bytes_at = [sum(s.d.storages[x].bytes for x in across) for across in crossing]
    points = [0]
    for stop in [*(p for p in range(1, n) if len(crossing[p] - carried) <= 1), n]:
        points += _split(bytes_at, points[-1], stop, largest)
        points.append(stop)
    pieces = list(itertools.pairwise(points))
    number: dict[object, int] = {}
    kinds = [number.setdefault(key, len(number)) for key in block_keys(s.with_blocks(tuple(pieces)))]
    blocks = tuple(_Merger(count, bytes_at, target, largest).merge(pieces, kinds))
    return dataclasses.replace(s, blocks=blocks, made_by=(*s.made_by, "cut"))


def _crossing(s: S_graph, count: list[int], largest: int) -> tuple[list[set[int]], set[int]]:
    """For each position p, the storages made before node p, and read at or after it, that are not ambient; and those
    that more than ``largest`` decisions lie between the making and the last reading of."""
    last: dict[int, int] = {}
    for i, node in enumerate(s.nodes):
        for v in node.reads:
            last[s.d.values[v].storage] = i
    crossing: list[set[int]] = [set() for _ in range(len(s.nodes) + 1)]
    carried: set[int] = set()
    for i, node in enumerate(s.nodes):
        if not node.fixed:
            for storage in node.storages:
                stop = last.get(storage, i) + 1
                for p in range(i + 1, stop):
                    crossing[p].add(storage)
                if count[stop] - count[i] > largest:
                    carried.add(storage)
    return crossing, carried


def _split(bytes_at: list[int], start: int, stop: int, largest: int) -> list[int]:
    """Positions inside start..stop that leave no piece larger than ``largest``, at least crossing bytes."""
    if stop - start <= largest:
        return []
    quarter = (stop - start) // 4
    inside = range(start + max(1, quarter), stop - max(1, quarter) + 1)
    best = min(inside, key=lambda p: (bytes_at[p], abs(2 * p - start - stop)))
    return [*_split(bytes_at, start, best, largest), best, *_split(bytes_at, best, stop, largest)]


@dataclass(frozen=True, slots=True)
class _Repeat:
    """``times`` stretches of ``period`` pieces each, from piece ``start`` on, that are equal."""

    start: int
    period: int
    times: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.times


@dataclass(frozen=True, slots=True)
class _Merger:
    """Joins neighbouring pieces. ``count[p]``: nodes before p that are decisions; ``bytes_at[p]``: bytes that cross."""

    count: list[int]
    bytes_at: list[int]
    target: int
    largest: int

    def size(self, pieces: Sequence[Piece]) -> int:
        return self.count[pieces[-1][1]] - self.count[pieces[0][0]] if pieces else 0

    def merge(self, pieces: list[Piece], kinds: list[int]) -> list[Piece]:
        """The longest stretch of repeated structure is treated first, as one; then what is on both sides of it."""
        found = self.repeat(pieces, kinds)
        if found is None:
            return self.join(pieces)
        before, after = slice(0, found.start), slice(found.stop, None)
        return [
            *self.merge(pieces[before], kinds[before]),
            *self.repeated(pieces, kinds, found),
            *self.merge(pieces[after], kinds[after]),
        ]

    def repeated(self, pieces: list[Piece], kinds: list[int], found: _Repeat) -> list[Piece]:
        """The blocks of a repetition: each of some units, or the same parts of each unit where that is too large."""
        unit = slice(found.start, found.start + found.period)
        size = self.size(pieces[unit])
        if size > self.largest:
            ends = [stop for _, stop in self.merge(pieces[unit], kinds[unit])]
            parts = [k + 1 for k, piece in enumerate(pieces[unit]) if piece[1] in ends]
            limits = [found.start + t * found.period + k for t in range(found.times) for k in (0, *parts[:-1])]
        else:
            limits = list(range(found.start, found.stop, found.period * self.together(size, found.times)))
        return [(pieces[a][0], pieces[b - 1][1]) for a, b in itertools.pairwise([*limits, found.stop])]

    def together(self, size: int, times: int) -> int:
        """How many of ``times`` equal units of ``size`` nodes make one block; none is left over, if that can be."""
        ways = [k for k in range(1, times + 1) if k * size <= self.target <= 2 * k * size] or [1]
        return min(ways, key=lambda k: (times % k > 0, -k))

    def repeat(self, pieces: list[Piece], kinds: list[int]) -> _Repeat | None:
        """The repetition that covers most nodes, more than one block of them; begun where fewest bytes cross."""
        best, found = self.target, None
        for period in range(1, len(pieces) // 2 + 1):
            equal = [a == b for a, b in zip(kinds, kinds[period:], strict=False)]
            for start, stop in _runs(equal):
                times = (stop - start) // period + 1
                if times < 2:
                    continue
                starts = range(start, stop + period - times * period + 1)
                first = min(starts, key=lambda k: (self.bytes_at[pieces[k][0]], k))
                covered = self.size(pieces[first : first + times * period])
                if covered > best:
                    best, found = covered, _Repeat(first, period, times)
        return found

    def join(self, pieces: list[Piece]) -> list[Piece]:
        """Blocks of nearest ``target`` nodes (least squares), and among these of least crossing bytes."""
        best: list[tuple[int, int, int]] = [(0, 0, 0)]  # squares, bytes, where the last block begins
        for stop in range(1, len(pieces) + 1):
            ways = []
            for start in range(stop - 1, -1, -1):
                size = self.size(pieces[start:stop])
                if size > self.largest and start < stop - 1:
                    break
                squares, crossing, _ = best[start]
                crossing += self.bytes_at[pieces[start][0]]
                ways.append((squares + (size - self.target) ** 2, crossing, start))
            best.append(min(ways))
        joined: list[Piece] = []
        stop = len(pieces)
        while stop:
            start = best[stop][2]
            joined.append((pieces[start][0], pieces[stop - 1][1]))
            stop = start
        return joined[::-1]


def _runs(flags: list[bool]) -> list[Piece]:
    """The stretches of ``flags`` that are true."""
    groups = itertools.groupby(enumerate(flags), key=lambda item: item[1])
    stretches = [[k for k, _ in group] for flag, group in groups if flag]
    return [(ks[0], ks[-1] + 1) for ks in stretches]
