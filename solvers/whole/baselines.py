"""Reruns without a solver, for any staged problem: recompute all, and segments that run again as wholes."""

from __future__ import annotations

from itertools import accumulate
from math import ceil, sqrt

from solvers.whole.stages import Reruns, Staged, without_useless


def recompute_all(staged: Staged) -> Reruns:
    """Keep nothing: before each step, all that leads to it runs again, if it may."""
    return _rerun(staged, list(range(staged.steps)), frozenset())


def sqrt_segments(staged: Staged) -> Reruns:
    """About sqrt(n) segments of steps. Data read in the next segment are kept; others run again where they are read.

    After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). A datum is a checkpoint if its first
    reader outside its own segment lies in the next one. Others run again once in each later segment that reads them.
    """
    length = max(1, ceil(sqrt(staged.steps)))
    segment = [t // length for t in range(staged.steps)]
    first: dict[int, int] = {}
    for t in range(staged.steps):
        for d in staged.operations[t].reads:
            if segment[t] > segment[staged.owners[d]]:
                first.setdefault(d, segment[t])
    kept = frozenset(d for d, s in first.items() if s == segment[staged.owners[d]] + 1)
    return _rerun(staged, segment, kept)


def segments_of_forward(staged: Staged, count: int, part: float = 1.0) -> Reruns:
    """A training step whose forward is cut into ``count`` segments of about equal bytes, as those of checkpoints.

    Data that a later segment reads are kept, if they are no larger than this ``part`` of all bytes. All others of a
    segment run again together, before the first backward that reads one of them.
    """
    forward = staged.first - 1
    made = [0, *accumulate(sum(staged.sizes[d] for d in op.makes) for op in staged.operations[:forward])]
    segment = [min(count - 1, count * made[t] // max(1, made[-1])) for t in range(forward)]
    readers = (t for t in range(forward) if staged.operations[t].makes)  # others only say until when data live
    crossing = {d for t in readers for d in staged.operations[t].reads if segment[staged.owners[d]] < segment[t]}
    kept = frozenset(d for d in crossing if staged.sizes[d] <= part * made[-1])
    for t in range(forward, staged.steps):
        read = [segment[staged.owners[d]] for d in staged.operations[t].reads]
        segment.append(max(read, default=segment[-1]))
    return _rerun(staged, segment, kept)


def _rerun(staged: Staged, segment: list[int], kept: frozenset[int]) -> Reruns:
    """Before each step, what it reads runs again unless it is kept or has run in the step's segment."""
    runs: list[list[int]] = []
    here: set[int] = set()
    for t in range(staged.steps):
        if t and segment[t] != segment[t - 1]:
            here.clear()
        stage: set[int] = set()
        left = list(staged.operations[t].reads)
        while left:
            d = left.pop()
            i = staged.owners[d]
            operation = staged.operations[i]
            if d in kept or i in here or i in stage or staged.held.issuperset(operation.makes):
                continue
            if t in operation.stages:
                stage.add(i)
                left += operation.reads
        runs.append(sorted(stage))
        here.update(stage)
        here.add(t)
    return without_useless(staged, runs)
