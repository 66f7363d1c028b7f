"""The cells of a staged problem, cut at a few positions, and what may be useful in each segment between them.

The *positions* p_1 < ... < p_m are cells, in the order in which a schedule goes through them. Segment k lies between
p_k and p_{k+1}, where p_0 stands before all cells and p_{m+1} behind them. ``solvers.whole.relaxation`` counts memory
at the positions only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from solvers.whole.stages import Cell, Staged


@dataclass(frozen=True)
class Segments:
    """A staged problem and the segments of its cells.

    ``limits``: p_0, ..., p_{m+1}. ``steps[k]``: the steps (first runs) inside segment k. ``born[i]``: the least k such
    that operation i first runs before p_k. ``reads`` and ``makes``: per operation, those of its data that have bytes
    and may be deleted; memory of all others is a constant.
    """

    staged: Staged
    limits: tuple[Cell, ...]
    steps: tuple[range, ...]
    born: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """How many positions there are (m)."""
        return len(self.limits) - 2

    def stage_of(self, k: int, i: int, latest: int) -> int | None:
        """The last stage up to ``latest`` in which segment k has a cell for a rerun of i; None if there is none."""
        low, high, stages = self.limits[k], self.limits[k + 1], self.staged.operations[i].stages
        first, last = (0, self.staged.steps - 1) if stages is None else (stages.start, stages.stop - 1)
        for t in (min(latest, high[0], last), min(latest, high[0] - 1, last)):
            if t > i and t >= max(first, self.staged.first) and low < (t, i) < high:
                return t
        return None

    def may_rerun(self, k: int, i: int) -> bool:
        """Whether i may run again in segment k: it first ran before, and the segment has a cell for it."""
        return (
            self.born[i] <= k and self.staged.operations[i].rerun and self.stage_of(k, i, self.staged.steps) is not None
        )


def cut(staged: Staged, positions: Iterable[Cell]) -> Segments:
    """The cells of ``staged``, cut at ``positions``."""
    limits = ((-1, -1), *sorted(positions), (staged.steps, -1))
    steps, born = _first_runs(staged.steps, limits)
    deletable = {d for d, size in enumerate(staged.sizes) if size and d not in staged.held}
    reads = tuple(tuple(d for d in op.reads if d in deletable) for op in staged.operations)
    makes = tuple(tuple(d for d in op.makes if d in deletable) for op in staged.operations)
    return Segments(staged, limits, steps, born, reads, makes)


def _first_runs(count: int, limits: tuple[Cell, ...]) -> tuple[tuple[range, ...], tuple[int, ...]]:
    """Per segment the steps inside it, and per step the first position behind it."""
    born = [0] * count
    steps: list[range] = []
    at = 0
    for k, limit in enumerate(limits[1:], start=1):
        start = at
        while at < count and (at, at) < limit:
            born[at] = k
            at += 1
        steps.append(range(start, at))
        if at < count and (at, at) == limit:
            born[at] = k + 1
            at += 1
    return tuple(steps), tuple(born)


@dataclass(frozen=True)
class Useful:
    """What may serve a later step: ``alive[k]``, data at p_k; ``again[k]``, reruns in segment k, the latest first."""

    alive: tuple[frozenset[int], ...]
    again: tuple[tuple[int, ...], ...]


def useful(segments: Segments) -> Useful:
    """Backwards through the segments: data that a step reads are wanted before it, and so is what makes them."""
    staged, reads, makes = segments.staged, segments.reads, segments.makes
    alive: list[frozenset[int]] = [frozenset()] * (segments.count + 2)
    again: list[tuple[int, ...]] = [()] * (segments.count + 1)
    for k in range(segments.count, -1, -1):
        wanted = set(alive[k + 1])
        for t in segments.steps[k]:
            wanted.update(reads[t])
        reruns: list[int] = []
        for i in range(min(segments.limits[k + 1][0], staged.steps) - 1, -1, -1):
            if not wanted.isdisjoint(makes[i]) and segments.may_rerun(k, i):
                reruns.append(i)
                wanted.update(reads[i])
        again[k] = tuple(reruns)
        if k:
            wanted.update(reads[segments.limits[k][1]])
            alive[k] = frozenset(d for d in wanted if segments.born[staged.owners[d]] <= k)
    return Useful(tuple(alive), tuple(again))
