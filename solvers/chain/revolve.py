"""Binomial checkpointing over the blocks of a chain, as if all blocks were equal.

The fewest runs of blocks that reverse a chain of l blocks, with at most c interfaces stored beside the input::

    runs(c, l) = min over 1 <= j < l of  j + runs(c-1, l-j) + runs(c, j);   runs(0, l) = l (l-1) / 2;  runs(c, 1) = 0

Source: the recurrence of Griewank and Walther, "Algorithm 799: Revolve", ACM TOMS 26 (2000). It is optimal for equal
blocks. It counts checkpoints, not bytes; the walker counts bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from solvers.liveness import drop_useless_runs, forward_phase, with_deletes
from solvers.problem import Problem
from solvers.schedule import Bwd, Run, Schedule, Step

Splits = list[list[int]]


def binomial_splits(length: int, checkpoints: int) -> Splits:
    """``splits[c][l]``: how many of l blocks (or stages) run before the next checkpoint is stored, if c may be stored.

    The last block needs no checkpoint, since the run before it makes its input.
    """
    base = np.arange(length + 1, dtype=np.int64)
    runs = base * (base - 1) // 2
    splits = [[max(1, size - 1) for size in range(length + 1)]]
    for _ in range(checkpoints):
        fewer, runs = runs, np.zeros(length + 1, np.int64)
        split = [1, 1]
        for size in range(2, length + 1):
            j = np.arange(1, size)
            total = j + fewer[size - j] + runs[j]
            best = int(total.argmin())
            runs[size] = total[best]
            split.append(best + 1)
        splits.append(split[: length + 1])
    return splits


def revolve(problem: Problem, checkpoints: int, splits: Splits | None = None) -> Schedule:
    """The schedule with at most ``checkpoints`` interfaces stored beside the input of the chain."""
    blocks = problem.blocks
    splits = splits or binomial_splits(len(blocks), checkpoints)
    order: list[Step] = [*forward_phase(problem)]
    # (first, last, checkpoints left, whether the blocks have just been run)
    todo = [(0, len(blocks) - 1, checkpoints, True)] if blocks else []
    while todo:
        i, j, left, ready = todo.pop()
        if i == j:
            inside = range(blocks[i].start, blocks[i].stop)
            order += [] if ready else [Run(n) for n in inside if problem.nodes[n].rerun]
            order += [Bwd(n) for n in reversed(inside) if problem.nodes[n].backward]
            continue
        k = i + splits[left][j - i + 1]
        if not ready:
            order += [Run(n) for n in range(blocks[i].start, blocks[k].start) if problem.nodes[n].rerun]
        todo += [(i, k - 1, left, False), (k, j, max(0, left - 1), ready)]
    return with_deletes(problem, drop_useless_runs(problem, order))


def revolve_schedules(problem: Problem) -> Iterator[Schedule]:
    """One schedule per number of checkpoints, from none to one per block."""
    most = max(0, len(problem.blocks) - 1)
    splits = binomial_splits(len(problem.blocks), most)
    return (revolve(problem, c, splits) for c in range(most + 1))
