"""Reruns without a solver, for any staged problem: recompute all, and sqrt(n) segments."""

from __future__ import annotations

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


def _rerun(staged: Staged, segment: list[int], kept: frozenset[int]) -> Reruns:
    """Before each step, what it reads runs again unless it is kept or has run in the step's segment."""
    runs: list[list[int]] = []
    here: set[int] = set()
    for t in range(staged.steps):
        if t and segment[t] != segment[t - 1]:
            here.clear()
        wanted = set(staged.operations[t].reads)
        stage: list[int] = []
        for i in range(t - 1, -1, -1) if t >= staged.first else ():
            operation = staged.operations[i]
            due = any(d in wanted and d not in kept for d in operation.makes)
            if due and operation.may_rerun(t) and i not in here and not staged.held.issuperset(operation.makes):
                stage.append(i)
                wanted.update(operation.reads)
        runs.append(stage[::-1])
        here.update(stage)
        here.add(t)
    return without_useless(staged, runs)
