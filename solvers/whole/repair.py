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
    excess = _excess(now.memory, budget)
    while excess:
        drops = _candidates(staged, budget, now)
        dropped = _drop_several(staged, budget, runs, now, drops, excess)
        if dropped is None:
            dropped = _drop_best(staged, budget, runs, drops, excess, remaining)
        if dropped is None:
            drops = _candidates(staged, budget, now, early=True)
            dropped = _drop_best(staged, budget, runs, drops, excess, remaining)
        if dropped is None:
            return None
        runs, now = dropped, timeline(staged, dropped)
        excess = _excess(now.memory, budget)
    return trim(staged, budget, runs, remaining)


def _drop_several(
    staged: Staged, budget: int, runs: Reruns, now: Timeline, drops: list[_Drop], excess: int
) -> Reruns | None:
    """The best candidates together that free up to half of the excess at the peak; None if these are fewer than two."""
    wanted = (int(now.memory.max()) - budget) / 2
    count = 0
    while count < len(drops) and wanted >= drops[count].freed:
        wanted -= drops[count].freed
        count += 1
    if count < 2:
        return None
    tried = _with_drops(staged, runs, drops[:count])
    return tried if _excess(memory(staged, staged.cells(tried)), budget) < excess else None


def _drop_best(
    staged: Staged, budget: int, runs: Reruns, drops: list[_Drop], excess: int, remaining: Callable[[], float]
) -> Reruns | None:
    """The candidate that reduces the excess most for its cost; None if none does, or no time remains."""
    cost = staged.cost(runs)
    best: tuple[float, int, Reruns] | None = None
    for rank, drop in enumerate(drops[: 5 * TRIED]):
        if remaining() <= 0 or (rank >= TRIED and best):
            break
        tried = _with_drops(staged, runs, [drop])
        left = _excess(memory(staged, staged.cells(tried)), budget)
        if left < excess:
            score = ((staged.cost(tried) - cost) / (excess - left), left)
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


def _with_drops(staged: Staged, runs: Reruns, drops: Sequence[_Drop]) -> Reruns:
    stages = list(runs)
    for drop in drops:
        stages[drop.stage] = tuple(sorted({*stages[drop.stage], *drop.reruns}))
    return without_useless(staged, stages)


def _candidates(staged: Staged, budget: int, now: Timeline, early: bool = False) -> list[_Drop]:
    """Ways to free bytes at the cell with most memory, those of least cost per byte first.

    ``early``: data are made again at earlier cells with little memory, not just before their next reader.
    """
    p = int(now.memory.argmax())
    wanted = int(now.memory[p]) - budget
    rates: list[float] = []  # costs per byte of the best so far, rising
    drops: list[_Drop] = []
    remaking = _Remaking(staged, budget, now, p)
    # Data of cheap operations come first, so that expensive ones are rejected early.
    live = sorted(_droppable(staged, now, p), key=lambda w: (staged.operations[staged.owners[w[0]]].time, w[0]))
    if early:
        live = [(d, q) for d, reader in live for q in _emptiest(now, p, reader)]
    for d, reader in live:
        most = rates[-1] if len(rates) >= MOST_CANDIDATES else float("inf")
        drop = remaking.drop(d, reader, most * min(staged.sizes[d], wanted))
        if drop:
            drops.append(drop)
            insort(rates, drop.time / min(drop.freed, wanted))
            del rates[MOST_CANDIDATES:]
    return sorted(drops, key=lambda drop: (drop.time / min(drop.freed, wanted), -drop.freed))


def _droppable(staged: Staged, now: Timeline, p: int) -> Iterator[tuple[int, int]]:
    """Data that could be dropped at p, each with the position that reads it next."""
    for d, size in enumerate(staged.sizes):
        if size and d not in staged.held and staged.operations[staged.owners[d]].rerun:
            reader = _next_reader(now, d, p)
            if reader is not None:
                yield d, reader


def _emptiest(now: Timeline, p: int, reader: int) -> list[int]:
    """The positions of the ``LOW`` emptiest steps between p and ``reader``."""
    steps = (q for q in range(p + 1, reader) if now.cells[q][0] == now.cells[q][1])
    return sorted(steps, key=lambda q: (int(now.memory[q]), q))[:LOW]


def _next_reader(now: Timeline, d: int, p: int) -> int | None:
    """The position that reads d next after p, if d is live at p and not read there."""
    for copy in now.copies[d]:
        if copy[0] < p < copy[-1]:
            at = bisect_left(copy, p)
            return copy[at] if copy[at] > p else None
    return None


class _Remaking:
    """The reruns that make a datum again, for drops at position ``p``."""

    def __init__(self, staged: Staged, budget: int, now: Timeline, p: int) -> None:
        self.staged, self.budget, self.now, self.p = staged, budget, now, p
        self.most: dict[int, list[int]] = {}

    def _most_between(self, start: int, reader: int) -> int:
        """The most memory of the positions from ``start`` until before ``reader``."""
        if reader not in self.most:
            rising = np.maximum.accumulate(self.now.memory[:reader][::-1])
            self.most[reader] = rising[::-1].tolist()
        return self.most[reader][start] if start < reader else 0

    def drop(self, d: int, reader: int, most_time: float) -> _Drop | None:
        """Drop d, and make it again just before ``reader``; None if that frees nothing, or takes over ``most_time``.

        A rerun may read data that are not live there. They stay live if memory allows; else they are made again too.
        """
        staged = self.staged
        stage = self.now.cells[reader][0]
        if stage < staged.first or not staged.operations[staged.owners[d]].may_rerun(stage):
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
                end = _copy_end(self.now, j, reader)
                if end is None or not staged.sizes[j] or j in staged.held:
                    continue
                stays = self._most_between(end + 1, reader) + staged.sizes[j] <= self.budget
                if stays or not staged.operations[staged.owners[j]].may_rerun(stage):
                    freed -= staged.sizes[j] if end < self.p else 0
                else:
                    pending.append(staged.owners[j])
        return _Drop(stage, frozenset(reruns), time, freed) if freed > 0 else None


def _copy_end(now: Timeline, d: int, reader: int) -> int | None:
    """The position at which the last copy of d made before ``reader`` ends, if that is before ``reader``."""
    for copy in reversed(now.copies[d]):
        if copy[0] < reader:
            return copy[-1] if copy[-1] < reader else None
    return None
