"""Binomial checkpointing over the blocks of a chain, as if all blocks were equal.

The fewest runs of blocks that reverse a chain of l blocks, with at most c interfaces stored beside the input::

    runs(c, l) = min over 1 <= j < l of  j + runs(c-1, l-j) + runs(c, j);   runs(0, l) = l (l-1) / 2;  runs(c, 1) = 0

Source: the recurrence of Griewank and Walther, "Algorithm 799: Revolve", ACM TOMS 26 (2000). It is optimal for equal
blocks. It counts checkpoints, not bytes; the walker counts bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from solvers.chain.expand import Choose, choices
from solvers.liveness import drop_useless_runs, forward_phase, with_deletes
from solvers.problem import Problem
from solvers.schedule import Bwd, Run, Schedule, Step


@lru_cache(maxsize=1)
def binomial(length: int) -> Choose:
    """The choices for ``length`` blocks (or stages); instead of slots of memory, they count checkpoints.

    The last block needs no checkpoint, since the run before it makes its input.
    """
    base = np.arange(length + 1, dtype=np.int64)
    runs = base * (base - 1) // 2
    splits = [[max(1, size - 1) for size in range(length + 1)]]  # of so many blocks, these run before the next one
    for _ in range(1, length):
        fewer, runs = runs, np.zeros(length + 1, np.int64)
        split = [1, 1]
        for size in range(2, length + 1):
            j = np.arange(1, size)
            total = j + fewer[size - j] + runs[j]
            best = int(total.argmin())
            runs[size] = total[best]
            split.append(best + 1)
        splits.append(split)

    def choose(i: int, j: int, checkpoints: int) -> tuple[int | None, int, int]:
        size = min(j, length - 1) - i + 1
        if size == 1:
            return 0, i + 1, checkpoints
        return None, i + splits[min(checkpoints, length - 1)][size], max(0, checkpoints - 1)

    return choose


def revolve(problem: Problem, checkpoints: int) -> Schedule:
    """The schedule with at most ``checkpoints`` interfaces stored beside the input of the chain."""
    blocks = problem.blocks
    order: list[Step] = [*forward_phase(problem)]
    for c in choices(len(blocks), binomial(len(blocks)), checkpoints):
        if c.backward:
            nodes = reversed(range(blocks[c.i].start, blocks[c.i].stop))
            order += [Bwd(n) for n in nodes if problem.nodes[n].backward]
        elif c.j < len(blocks):
            order += [Run(n) for n in range(blocks[c.i].start, blocks[c.k - 1].stop) if problem.nodes[n].rerun]
    return with_deletes(problem, drop_useless_runs(problem, order))


def revolve_schedules(problem: Problem) -> Iterator[Schedule]:
    """One schedule per number of checkpoints, from none to one per block."""
    return (revolve(problem, c) for c in range(max(1, len(problem.blocks))))
