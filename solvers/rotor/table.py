"""rotor's persistent dynamic program over a heterogeneous chain, vectorised over memory.

``T[s,t](m)`` is the least time to run stages s..t forward and backward, stages behind t being done, with m slots
beyond x_s, which is there and stays until B_s::

    T[s,t](m) = min of
      (1)  u_f(s..k-1) + T[k,t](m - a_k) + T[s,k-1](m)              over s < k <= t: F_ck^s, F_∅^{s+1}.., then from k
           if  m >= D_t + max over s <= j < k of (a_j if j > s) + o_f(j)
      (2)  u_f(s) + r(w) + u_b(s) + T[s+1,t](m - held(w) - a_{s+1})   over ways w of stage s, for s < t
           if  m >= D_t + forward_peak(w)  and  m >= E_s + what B_s takes with w
      (3)  u_f(s) - tail(s) + u_b(s)                                  for s = t
           if  m >= D_s + stop_peak(s)  and  m >= E_s + what B_s takes

a_i: bytes of x_i; r(w): what way w runs again. D_t, E_s: what is there besides, gradients of x_{t+1} (x_{s+1}) and of
the parameters of later stages, and x_L, which the caller holds. For t = L-1, the first forward phase, D is 0, (3) is
a whole run in any way, and the loss has to fit behind it.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory", Inria RR-9302 (2019), Theorem 1; ways as the options of Rockmate (Zhao et
al., ICML 2023). Known shortcoming: a value counts once for each of two neighbours that share its memory, and a_{s+1} in
(2) even where no backward reads it; the walker counts exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from solvers.rotor.chain import Chain
from solvers.rotor.needs import Needs, build
from solvers.rotor.ops import Operation

Times = npt.NDArray[np.float32]
Slots = npt.NDArray[np.int64]
_INF = np.float32(np.inf)
_TILE = 8
_PARTS, _LONG = 3, 64  # parts of the columns, from this length on


@dataclass(frozen=True)
class _Way:
    """(2) in the same way of all stages: least slots by s and t, slots taken from the rest and time by s."""

    least: Slots
    used: Slots
    time: Times


class Table:
    """``T`` for every number of slots up to ``size``; ``unit`` bytes a slot, sizes rounded to the nearest slot.

    ``times[p, s, t, j]`` is T[s,t](p * width + j): columns are done in parts, of less memory first. In each part, tiles
    of ``_TILE`` s and as many t follow each other by diagonals. Splits between the stages of a tile's s and those of
    its t, nearly all, are offered for all s of the tile at once, so that what they read stays in the processor's cache;
    all else is done for all tiles of the diagonal at once. Times fall with m: a split that with the most memory of a
    part does not beat the time before the part is left out.
    """

    def __init__(self, chain: Chain, unit: float, size: int) -> None:
        self.chain, self.unit, self.size = chain, unit, size
        self.needs = needs = Needs(chain)
        self.tiles = -(-chain.length // _TILE)
        # Stages up to a whole number of tiles take no memory and infinite time.
        length, padded = chain.length, self.tiles * _TILE
        # Float32 halves the memory traffic; the walker computes times again, exactly.
        self.scale = float(max(1, sum(s.forward_time + s.backward_time for s in chain.stages)))
        self.run = [s.forward_time / self.scale for s in chain.stages]
        self.start = np.zeros(padded, np.float32)
        self.start[1:length] = np.cumsum(self.run[:-1])
        self.taken, self.besides = np.zeros((2, padded), np.int64)
        self.taken[:length] = [self.slots(a) for a in needs.inputs]
        self.besides[:length] = needs.besides
        self.passes = np.zeros((padded, padded), np.int64)  # bytes for (1), by s and k, without D
        for s in range(length):
            self.passes[s, s + 1 : length] = needs.pass_peaks[s][: length - s - 1]
        self.leaves = [self._leaves(s) for s in range(length)]
        self.ways = [self._way(w, padded) for w in range(max((len(s.ways) for s in chain.stages[:-1]), default=0))]

        parts = _PARTS if length >= _LONG else 1
        self.width = -(-(size + 1) // (16 * parts)) * 16  # in whole cache lines
        parts = -(-(size + 1) // self.width)
        self.times = np.empty((parts, padded, padded, self.width), np.float32)  # only s <= t is used
        # behind[k, t] = T[k,t](m - a_k), in one part, plus the time to run the stages before k; k of one t side by side
        self.behind = np.empty((padded, padded, self.width), np.float32).transpose(1, 0, 2)
        self.before = np.full((padded, padded), _INF)  # the last column of the part before
        self.never = np.zeros((padded, padded), np.int64)  # by k and t: so many first columns of behind are infinite
        for part in range(parts):
            self.before = _Part(self, part).last

    def slots(self, size: int) -> int:
        return round(size / self.unit)

    def _leaves(self, s: int) -> list[tuple[int, np.float32]]:
        """(3): least slots and time of each way."""
        stage, needs = self.chain.stages[s], self.needs
        tail = 0 if s == self.chain.length - 1 else stage.tail_time
        return [
            (
                self.slots(needs.leaf(s, w)),
                np.float32(self.run[s] + (stage.backward_time - tail + stage.ways[w].refill_time) / self.scale),
            )
            for w in needs.leaf_ways(s)
        ]

    def _way(self, w: int, padded: int) -> _Way:
        way = _Way(
            np.full((padded, padded), self.size + 1, np.int64),
            np.zeros(padded, np.int64),
            np.full(padded, _INF),
        )
        for s, stage in enumerate(self.chain.stages[:-1]):
            if w < len(stage.ways):
                way.used[s] = self.slots(self.needs.kept(s, w))
                least = np.rint(self.needs.enable(s, w) / self.unit)
                way.least[s, : len(least)] = np.maximum(least, way.used[s])
                way.time[s] = self.run[s] + (stage.backward_time + stage.ways[w].refill_time) / self.scale
        return way

    def breakpoints(self) -> list[int]:
        """Slot counts at which the least time drops, fewest slots first."""
        times = self.times[:, 0, self.chain.length - 1].reshape(-1)[: self.size + 1]
        return [int(m) for m in np.flatnonzero(times[1:] < times[:-1] * np.float32(1 - 1e-6)) + 1]

    def sequence(self, m: int) -> tuple[Operation, ...]:
        """The operations that take least time with ``m`` slots."""
        return build(self.chain, self._choice, m, self._left)

    def _left(self, s: int, k: int, way: int | None, m: int) -> int:
        return m - int(self.taken[k] if way is None else self.ways[way].used[s])

    def _time(self, s: int | Slots, t: int | Slots, m: int | Slots) -> Times:
        found: Times = self.times[m // self.width, s, t, m % self.width]
        return found

    def _choice(self, s: int, t: int, m: int) -> tuple[int | None, int]:
        """(way, s+1) for (2) and (3), (None, k) for (1)."""
        if s == t:
            return min((time, w) for w, (least, time) in enumerate(self.leaves[s]) if m >= least)[1], s + 1
        offers = [
            (float(self._time(s + 1, t, m - way.used[s])) + float(way.time[s]), w)
            for w, way in enumerate(self.ways)
            if m >= way.least[s, t]
        ]
        best, found = min(offers, default=(np.inf, 0))
        k = np.arange(s + 1, t + 1)
        splits = self._time(k, t, np.maximum(m - self.taken[k], 0)) + self.start[k] + self._time(s, k - 1, m)
        splits -= self.start[s]
        splits[(m < self.taken[k]) | (np.rint((self.passes[s, k] + self.besides[t]) / self.unit) > m)] = _INF
        at = int(splits.argmin())
        # Storing everything is preferred among equals: float32 cannot tell less than this.
        if splits[at] < best - 1e-7 * max(1.0, best if np.isfinite(best) else 1.0):
            return None, s + 1 + at
        return found, s + 1


class _Part:
    """Fills a part of a table's columns.

    ``rests``, ``behinds``, ``passes`` and ``nevers`` have a view [i, s, t] of the tiles (i, i + distance) for
    each distance.
    """

    def __init__(self, table: Table, part: int) -> None:
        self.table, self.tiles = table, table.tiles
        self.rest, self.behind = table.times[part], table.behind
        padded, _, width = self.rest.shape
        self.columns = np.arange(part * width, (part + 1) * width)
        self.last, self.last_behind = np.full((padded, padded), _INF), np.full((padded, padded), _INF).T  # columns
        # whether a split may lack the memory to pass on to k
        self.scarce = int(table.passes.max() + table.besides.max()) > part * width * table.unit
        self.rests, self.behinds = self._diagonals(self.rest), self._diagonals(self.behind)
        self.passes, self.nevers = self._diagonals(table.passes), self._diagonals(table.never)
        self.sums = np.empty(_TILE * padded * width, np.float32)
        self.cells = np.arange(padded**2).reshape(padded, padded) * width  # where in rest T[s,t](low) lies
        self.below = padded * width  # from T[s,t] to T[s+1,t]
        self.places = self._places(table.taken)
        self.way_places = [self._places(way.used) for way in table.ways]
        for distance in range(self.tiles):
            self._fill(distance)

    def _by_tile(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values.reshape(self.tiles, _TILE)

    def _diagonal(self, values: npt.NDArray[Any], distance: int) -> npt.NDArray[Any]:
        tiled = values.reshape(self.tiles, _TILE, self.tiles, _TILE, *values.shape[2:])
        found: npt.NDArray[Any] = np.einsum("isit...->ist...", tiled[: self.tiles - distance, :, distance:])
        return found

    def _diagonals(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        return [self._diagonal(values, distance) for distance in range(self.tiles)]

    def _fill(self, distance: int) -> None:
        """All tiles at this distance. In a tile, a cell needs those of larger s and those of smaller t."""
        table, count = self.table, self.tiles - distance
        rest, behind, never = self.rests[distance], self.behinds[distance], self.nevers[distance]
        last, last_behind, before, cells = (
            self._diagonal(x, distance) for x in (self.last, self.last_behind, table.before, self.cells)
        )
        ways = [
            (self._diagonal(way.least, distance), self._by_tile(way.time), places)
            for way, places in zip(table.ways, self.way_places, strict=True)
        ]
        start, taken = self._by_tile(table.start)[:count, :, None], self._by_tile(table.taken)[:count, :, None]
        splits = np.full((count, _TILE, _TILE, len(self.columns)), _INF)
        for i in range(count if distance else 0):
            self._split_between(i, i + distance, splits[i])
        for s in reversed(range(_TILE)):
            for t in range(0 if distance else s, _TILE):
                row = rest[:, s, t]
                if not distance and s == t:
                    self._fill_leaves(s, row)
                else:
                    self._split_inside(distance, s, t, splits[:, s, t])
                    np.subtract(splits[:, s, t], start[:, s], out=row)
                    np.minimum(row, before[:, s, t, None], out=row)
                    for least, time, places in ways:
                        found = self._look_up(cells[:, s, t] + self.below, places[:count, s])
                        found += time[:count, s, None]
                        found[self.columns < least[:, s, t, None]] = _INF
                        np.minimum(row, found, out=row)
                found = self._look_up(cells[:, s, t], self.places[:count, s])
                found += start[:, s]
                found[self.columns < taken[:, s]] = _INF
                behind[:, s, t] = found
                never[:, s, t] += np.isinf(found).sum(axis=1)
                last[:, s, t], last_behind[:, s, t] = row[:, -1], found[:, -1]

    def _places(self, taken: Slots) -> Slots:
        """Where in all times T[0,0](m - taken) lies, by tile and stage."""
        m = np.maximum(self.columns - self._by_tile(taken)[..., None], 0)
        found: Slots = m // len(self.columns) * self.rest.size + m % len(self.columns)
        return found

    def _look_up(self, cells: Slots, places: Slots) -> Times:
        found: Times = self.table.times.reshape(-1).take(cells[:, None] + places)
        return found

    def _fill_leaves(self, stage: int, rows: Times) -> None:
        """(3), for this stage of each tile."""
        rows[:] = _INF
        for row, leaves in zip(rows, self.table.leaves[stage::_TILE], strict=False):
            for least, time in leaves:
                np.minimum(row, time, out=row, where=self.columns >= least)

    def _split_between(self, i: int, j: int, best: Times) -> None:
        """Offer [s, t] of tile (i, j) the splits at k behind all of its s and up to the first of its t."""
        table, own = self.table, slice(i * _TILE, (i + 1) * _TILE)
        low, high = own.stop, j * _TILE + 1
        start, before = table.start[own, None], table.before[own]
        for t in range(_TILE):
            at = j * _TILE + t
            least = self.last[own, low - 1 : high - 1] + self.last_behind[low:high, at]
            useful = np.flatnonzero((least - start < before[:, at, None]).any(axis=0))
            if len(useful):
                k = slice(low + int(useful[0]), low + int(useful[-1]) + 1)
                needs = table.passes[own, k] + table.besides[at]
                rest = self.rest[own, k.start - 1 : k.stop - 1]
                self._offer(best[:, t], rest, self.behind[k, at], needs, table.never[k, at])

    def _split_inside(self, distance: int, s: int, t: int, best: Times) -> None:
        """Offer [s, t] of all tiles at this distance the other splits."""
        n, besides = self.tiles - distance, self._by_tile(self.table.besides)[distance:, t, None]
        if distance and s + 1 < _TILE:
            needs = self.passes[0][:n, s, s + 1 :] + besides
            rest, behind = self.rests[0][:n, s, s:-1], self.behinds[distance][:, s + 1 :, t]
            self._offer(best, rest, behind, needs, self.nevers[distance][:, s + 1 :, t])
        first = 1 if distance else s + 1
        if first <= t:
            needs = self.passes[distance][:, s, first : t + 1] + besides
            rest, behind = self.rests[distance][:, s, first - 1 : t], self.behinds[0][distance:, first : t + 1, t]
            self._offer(best, rest, behind, needs, self.nevers[0][distance:, first : t + 1, t])

    def _offer(self, best: Times, rest: Times, behind: Times, needs: Slots, never: Slots) -> None:
        """Times [n, k, m], bytes that the splits need [n, k], and how many first columns of ``behind`` are infinite."""
        times = self.sums[: rest.size].reshape(rest.shape)
        np.add(rest, behind, out=times)
        if self.scarce:
            least = np.rint(needs / self.table.unit).astype(np.int64)
            for n, k in zip(*(least > np.maximum(never, self.columns[0])).nonzero(), strict=True):
                times[n, k, : least[n, k] - self.columns[0]] = _INF
        np.minimum(best, np.minimum.reduce(times, axis=1), out=best)
