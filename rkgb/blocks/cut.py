"""Cut S into blocks, at positions where few bytes cross, so that repeated layers give equal blocks."""

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
    """Cut where at most one tensor crosses, then join pieces to blocks of about ``target`` nodes, at most ``largest``.

    Two kinds of values do not count as crossing: ambient ones, which neither need gradients nor depend on what does;
    and those that live longer than the largest block, such as an encoder's output that every layer of a decoder reads,
    or the skips of a U-Net, as they cross some cut wherever it lies. Equal stretches of nodes give equal blocks. A
    stretch of more than ``largest`` nodes with no such position is cut where the fewest bytes cross.
    """
    n = len(s.nodes)
    count = [0, *itertools.accumulate(int(not node.fixed) for node in s.nodes)]  # fixed nodes are never recomputed
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
    """For each position p the storages that are made before node p and read by it or later, without ambient ones.

    Also the storages that live longer than ``largest`` nodes.
    """
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
    """Positions within start..stop, of least crossing bytes, that leave no piece of more than ``largest`` nodes."""
    if stop - start <= largest:
        return []
    quarter = (stop - start) // 4
    inside = range(start + max(1, quarter), stop - max(1, quarter) + 1)
    best = min(inside, key=lambda p: (bytes_at[p], abs(2 * p - start - stop)))
    return [*_split(bytes_at, start, best, largest), best, *_split(bytes_at, best, stop, largest)]


@dataclass(frozen=True, slots=True)
class _Repeat:
    """``times`` equal stretches of ``period`` pieces each, from piece ``start`` on."""

    start: int
    period: int
    times: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.times


@dataclass(frozen=True, slots=True)
class _Merger:
    """Joins neighbouring pieces.

    ``count[p]``: nodes before p that may be recomputed. ``bytes_at[p]``: bytes that cross position p.
    """

    count: list[int]
    bytes_at: list[int]
    target: int
    largest: int

    def size(self, pieces: Sequence[Piece]) -> int:
        return self.count[pieces[-1][1]] - self.count[pieces[0][0]] if pieces else 0

    def merge(self, pieces: list[Piece], kinds: list[int]) -> list[Piece]:
        """The blocks: first those of the longest repetition, then those on both sides of it."""
        repeat = self.repeat(pieces, kinds)
        if repeat is None:
            return self.join(pieces)
        before, after = slice(0, repeat.start), slice(repeat.stop, None)
        return [
            *self.merge(pieces[before], kinds[before]),
            *self.repeated(pieces, kinds, repeat),
            *self.merge(pieces[after], kinds[after]),
        ]

    def repeated(self, pieces: list[Piece], kinds: list[int], repeat: _Repeat) -> list[Piece]:
        """The blocks of a repetition: some units each; a unit that is too large is cut in the same parts everywhere."""
        unit = slice(repeat.start, repeat.start + repeat.period)
        size = self.size(pieces[unit])
        if size > self.largest:
            ends = [stop for _, stop in self.merge(pieces[unit], kinds[unit])]
            parts = [k + 1 for k, piece in enumerate(pieces[unit]) if piece[1] in ends]
            limits = [repeat.start + t * repeat.period + k for t in range(repeat.times) for k in (0, *parts[:-1])]
        else:
            limits = list(range(repeat.start, repeat.stop, repeat.period * self.together(size, repeat.times)))
        return [(pieces[a][0], pieces[b - 1][1]) for a, b in itertools.pairwise([*limits, repeat.stop])]

    def together(self, size: int, times: int) -> int:
        """How many of ``times`` equal units of ``size`` nodes make one block; a divisor of ``times`` where possible."""
        ways = [k for k in range(1, times + 1) if k * size <= self.target <= 2 * k * size] or [1]
        return min(ways, key=lambda k: (times % k > 0, -k))

    def repeat(self, pieces: list[Piece], kinds: list[int]) -> _Repeat | None:
        """The repetition that covers the most nodes, more than a block has; it starts where the fewest bytes cross."""
        best, widest = self.target, None
        for period in range(1, len(pieces) // 2 + 1):
            equal = [a == b for a, b in zip(kinds, kinds[period:], strict=False)]
            for start, stop in _stretches(equal):
                times = (stop - start) // period + 1
                if times < 2:
                    continue
                starts = range(start, stop + period - times * period + 1)
                first = min(starts, key=lambda k: (self.bytes_at[pieces[k][0]], k))
                covered = self.size(pieces[first : first + times * period])
                if covered > best:
                    best, widest = covered, _Repeat(first, period, times)
        return widest

    def join(self, pieces: list[Piece]) -> list[Piece]:
        """Blocks whose sizes are nearest to ``target`` (least squares), and among these of least crossing bytes."""
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


def _stretches(flags: list[bool]) -> list[Piece]:
    """The stretches of ``flags`` that are true."""
    groups = itertools.groupby(enumerate(flags), key=lambda item: item[1])
    stretches = [[k for k, _ in group] for flag, group in groups if flag]
    return [(ks[0], ks[-1] + 1) for ks in stretches]
