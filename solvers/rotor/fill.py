"""Fills the table of rotor's equations (``solvers.rotor.table``) for all amounts of memory at once.

The columns of the table, amounts of memory m in slots, are filled in *parts*, of less memory first. In each part, tiles
of ``TILE`` s and as many t follow each other by diagonals, since a cell [s, t] needs cells of larger s and smaller t.
Nearly all splits of (1) lie between the s and the t of a tile. They are offered to one tile at a time, for all of its s
at once, so that what they read stays in the processor's cache. All other terms are offered to all tiles of a diagonal
at once. Times fall with m, so a split is skipped if its time in the last column of a part is no less than the best time
in the last column of the part before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solvers.rotor.terms import INF, Slots, Terms, Times
from solvers.rotor.tiles import TILE, Cells, by_tile, cells

PARTS, LONG = 3, 64
"""Parts of the columns for chains of at least ``LONG`` stages. Shorter chains have one part."""

LINE = 16
"""Columns of a cache line. The width of a part is a multiple of it."""


def least_times(terms: Terms, size: int) -> Times:
    """``times[p, s, t, j]`` is T[s,t](p * width + j), for all slots up to ``size``; only s <= t is filled."""
    padded = len(terms.start)
    parts = PARTS if len(terms.leaves) >= LONG else 1
    width = -(-(size + 1) // (LINE * parts)) * LINE
    parts = -(-(size + 1) // width)
    times = np.empty((parts, padded, padded, width), np.float32)
    # Values for all k of one t lie side by side.
    behind = cells(np.empty((padded, padded, width), np.float32).transpose(1, 0, 2))
    never = cells(np.zeros((padded, padded), np.int64))
    sums = np.empty(TILE * padded * width, np.float32)
    before = cells(np.full((padded, padded), INF))
    for at in range(parts):
        last = cells(np.full((padded, padded), INF))
        last_behind = cells(np.full((padded, padded), INF).T)
        known = _Known(cells(times[at]), behind, never, last, last_behind)
        part = _part(terms, times, at, known, before, sums)
        for distance in range(padded // TILE):
            _fill_diagonal(part, distance)
        before = last
    return times


@dataclass(frozen=True)
class _Known:
    """What is known of a part, cell by cell, as it is filled.

    ``times``: T[s,t](m). ``behind``: at [k, t], T[k,t](m - a_k) plus the time to run the stages before k. ``never``:
    how many first columns of ``behind`` are infinite, those of earlier parts included. ``last``, ``last_behind``: the
    last columns of ``times`` and ``behind``.
    """

    times: Cells
    behind: Cells
    never: Cells
    last: Cells
    last_behind: Cells


@dataclass(frozen=True)
class _Shift:
    """Reads T[s,t](m - taken), or T[s+1,t](m - taken), for all columns m of a part, also from earlier parts.

    For m < taken it reads T(0), which the caller excludes. ``times``: those of all parts, flat. ``first``: by s and t,
    where the values begin in the first part. ``places[tile, stage, m]``: how far behind it the value for m lies.
    """

    times: Times
    first: Cells
    places: Slots


@dataclass(frozen=True)
class _Part:
    """A part of the columns, and what its equations read.

    ``columns``: the m of this part. ``before``: T[s,t] in the last column of the part before. ``inputs``: reads
    T[s,t](m - a_s). ``ways``: reads T[s+1,t](m - slots that way w of s takes). ``scarce``: whether the peak of a
    split may exceed the least m of this part. ``sums``: space for the offers of splits.
    """

    terms: Terms
    columns: Slots
    known: _Known
    before: Cells
    inputs: _Shift
    ways: tuple[_Shift, ...]
    scarce: bool
    sums: Times


def _part(terms: Terms, times: Times, at: int, known: _Known, before: Cells, sums: Times) -> _Part:
    """Part ``at`` of the columns."""
    _, padded, _, width = times.shape
    columns = np.arange(at * width, (at + 1) * width)
    first = np.arange(padded**2).reshape(padded, padded) * width
    same, following = cells(first), cells(first + padded * width)

    def shift(taken: Slots, begins: Cells) -> _Shift:
        m = np.maximum(columns - by_tile(taken)[..., None], 0)
        return _Shift(times.reshape(-1), begins, m // width * times[0].size + m % width)

    inputs, ways = shift(terms.taken, same), tuple(shift(way.taken, following) for way in terms.ways)
    scarce = int(terms.passes.whole.max() + terms.besides.max()) > at * width * terms.unit
    return _Part(terms, columns, known, before, inputs, ways, scarce, sums)


def _fill_diagonal(part: _Part, distance: int) -> None:
    """All tiles (i, i + distance). In a tile, a cell needs those of larger s and those of smaller t."""
    tiles = len(part.terms.start) // TILE - distance
    splits = np.full((tiles, TILE, TILE, len(part.columns)), INF)
    for i in range(tiles if distance else 0):
        _split_between(part, i, i + distance, splits[i])
    for s in reversed(range(TILE)):
        for t in range(0 if distance else s, TILE):
            row = part.known.times.diagonals[distance][:, s, t]
            if not distance and s == t:
                _offer_leaves(part, s, row)
            else:
                _split_inside(part, distance, s, t, splits[:, s, t])
                np.subtract(splits[:, s, t], by_tile(part.terms.start)[:tiles, s, None], out=row)
                np.minimum(row, part.before.diagonals[distance][:, s, t, None], out=row)
                _offer_ways(part, distance, s, t, row)
            _finish(part, distance, s, t, row)


def _read(shift: _Shift, distance: int, s: int, t: int) -> Times:
    """What ``shift`` reads for cell [s, t] of all tiles of a diagonal."""
    first = shift.first.diagonals[distance][:, s, t]
    read: Times = shift.times.take(first[:, None] + shift.places[: len(first), s])
    return read


def _offer_leaves(part: _Part, s: int, rows: Times) -> None:
    """(3), for stage s of each tile."""
    rows[:] = INF
    for row, leaves in zip(rows, part.terms.leaves[s::TILE], strict=False):
        for least, time in leaves:
            np.minimum(row, time, out=row, where=part.columns >= least)


def _offer_ways(part: _Part, distance: int, s: int, t: int, rows: Times) -> None:
    """(2), for [s, t] of all tiles of a diagonal."""
    for way, shift in zip(part.terms.ways, part.ways, strict=True):
        times = _read(shift, distance, s, t)
        times += way.time.diagonals[distance][:, s, t, None]
        times[part.columns < way.least.diagonals[distance][:, s, t, None]] = INF
        np.minimum(rows, times, out=rows)


def _finish(part: _Part, distance: int, s: int, t: int, rows: Times) -> None:
    """Derive from T[s,t], which is done, what later cells read beside it."""
    terms, known = part.terms, part.known
    behind = _read(part.inputs, distance, s, t)
    behind += by_tile(terms.start)[: len(rows), s, None]
    behind[part.columns < by_tile(terms.taken)[: len(rows), s, None]] = INF
    known.behind.diagonals[distance][:, s, t] = behind
    known.never.diagonals[distance][:, s, t] += np.isinf(behind).sum(axis=1)
    known.last.diagonals[distance][:, s, t] = rows[:, -1]
    known.last_behind.diagonals[distance][:, s, t] = behind[:, -1]


def _split_between(part: _Part, i: int, j: int, best: Times) -> None:
    """(1) for tile (i, j): splits at k behind all of its s and up to the first of its t."""
    terms, known, own = part.terms, part.known, slice(i * TILE, (i + 1) * TILE)
    low, high = own.stop, j * TILE + 1
    start, before = terms.start[own, None], part.before.whole[own]
    for t in range(TILE):
        at = j * TILE + t
        least = known.last.whole[own, low - 1 : high - 1] + known.last_behind.whole[low:high, at]
        useful = np.flatnonzero((least - start < before[:, at, None]).any(axis=0))
        if len(useful):
            k = slice(low + int(useful[0]), low + int(useful[-1]) + 1)
            peaks = terms.passes.whole[own, k] + terms.besides[at]
            first = known.times.whole[own, k.start - 1 : k.stop - 1]
            _offer_splits(part, best[:, t], first, known.behind.whole[k, at], peaks, known.never.whole[k, at])


def _split_inside(part: _Part, distance: int, s: int, t: int, best: Times) -> None:
    """(1) for [s, t] of all tiles of a diagonal: splits at k among the s of the tile, and among its t."""
    known, passes = part.known, part.terms.passes.diagonals
    times, behind, never = known.times.diagonals, known.behind.diagonals, known.never.diagonals
    tiles = len(best)
    besides = by_tile(part.terms.besides)[distance:, t, None]
    if distance and s + 1 < TILE:
        k = slice(s + 1, None)
        peaks = passes[0][:tiles, s, k] + besides
        first = times[0][:tiles, s, s:-1]
        _offer_splits(part, best, first, behind[distance][:, k, t], peaks, never[distance][:, k, t])
    low = 1 if distance else s + 1
    if low <= t:
        k = slice(low, t + 1)
        peaks = passes[distance][:, s, k] + besides
        first = times[distance][:, s, low - 1 : t]
        _offer_splits(part, best, first, behind[0][distance:, k, t], peaks, never[0][distance:, k, t])


def _offer_splits(part: _Part, best: Times, first: Times, behind: Times, peaks: Slots, never: Slots) -> None:
    """``best[n, m]`` takes the least time over the splits k.

    ``first[n, k, m]``: T[s,k-1](m). ``behind[n, k, m]``: that of T[k,t], and [n, k] ``never`` of it. ``peaks[n, k]``:
    bytes that the run up to k takes.
    """
    times = part.sums[: first.size].reshape(first.shape)
    np.add(first, behind, out=times)
    if part.scarce:
        least = np.rint(peaks / part.terms.unit).astype(np.int64)
        for n, k in zip(*(least > np.maximum(never, part.columns[0])).nonzero(), strict=True):
            times[n, k, : least[n, k] - part.columns[0]] = INF
    np.minimum(best, np.minimum.reduce(times, axis=1), out=best)
