"""The fast heuristic: drop data at the peak until all cells fit the budget, then remove reruns that are not needed.

``repair`` starts from any reruns: none (keep all), or those of a relaxation. At the cell with most memory, each live
datum with a later reader is a candidate. Dropping it frees its bytes. It costs the reruns that make it again just
before that reader, from data that are live there or can stay live. The candidates of least cost per byte are tried, and
the one that reduces the excess over the budget most for its cost is dropped. If none reduces it, reruns are tried at
earlier cells with little memory. ``trim`` then removes reruns, the most expensive first, as long as all cells fit.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.whole.stages import Reruns, Staged, Timeline, memory, timeline, without_useless

TRIED = 6
"""Candidates tried for each drop; if none of them reduces the excess, five times as many."""

LOW = 4
"""Earlier steps, between a drop and its next reader, at which a rerun is tried."""

MOST_CANDIDATES = 50
"""Candidates kept for each drop, those of least cost per byte."""


@dataclass(frozen=True, slots=True)
class _Drop:
    """A dropped datum: ``reruns`` make it again in ``stage``, for ``time``; this frees ``freed`` bytes at the peak."""

    stage: int
    reruns: frozenset[int]
    time: int
    freed: int


def repair(staged: Staged, budget: int, runs: Reruns, remaining: Callable[[], float]) -> Reruns | None:
    """Reruns that fit ``budget``, from ``runs``; None if no drop reduces the excess, or no time (seconds) remains."""
    now = timeline(staged, runs)
    while excess := _excess(now.memory, budget):
        peak = _Peak(staged, budget, now)
        drops = peak.drops()
        dropped = _drop_several(peak, runs, drops, excess) or _drop_best(peak, runs, drops, excess, remaining)
        dropped = dropped or _drop_best(peak, runs, peak.drops(early=True), excess, remaining)
        if dropped is None:
            return None
        runs, now = dropped, timeline(staged, dropped)
    return trim(staged, budget, runs, remaining)


def _drop_several(peak: _Peak, runs: Reruns, drops: list[_Drop], excess: int) -> Reruns | None:
    """The best candidates together that free up to half of the excess at the peak; None if these are fewer than two."""
    wanted = peak.wanted / 2
    count = 0
    while count < len(drops) and wanted >= drops[count].freed:
        wanted -= drops[count].freed
        count += 1
    if count < 2:
        return None
    tried, left = peak.with_drops(runs, drops[:count])
    return tried if left < excess else None


def _drop_best(
    peak: _Peak, runs: Reruns, drops: list[_Drop], excess: int, remaining: Callable[[], float]
) -> Reruns | None:
    """The candidate that reduces the excess most for its cost; None if none does, or no time remains."""
    cost = peak.staged.cost(runs)
    best: tuple[float, int, Reruns] | None = None
    for rank, drop in enumerate(drops[: 5 * TRIED]):
        if remaining() <= 0 or (rank >= TRIED and best):
            break
        tried, left = peak.with_drops(runs, [drop])
        if left < excess:
            score = ((peak.staged.cost(tried) - cost) / (excess - left), left)
            if best is None or score < best[:2]:
                best = (*score, tried)
    return best[2] if best and remaining() > 0 else None


def trim(staged: Staged, budget: int, runs: Reruns, remaining: Callable[[], float]) -> Reruns:
    """``runs``, which fit, without those that are not needed to fit. The most expensive are removed first.

    One pass is enough. Without a rerun an older copy stays live, so a removal that did not fit hardly fits later.
    """
    runs = without_useless(staged, runs)
    chosen = [(staged.operations[i].time, t, i) for t, stage in enumerate(runs) for i in stage]
    for _, t, i in sorted(chosen, reverse=True):
        if i not in runs[t]:
            continue
        if remaining() <= 0:
            break
        stage = tuple(j for j in runs[t] if j != i)
        tried = (*runs[:t], stage, *runs[t + 1 :])
        if not _excess(memory(staged, staged.cells(tried)), budget):
            runs = without_useless(staged, tried)
    return runs


def _excess(used: npt.NDArray[np.int64], budget: int) -> int:
    """Bytes above ``budget``, summed over all cells."""
    return int(np.maximum(used - budget, 0).sum())


class _Peak:
    """The cell with most memory, at position ``p``, where ``wanted`` bytes are to be freed, and ways to do so."""

    def __init__(self, staged: Staged, budget: int, now: Timeline) -> None:
        self.staged, self.budget, self.now = staged, budget, now
        self.p = int(now.memory.argmax())
        self.wanted = int(now.memory[self.p]) - budget
        self.most: dict[int, list[int]] = {}

    def with_drops(self, runs: Reruns, drops: Sequence[_Drop]) -> tuple[Reruns, int]:
        """``runs`` with the reruns of ``drops``, and the excess then."""
        stages = list(runs)
        for drop in drops:
            stages[drop.stage] = tuple(sorted({*stages[drop.stage], *drop.reruns}))
        tried = without_useless(self.staged, stages)
        return tried, _excess(memory(self.staged, self.staged.cells(tried)), self.budget)

    def drops(self, early: bool = False) -> list[_Drop]:
        """Ways to free bytes here, those of least cost per byte first.

        ``early``: data are made again at earlier cells with little memory, not just before their next reader.
        """
        staged, wanted = self.staged, self.wanted
        rates: list[float] = []  # costs per byte of the best so far, rising
        drops: list[_Drop] = []
        # Data of cheap operations come first, so that expensive ones are rejected early.
        live = sorted(self._droppable(), key=lambda w: (staged.operations[staged.owners[w[0]]].time, w[0]))
        if early:
            live = [(d, q) for d, reader in live for q in self._emptiest(reader)]
        for d, reader in live:
            most = rates[-1] if len(rates) >= MOST_CANDIDATES else float("inf")
            drop = self._drop(d, reader, most * min(staged.sizes[d], wanted))
            if drop:
                drops.append(drop)
                insort(rates, drop.time / min(drop.freed, wanted))
                del rates[MOST_CANDIDATES:]
        return sorted(drops, key=lambda drop: (drop.time / min(drop.freed, wanted), -drop.freed))

    def _droppable(self) -> Iterator[tuple[int, int]]:
        """Data that could be dropped here, live and not read, each with the position that reads it next."""
        staged = self.staged
        for d, size in enumerate(staged.sizes):
            if size and d not in staged.held and staged.operations[staged.owners[d]].rerun:
                copy = next((c for c in self.now.copies[d] if c[0] < self.p < c[-1]), [])
                at = bisect_left(copy, self.p)
                if at < len(copy) and copy[at] > self.p:
                    yield d, copy[at]

    def _emptiest(self, reader: int) -> list[int]:
        """The positions of the ``LOW`` emptiest steps between here and ``reader``."""
        steps = (q for q in range(self.p + 1, reader) if self.now.cells[q][0] == self.now.cells[q][1])
        return sorted(steps, key=lambda q: (int(self.now.memory[q]), q))[:LOW]

    def _most_between(self, start: int, reader: int) -> int:
        """The most memory of the positions from ``start`` until before ``reader``."""
        if reader not in self.most:
            rising = np.maximum.accumulate(self.now.memory[:reader][::-1])
            self.most[reader] = rising[::-1].tolist()
        return self.most[reader][start] if start < reader else 0

    def _drop(self, d: int, reader: int, most_time: float) -> _Drop | None:
        """Drop d, and make it again just before ``reader``; None if that frees nothing, or takes over ``most_time``.

        A rerun may read data that are not live there. They stay live if memory allows; else they are made again too.
        """
        staged = self.staged
        stage = self.now.cells[reader][0]
        if stage not in staged.operations[staged.owners[d]].stages:
            return None
        reruns: set[int] = set()
        freed, time = staged.sizes[d], 0
        pending = [staged.owners[d]]
        while pending:
            i = pending.pop()
            if i in reruns:
                continue
            reruns.add(i)
            time += staged.operations[i].time
            if time > most_time:
                return None
            for j in staged.operations[i].reads:
                end = next((copy[-1] for copy in reversed(self.now.copies[j]) if copy[0] < reader), reader)
                if end >= reader or not staged.sizes[j] or j in staged.held:  # it is live there, or always
                    continue
                stays = self._most_between(end + 1, reader) + staged.sizes[j] <= self.budget
                if stays or stage not in staged.operations[staged.owners[j]].stages:
                    freed -= staged.sizes[j] if end < self.p else 0
                else:
                    pending.append(staged.owners[j])
        return _Drop(stage, frozenset(reruns), time, freed) if freed > 0 else None
