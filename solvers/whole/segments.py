"""The cells of a staged problem, cut at a few positions, and what may be useful in each segment between them.

The *positions* p_1 < ... < p_m are cells, in the order in which a schedule goes through them. Segment k lies between
p_k and p_{k+1}, where p_0 stands before all cells and p_{m+1} behind them. ``solvers.whole.relaxation`` counts memory
at the positions only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

from solvers.whole.stages import Cell, Staged


class Segments:
    """A staged problem and the segments of its cells.

    ``limits``: p_0, ..., p_{m+1}. ``steps[k]``: the steps (first runs) inside segment k. ``born[i]``: the least k such
    that operation i first runs before p_k. ``reads`` and ``makes``: per operation, those of its data that have bytes
    and may be deleted; memory of all others is a constant. ``alive[k]``, ``again[k]``: the data at p_k, and the reruns
    in segment k, the latest first, that may serve a later step.
    """

    def __init__(self, staged: Staged, positions: Iterable[Cell]) -> None:
        self.staged = staged
        self.limits: tuple[Cell, ...] = ((-1, -1), *sorted(positions), (staged.steps, -1))
        self.count = len(self.limits) - 2  # of the positions
        # The step of its stage stands before a segment that begins with a step, else it is its first.
        self.steps = [range(low[0] + (low[0] == low[1]), high[0]) for low, high in pairwise(self.limits)]
        self.born = [bisect_right(self.limits, (i, i)) for i in range(staged.steps)]
        deletable = {d for d, size in enumerate(staged.sizes) if size and d not in staged.held}
        self.reads = [tuple(d for d in op.reads if d in deletable) for op in staged.operations]
        self.makes = [tuple(d for d in op.makes if d in deletable) for op in staged.operations]
        self.alive: list[frozenset[int]] = [frozenset()] * (self.count + 2)
        self.again: list[tuple[int, ...]] = [()] * (self.count + 1)
        for k in range(self.count, -1, -1):
            self._find_useful(k)

    def _find_useful(self, k: int) -> None:
        """Backwards through segment k: data that a step reads are wanted before it, and so is what makes them."""
        wanted = set(self.alive[k + 1])
        for t in self.steps[k]:
            wanted.update(self.reads[t])
        reruns: list[int] = []
        for i in range(min(self.limits[k + 1][0], self.staged.steps) - 1, -1, -1):
            # It may run again where it first ran before, and the segment has a cell for it.
            may = self.born[i] <= k and self.stage_of(k, i, self.staged.steps) is not None
            if may and not wanted.isdisjoint(self.makes[i]):
                reruns.append(i)
                wanted.update(self.reads[i])
        self.again[k] = tuple(reruns)
        if k:
            wanted.update(self.reads[self.limits[k][1]])
            self.alive[k] = frozenset(d for d in wanted if self.born[self.staged.owners[d]] <= k)

    def stage_of(self, k: int, i: int, latest: int) -> int | None:
        """The last stage up to ``latest`` in which segment k has a cell for a rerun of i; None if there is none."""
        low, high, stages = self.limits[k], self.limits[k + 1], self.staged.operations[i].stages
        for end in (high[0], high[0] - 1):
            t = min(latest, end, stages.stop - 1)
            if t > i and t in stages and low < (t, i) < high:
                return t
        return None
