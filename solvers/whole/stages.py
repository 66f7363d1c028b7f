"""Problems as the whole-graph solvers see them: operations in the order of their first runs, and stages.

Both kinds of problem, a ``GraphProblem`` and a training step (``Problem``), become a ``Staged``. Stage t consists of
reruns, each operation at most once and in order, and ends with step t, the first run of operation t. The rerun of i in
stage t is the *cell* (t, i) with i < t, and step t is the cell (t, t). A schedule executes its cells in lexicographic
order. This is the class "fixed order of first runs, frontier-advancing" of Checkmate (Jain et al., MLSys 2020). What
must be kept follows from the reruns by liveness, so a solver decides on ``Reruns`` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import numpy.typing as npt

from solvers.liveness import plain_steps, with_deletes
from solvers.problem import Node, Problem
from solvers.schedule import Run, Schedule, Step
from solvers.whole.graph import GraphProblem

Cell = tuple[int, int]
Reruns = tuple[tuple[int, ...], ...]
"""For each stage, the operations that run again in it, in order."""

MOST_NEW = 12
"""Most cells that ``peaks`` returns."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One computation. ``own``: the most bytes that a run allocates, results included.

    ``least_time``: that of a rerun in a stage that made again all that it reads. ``stages``: those in which it may run
    again. ``rng``: bytes of generator state, kept from the first run to the last.
    """

    time: int
    least_time: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    own: int
    stages: range = range(0)
    rng: int = 0

    @property
    def rerun(self) -> bool:
        """Whether it may run again."""
        return bool(self.stages)


@dataclass(frozen=True)
class Staged:
    """A problem in stages: operation t first runs in step t. Data have ``sizes`` (bytes) and ``owners`` (operations).

    ``base[t]``: bytes besides data and ``own`` while step t runs, those of gradients. ``before[t]``: the same while
    operations run again in stage t. Stages before ``first`` have no reruns. ``held`` data are never deleted.
    """

    operations: tuple[Operation, ...]
    sizes: tuple[int, ...]
    owners: tuple[int, ...]
    base: tuple[int, ...]
    before: tuple[int, ...]
    first: int = 0
    held: frozenset[int] = frozenset()

    @cached_property
    def reads(self) -> tuple[frozenset[int], ...]:
        """What each operation reads."""
        return tuple(frozenset(op.reads) for op in self.operations)

    @cached_property
    def rises(self) -> dict[int, int]:
        """For steps t that can delete several data, the bytes by which stage t+1 begins with more than step t takes
        besides data.
        """
        several = [t for t in range(self.steps - 1) if len(self.reads[t] - self.held) > 1]
        rises = {t: self.before[t + 1] - self.base[t] - self.operations[t].own for t in several}
        return {t: rise for t, rise in rises.items() if rise > 0}

    @cached_property
    def for_speed(self) -> frozenset[int]:
        """Operations that take less time than their readers may gain in all, if these run right after them."""
        gains = [0] * len(self.operations)
        for op in self.operations:
            for i in {self.owners[d] for d in op.reads}:
                gains[i] += op.time - op.least_time
        return frozenset(i for i, op in enumerate(self.operations) if gains[i] > op.least_time)

    @property
    def steps(self) -> int:
        """The number of steps, which is that of operations and of stages."""
        return len(self.operations)

    @property
    def eager_time(self) -> int:
        """The time of running every operation once."""
        return sum(operation.time for operation in self.operations)

    def cells(self, runs: Sequence[Sequence[int]]) -> list[Cell]:
        """All cells that execute with ``runs``, in order."""
        return [(t, i) for t in range(self.steps) for i in (*runs[t], t)]

    def extra(self, cell: Cell) -> int:
        """Bytes besides data and ``own`` while ``cell`` executes (generator states not counted)."""
        t, i = cell
        return self.base[t] if i == t else self.before[t]

    def none(self) -> Reruns:
        """No reruns."""
        return ((),) * self.steps

    def cost(self, runs: Sequence[Sequence[int]]) -> int:
        """Time of the reruns."""
        total = 0
        for stage in runs:
            made: set[int] = set()
            for i in stage:
                operation = self.operations[i]
                just_made = bool(operation.reads) and made.issuperset(operation.reads)
                total += operation.least_time if just_made else operation.time
                made.update(operation.makes)
        return total


def staged_graph(problem: GraphProblem) -> Staged:
    """A general graph: each node is an operation, and its output is its datum."""
    nodes, count = problem.nodes, len(problem.nodes)
    own = (Operation(n.time, n.time, n.reads, (i,), n.size + n.transient, range(count)) for i, n in enumerate(nodes))
    return Staged(tuple(own), tuple(n.size for n in nodes), tuple(range(count)), (0,) * count, (0,) * count)


def staged_step(problem: Problem) -> Staged:
    """A training step: forward nodes, the loss, then backwards, which run once. Nothing runs again before the loss.

    ``Staged.rises`` is empty where the loss has room for the gradients that it leaves, and each backward for those that
    the next one begins with. Elsewhere a deletion between them may set the peak, which ``memory`` counts, and the
    integer program of ``solvers.whole.relaxation`` does not.
    """
    first, backwards = len(problem.nodes) + 1, problem.backward_order()

    def stages(node: Node) -> range:
        last, earliest = node.within or (len(problem.nodes), 0)
        inside = [first + k for k, i in enumerate(backwards) if node.rerun and earliest <= i <= last]
        return range(inside[0], inside[-1] + 1) if inside else range(0)

    operations = [Operation(n.time, n.least_time, n.reads, n.makes, n.peak, stages(n), n.rng) for n in problem.nodes]
    operations.append(Operation(0, 0, tuple(sorted(problem.returned)), (), problem.loss))
    base, before = [0] * first, [0] * first
    for i in backwards:
        backward = problem.nodes[i].backward
        assert backward is not None
        operations.append(Operation(backward.time, backward.time, backward.reads, (), 0))
        base.append(backward.peak)
        before.append(backward.before)
    sizes, owners = tuple(d.size for d in problem.data), tuple(d.owner for d in problem.data)
    return Staged(tuple(operations), sizes, owners, tuple(base), tuple(before), first, problem.held)


def schedule_graph(problem: GraphProblem, runs: Reruns) -> Schedule:
    """``runs`` as a schedule."""
    return with_deletes(problem, (Run(i) for t, stage in enumerate(runs) for i in (*stage, t)))


def schedule_step(problem: Problem, runs: Reruns) -> Schedule:
    """``runs`` of ``staged_step(problem)`` as a schedule."""
    order: list[Step] = []
    for stage, step in zip(runs, plain_steps(problem), strict=True):
        order += [*map(Run, stage), step]
    return with_deletes(problem, order)


def without_useless(staged: Staged, runs: Sequence[Sequence[int]]) -> Reruns:
    """``runs`` in order, without those whose results nothing reads before they are made again."""
    kept: list[tuple[int, ...]] = []
    needed: set[int] = set()
    for t in reversed(range(staged.steps)):
        stage: list[int] = []
        for i in (t, *sorted(runs[t], reverse=True)):
            operation = staged.operations[i]
            if i != t:
                if needed.isdisjoint(operation.makes):
                    continue
                stage.append(i)
            needed.difference_update(operation.makes)
            needed.update(operation.reads)
        kept.append(tuple(reversed(stage)))
    return tuple(reversed(kept))


@dataclass(frozen=True)
class Timeline:
    """Memory of ``runs``: ``memory[p]`` bytes while the p-th of ``cells`` executes.

    A *copy* of a datum lives from the cell that makes it to the last that reads it. ``copies[d]`` lists
    (made at, reads at ..., ) positions per copy of datum d.
    """

    cells: list[Cell]
    memory: npt.NDArray[np.int64]
    copies: list[list[list[int]]]

    @property
    def peak(self) -> int:
        """Bytes."""
        return int(self.memory.max()) if len(self.cells) else 0

    def is_live(self, d: int, at: Cell) -> bool:
        """Whether a copy of d, made before cell ``at``, is read at it or later."""
        return any(self.cells[copy[0]] < at <= self.cells[copy[-1]] for copy in self.copies[d])


def timeline(staged: Staged, runs: Sequence[Sequence[int]]) -> Timeline:
    """The memory of ``runs`` by liveness."""
    cells = staged.cells(runs)
    copies: list[list[list[int]]] = [[] for _ in staged.sizes]
    for p, (_, i) in enumerate(cells):
        operation = staged.operations[i]
        for d in operation.reads:
            copies[d][-1].append(p)
        for d in operation.makes:
            copies[d].append([p])
    return Timeline(cells, memory(staged, cells), copies)


def memory(staged: Staged, cells: Sequence[Cell]) -> npt.NDArray[np.int64]:
    """Bytes while each of ``cells`` executes: ``Timeline.memory``, for callers that need no copies."""
    sizes, operations = staged.sizes, staged.operations
    change = [0] * (len(cells) + 1)
    last: list[int] = [-1] * len(sizes)  # where the current copy was made, or read last
    for p, cell in enumerate(cells):
        operation = operations[cell[1]]
        own = operation.own + staged.extra(cell)
        change[p] += own
        change[p + 1] -= own
        for d in operation.reads:
            last[d] = p
        for d in operation.makes:
            if d in staged.held:
                change[p + 1] += sizes[d] if last[d] < 0 else 0
            else:
                change[last[d] + 1] -= sizes[d] if last[d] >= 0 else 0
                change[p + 1] += sizes[d]
            last[d] = p
    for d, end in enumerate(last):
        if end >= 0 and d not in staged.held:
            change[end + 1] -= sizes[d]
    _add_generator_states(staged, cells, change)
    used = np.cumsum(np.array(change[:-1], np.int64))
    _count_deletions(staged, cells, used)
    return used


def _count_deletions(staged: Staged, cells: Sequence[Cell], used: npt.NDArray[np.int64]) -> None:
    """Where gradients rise behind a step: it takes as much as is there when the first datum has been deleted.

    Data are deleted one by one, in the order in which the step reads them (``solvers.liveness.with_deletes``).
    """
    if not staged.rises:
        return
    needed: set[int] = set()
    for p in reversed(range(len(cells))):
        t, i = cells[p]
        operation = staged.operations[i]
        if t == i and t in staged.rises:
            first = next((d for d in operation.reads if d not in needed and d not in staged.held), None)
            if first is not None:
                used[p] += max(0, staged.rises[t] - staged.sizes[first])
        needed.difference_update(operation.makes)
        needed.update(operation.reads)


def _add_generator_states(staged: Staged, cells: Sequence[Cell], change: list[int]) -> None:
    if not any(op.rng for op in staged.operations):
        return
    last = {i: p for p, (_, i) in enumerate(cells)}
    for p, (t, i) in enumerate(cells):
        if t == i and staged.operations[i].rng and last[i] > p:
            change[p] += staged.operations[i].rng
            change[last[i] + 1] -= staged.operations[i].rng


def peaks(spread: Timeline, budget: int, most: int = MOST_NEW) -> list[Cell]:
    """For each stretch of cells above ``budget`` bytes, the cell with most memory; the ``most`` worst of these."""
    worst: list[tuple[int, Cell]] = []
    for above, stretch in groupby(zip(spread.memory.tolist(), spread.cells, strict=True), lambda x: x[0] > budget):
        if above:
            worst.append(max(stretch, key=lambda x: x[0]))
    return [cell for _, cell in sorted(worst, reverse=True)[:most]]
