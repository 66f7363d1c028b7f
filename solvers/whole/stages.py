"""Problems as the whole-graph solvers see them: operations in the order of their first runs, and stages.

Both kinds of problem, a ``GraphProblem`` and a training step (``Problem``), become a ``Staged``. Stage t consists of
reruns, each operation at most once and in order, and ends with step t, the first run of operation t. The rerun of i in
stage t is the *cell* (t, i) with i < t, and step t is the cell (t, t). A schedule executes its cells in lexicographic
order. This is the class "fixed order of first runs, frontier-advancing" of Checkmate (Jain et al., MLSys 2020). What
must be kept follows from the reruns by liveness, so a solver decides on ``Reruns`` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from solvers.liveness import with_deletes
from solvers.problem import Node, Problem
from solvers.schedule import Bwd, Loss, Run, Schedule, Step
from solvers.whole.graph import GraphProblem, graph_schedule

Cell = tuple[int, int]
Reruns = tuple[tuple[int, ...], ...]
"""For each stage, the operations that run again in it, in order."""

MOST_NEW = 12
"""Most cells that ``peaks`` returns."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One computation. ``own``: the most bytes that a run allocates, results included.

    ``rng``: bytes of generator state, kept from the first run to the last. ``warm``: the time of a rerun in a stage
    that made again all that it reads; None: the same ``time``. ``stages``: those in which it may run again; None: all.
    """

    time: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    own: int
    rerun: bool = True
    rng: int = 0
    warm: int | None = None
    stages: range | None = None

    @property
    def least_time(self) -> int:
        """Nanoseconds that a run takes at least."""
        return self.time if self.warm is None else self.warm

    def may_rerun(self, stage: int) -> bool:
        """Whether it may run again in ``stage``."""
        return self.rerun and (self.stages is None or stage in self.stages)


@dataclass(frozen=True)
class Staged:
    """A problem in stages: operation t first runs in step t. Data have ``sizes`` (bytes) and ``owners`` (operations).

    ``base[t]``: bytes besides data and ``own`` while step t runs, those of gradients. ``before[t]``: the same while
    operations run again in stage t. Stages before ``first`` have no reruns. ``held`` data are never deleted.
    ``for_speed``: operations that take less time than their readers may gain in all, if these run right after them.
    ``rises[t]``: for steps that can delete several data, the bytes by which stage t+1 begins with more than step t
    takes besides data.
    """

    operations: tuple[Operation, ...]
    sizes: tuple[int, ...]
    owners: tuple[int, ...]
    base: tuple[int, ...]
    before: tuple[int, ...]
    first: int = 0
    held: frozenset[int] = frozenset()
    reads: tuple[frozenset[int], ...] = field(init=False)
    rises: dict[int, int] = field(init=False)
    for_speed: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        reads = tuple(frozenset(op.reads) for op in self.operations)
        rises = {
            t: self.before[t + 1] - self.base[t] - self.operations[t].own
            for t in range(self.steps - 1)
            if len(reads[t] - self.held) > 1
        }
        gains = [0] * len(self.operations)
        for op in self.operations:
            for i in {self.owners[d] for d in op.reads}:
                gains[i] += op.time - op.least_time
        for_speed = frozenset(i for i, op in enumerate(self.operations) if gains[i] > op.least_time)
        object.__setattr__(self, "for_speed", for_speed)
        object.__setattr__(self, "reads", reads)
        object.__setattr__(self, "rises", {t: rise for t, rise in rises.items() if rise > 0})

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
    operations = tuple(Operation(n.time, n.reads, (i,), n.size + n.transient) for i, n in enumerate(nodes))
    return Staged(operations, tuple(n.size for n in nodes), tuple(range(count)), (0,) * count, (0,) * count)


def staged_step(problem: Problem) -> Staged:
    """A training step: forward nodes, the loss, then backwards, which run once. Nothing runs again before the loss.

    ``Staged.rises`` is empty where the loss has room for the gradients that it leaves, and each backward for those that
    the next one begins with. Elsewhere a deletion between them may set the peak, which ``memory`` counts, and the
    integer program of ``solvers.whole.relaxation`` does not.
    """
    backwards = problem.backward_order()
    operations = [
        Operation(n.time, n.reads, n.makes, n.peak, n.rerun, n.rng, n.warm, _stages(n, len(problem.nodes), backwards))
        for n in problem.nodes
    ]
    operations.append(Operation(0, tuple(sorted(problem.returned)), (), problem.loss, rerun=False))
    base, before = [0] * len(operations), [0] * len(operations)
    for i in backwards:
        backward = problem.nodes[i].backward
        assert backward is not None
        operations.append(Operation(backward.time, backward.reads, (), 0, rerun=False))
        base.append(backward.peak)
        before.append(backward.before)
    return Staged(
        tuple(operations),
        tuple(d.size for d in problem.data),
        tuple(d.owner for d in problem.data),
        tuple(base),
        tuple(before),
        first=len(problem.nodes) + 1,
        held=problem.held,
    )


def _stages(node: Node, count: int, backwards: Sequence[int]) -> range | None:
    """The stages of the backwards ``node.within``, which come after those of ``count`` nodes and the loss."""
    if node.within is None:
        return None
    inside = [count + 1 + k for k, i in enumerate(backwards) if node.within[1] <= i <= node.within[0]]
    return range(inside[0], inside[-1] + 1) if inside else range(0)


def schedule_graph(problem: GraphProblem, runs: Reruns) -> Schedule:
    """``runs`` as a schedule."""
    return graph_schedule(problem, (i for _, i in staged_graph(problem).cells(runs)))


def schedule_step(problem: Problem, runs: Reruns) -> Schedule:
    """``runs`` of ``staged_step(problem)`` as a schedule."""
    count = len(problem.nodes)
    last: list[Step] = [*(Run(i) for i in range(count)), Loss(), *(Bwd(i) for i in problem.backward_order())]
    order: list[Step] = []
    for t, stage in enumerate(runs):
        order += [Run(i) for i in stage]
        order.append(last[t])
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
    above = spread.memory > budget
    worst: list[tuple[int, Cell]] = []
    start = None
    for p in range(len(spread.cells) + 1):
        inside = p < len(spread.cells) and above[p]
        if inside and start is None:
            start = p
        if not inside and start is not None:
            top = start + int(spread.memory[start:p].argmax())
            worst.append((int(spread.memory[top]), spread.cells[top]))
            start = None
    return [cell for _, cell in sorted(worst, reverse=True)[:most]]
