"""The fast heuristic: drop the datum that gives most for least until all cells fit, then take back what was not needed.

``repair`` starts from any reruns, those of no schedule at all (keep all) or of a relaxation. At the cell that
oversteps most, every live datum that waits there for a later reader is a candidate: dropping it frees its bytes,
and costs the reruns that make it again just before that reader, down to what is live there or can stay live. The
candidates of best cost per byte are tried, and the one that takes most of the overstepping bytes away for
its cost is kept. ``trim`` then removes reruns, the dearest first, as long as all cells fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from solvers.stages import Runs, Staged, Timeline, timeline, without_useless

TRIED = 6
"""Candidates that are tried out per step."""


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
    over = _over(now, budget)
    while over:
        best: tuple[float, int, Runs, Timeline, int] | None = None
        for rank, drop in enumerate(_candidates(staged, budget, now)):
            if remaining() <= 0:
                return None
            if rank >= TRIED and (best or rank >= 5 * TRIED):
                break
            tried = _with(staged, runs, drop)
            then = timeline(staged, tried)
            left = _over(then, budget)
            if left < over:
                score = (staged.cost(tried) - staged.cost(runs)) / (over - left)
                if best is None or (score, left) < best[:2]:
                    best = score, left, tried, then, left
        if best is None:
            return None
        _, over, runs, now, _ = best
    return trim(staged, budget, runs, remaining)


def trim(staged: Staged, budget: int, runs: Runs, remaining: Callable[[], float]) -> Runs:
    """``runs``, which fit, without those that are not needed to fit; the dearest are tried first."""
    runs = without_useless(staged, runs)
    while remaining() > 0:
        chosen = [(staged.operations[i].time, t, i) for t, stage in enumerate(runs) for i in stage]
        removed = False
        for _, t, i in sorted(chosen, reverse=True):
            if i not in runs[t] or remaining() <= 0:
                continue
            stage = tuple(j for j in runs[t] if j != i)
            tried = without_useless(staged, (*runs[:t], stage, *runs[t + 1 :]))
            if timeline(staged, tried).peak <= budget:
                runs, removed = tried, True
        if not removed:
            break
    return runs


def _over(now: Timeline, budget: int) -> int:
    """Bytes over budget, summed over all cells."""
    return int(np.maximum(now.memory - budget, 0).sum())


def _with(staged: Staged, runs: Sequence[Sequence[int]], drop: _Drop) -> Runs:
    stage = tuple(sorted({*runs[drop.stage], *drop.extra}))
    return without_useless(staged, (*runs[: drop.stage], stage, *runs[drop.stage + 1 :]))


def _candidates(staged: Staged, budget: int, now: Timeline) -> list[_Drop]:
    """Ways to free bytes at the cell with most memory, the best rate first."""
    p = int(now.memory.argmax())
    wanted = int(now.memory[p]) - budget
    drops: list[_Drop] = []
    for d, size in enumerate(staged.sizes):
        if not size or d in staged.held or not staged.operations[staged.owners[d]].rerun:
            continue
        reader = _next_reader(now, d, p)
        if reader is not None:
            drop = _drop(staged, budget, now, d, p, reader)
            if drop:
                drops.append(drop)
    return sorted(drops, key=lambda drop: (drop.time / min(drop.freed, wanted), -drop.freed))


def _next_reader(now: Timeline, d: int, p: int) -> int | None:
    """The position that reads d next after p, if d is live at p and not read there."""
    for copy in now.copies[d]:
        if copy[0] < p < copy[-1]:
            at = bisect_left(copy, p)
            return copy[at] if copy[at] > p else None
    return None


def _drop(staged: Staged, budget: int, now: Timeline, d: int, p: int, reader: int) -> _Drop | None:
    """Drop d at p, to be made again just before ``reader``; None if its stage has no reruns, or nothing is gained."""
    stage = now.cells[reader][0]
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
        for j in staged.operations[i].reads:
            owner = staged.owners[j]
            end = _ends(now, j, reader)
            if end is None or not staged.sizes[j] or j in staged.held:
                continue
            stays = int(now.memory[end + 1 : reader].max(initial=0)) + staged.sizes[j] <= budget
            if stays or not staged.operations[owner].rerun:
                freed -= staged.sizes[j] if end < p else 0
            else:
                pending.append(owner)
    return _Drop(stage, frozenset(extra), time, freed) if freed > 0 else None


def _ends(now: Timeline, d: int, reader: int) -> int | None:
    """Where the last copy of d made before ``reader`` ends, if before it."""
    for copy in reversed(now.copies[d]):
        if copy[0] < reader:
            return copy[-1] if copy[-1] < reader else None
    return None
