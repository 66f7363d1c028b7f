"""The fast heuristic: drop the datum that gives most for least until all cells fit, then take back what was not needed.

``repair`` starts from any reruns, those of no schedule at all (keep all) or of a relaxation. At the cell that
oversteps most, every live datum that waits there for a later reader is a candidate: dropping it frees its bytes,
and costs the reruns that make it again just before that reader, down to what is live there or can stay live. The
candidates of best cost per byte are tried, and the one that takes most of the overstepping bytes away for
its cost is kept; where none does, it is tried to make the datum again earlier, where memory is low. ``trim`` then
removes reruns, the dearest first, as long as all cells fit.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.whole.stages import Runs, Staged, Timeline, memory, timeline, without_useless

TRIED = 6
"""Candidates that are tried out per step; if none of them helps, five times as many."""

LOW = 4
"""Steps between a drop and its next reader at which it is tried to make the datum again."""

MOST_CANDIDATES = 50
"""Candidates kept per step, those of the best rates."""


@dataclass(frozen=True, slots=True)
class _Drop:
    """Reruns ``extra`` in stage ``stage``, which free ``freed`` bytes where they are wanted, for ``time``."""

    stage: int
    extra: frozenset[int]
    time: int
    freed: int


def repair(staged: Staged, budget: int, runs: Runs, remaining: Callable[[], float]) -> Runs | None:
    """Reruns that fit ``budget``, from ``runs``; None if the way down ends before, or no time is left."""
    now = timeline(staged, runs)
    over = _over(now.memory, budget)
    while over:
        drops = _candidates(staged, budget, now)
        found = _many(staged, budget, runs, now, drops, over) or _one(staged, budget, runs, drops, over, remaining)
        if found is None:
            found = _one(staged, budget, runs, _candidates(staged, budget, now, early=True), over, remaining)
        if found is None:
            return None
        runs, now = found, timeline(staged, found)
        over = _over(now.memory, budget)
    return trim(staged, budget, runs, remaining)


def _many(staged: Staged, budget: int, runs: Runs, now: Timeline, drops: list[_Drop], over: int) -> Runs | None:
    """The best candidates together, as long as they free no more than half of what is wanted; None if that is one."""
    wanted = (int(now.memory.max()) - budget) / 2
    count = 0
    while count < len(drops) and wanted >= drops[count].freed:
        wanted -= drops[count].freed
        count += 1
    if count < 2:
        return None
    tried = _with(staged, runs, drops[:count])
    return tried if _over(memory(staged, staged.cells(tried)), budget) < over else None


def _one(
    staged: Staged, budget: int, runs: Runs, drops: list[_Drop], over: int, remaining: Callable[[], float]
) -> Runs | None:
    """The candidate that takes most of what oversteps away for its cost."""
    cost = staged.cost(runs)
    best: tuple[float, int, Runs] | None = None
    for rank, drop in enumerate(drops[: 5 * TRIED]):
        if remaining() <= 0 or (rank >= TRIED and best):
            break
        tried = _with(staged, runs, [drop])
        left = _over(memory(staged, staged.cells(tried)), budget)
        if left < over:
            score = ((staged.cost(tried) - cost) / (over - left), left)
            if best is None or score < best[:2]:
                best = (*score, tried)
    return best[2] if best and remaining() > 0 else None


def trim(staged: Staged, budget: int, runs: Runs, remaining: Callable[[], float]) -> Runs:
    """``runs``, which fit, without those that are not needed to fit; the dearest are tried first.

    One pass: where a rerun is left out, an older copy lives on, so that what did not fit before hardly does later.
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
        if not _over(memory(staged, staged.cells(tried)), budget):
            runs = without_useless(staged, tried)
    return runs


def _over(used: npt.NDArray[np.int64], budget: int) -> int:
    """Bytes over budget, summed over all cells."""
    return int(np.maximum(used - budget, 0).sum())


def _with(staged: Staged, runs: Runs, drops: Sequence[_Drop]) -> Runs:
    stages = list(runs)
    for drop in drops:
        stages[drop.stage] = tuple(sorted({*stages[drop.stage], *drop.extra}))
    return without_useless(staged, stages)


def _candidates(staged: Staged, budget: int, now: Timeline, early: bool = False) -> list[_Drop]:
    """Ways to free bytes at the cell with most memory, the best rates first, as many as may be tried.

    ``early``: data are made again where memory is low on the way to their next reader, not just before it.
    """
    p = int(now.memory.argmax())
    wanted = int(now.memory[p]) - budget
    rates: list[float] = []  # the best so far, rising
    drops: list[_Drop] = []
    chains = _Chains(staged, budget, now, p)
    # Short chains come first, as far as one operation tells, so that hopeless ones are given up early.
    live = sorted(_waiting(staged, now, p), key=lambda w: (staged.operations[staged.owners[w[0]]].time, w[0]))
    if early:
        live = [(d, q) for d, reader in live for q in _low(now, p, reader)]
    for d, reader in live:
        most = rates[-1] if len(rates) >= MOST_CANDIDATES else float("inf")
        drop = chains.drop(d, reader, most * min(staged.sizes[d], wanted))
        if drop:
            drops.append(drop)
            insort(rates, drop.time / min(drop.freed, wanted))
            del rates[MOST_CANDIDATES:]
    return sorted(drops, key=lambda drop: (drop.time / min(drop.freed, wanted), -drop.freed))


def _waiting(staged: Staged, now: Timeline, p: int) -> Iterator[tuple[int, int]]:
    """Data that could be dropped at p, each with the position that reads it next."""
    for d, size in enumerate(staged.sizes):
        if size and d not in staged.held and staged.operations[staged.owners[d]].rerun:
            reader = _next_reader(now, d, p)
            if reader is not None:
                yield d, reader


def _low(now: Timeline, p: int, reader: int) -> list[int]:
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


class _Chains:
    """What it takes to make a datum again at some position, for drops at ``p``."""

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
        """Drop d, to be made again just before ``reader``; None if that frees nothing, or takes over ``most_time``.

        What a rerun reads and is not live there stays live if memory allows, or runs again itself.
        """
        staged = self.staged
        stage = self.now.cells[reader][0]
        if stage < staged.first:
            return None
        extra: set[int] = set()
        freed, time = staged.sizes[d], 0
        pending = [staged.owners[d]]
        while pending:
            i = pending.pop()
            if i in extra:
                continue
            extra.add(i)
            time += staged.operations[i].time
            if time > most_time:
                return None
            for j in staged.operations[i].reads:
                end = _ends(self.now, j, reader)
                if end is None or not staged.sizes[j] or j in staged.held:
                    continue
                stays = self._most_between(end + 1, reader) + staged.sizes[j] <= self.budget
                if stays or not staged.operations[staged.owners[j]].rerun:
                    freed -= staged.sizes[j] if end < self.p else 0
                else:
                    pending.append(staged.owners[j])
        return _Drop(stage, frozenset(extra), time, freed) if freed > 0 else None


def _ends(now: Timeline, d: int, reader: int) -> int | None:
    """Where the last copy of d made before ``reader`` ends, if before it."""
    for copy in reversed(now.copies[d]):
        if copy[0] < reader:
            return copy[-1] if copy[-1] < reader else None
    return None
