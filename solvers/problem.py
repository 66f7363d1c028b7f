"""The input of the solvers: forward nodes in a fixed order, their data, and what each backward reads.

Sizes are bytes and times are nanoseconds, both integers. References are indices: node ``i`` is ``problem.nodes[i]``,
data ``d`` is ``problem.data[d]``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from solvers.errors import ProblemError, check_whole


@dataclass(frozen=True, slots=True)
class Data:
    """Memory that is kept or deleted as a whole: the result of node ``owner``, or tensors saved for its backward.

    ``size``: bytes.
    """

    name: str
    size: int
    owner: int


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of one node. ``time``: nanoseconds; ``reads``: the data that it reads.

    The order of backwards is fixed, so gradient memory is the same in all schedules. It is given in bytes: ``before``
    and ``after`` are those of all gradients live when this backward starts and ends. ``peak`` is the most that
    gradients and temporaries take while it runs, minus data of the node that the backward has freed by then
    (``peak >= max(before, after)``).
    """

    time: int
    reads: tuple[int, ...]
    before: int
    peak: int
    after: int


@dataclass(frozen=True, slots=True)
class Node:
    """One forward computation. ``time``: nanoseconds of a run; ``warm``: of one that runs again when all that it reads
    was made by runs since the last backward (at most ``time``; None: the same). Integer programs of blocks count
    ``time``; the walker, the whole-graph program and the bound count what takes place.

    ``reads``: the data that it reads. ``makes``: its data; every run makes all of them. ``peak``: the most bytes that a
    run allocates, results included. ``backward``: None for nodes without gradient. A node with ``rerun=False`` runs
    once, in the forward phase. ``rng``: bytes of generator state, for a node that draws random numbers. They are kept
    from its first run until its last, if it runs more than once. ``within``: it may run again only before backwards
    from the first of these nodes to the last, in backward order; None: before any.
    """

    name: str
    time: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    peak: int
    backward: Backward | None
    rerun: bool = True
    rng: int = 0
    warm: int | None = None
    within: tuple[int, int] | None = None

    @property
    def least_time(self) -> int:
        """Nanoseconds that a run takes at least."""
        return self.time if self.warm is None else self.warm


@dataclass(frozen=True, slots=True)
class Block:
    """Nodes ``start .. stop-1``. Blocks of one ``kind`` are alike and are solved once."""

    start: int
    stop: int
    kind: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A training step: nodes in topological order, then the loss, then backwards in reverse order.

    ``held``: data that are never deleted, since the caller holds these outputs. ``returned``: data that the loss reads,
    outputs that the caller releases after it. ``loss``: the most bytes that the caller's loss allocates between forward
    and backward, the gradients of the outputs included. ``blocks``: groups of consecutive nodes.

    Invariants, checked by ``verify``: a node reads data of earlier nodes only; every datum is made by its owner;
    backwards read data of their own or earlier nodes; figures are whole numbers from 0; blocks partition the nodes in
    order; blocks of one kind have equally many nodes, with backwards at the same places.
    """

    nodes: tuple[Node, ...]
    data: tuple[Data, ...]
    held: frozenset[int]
    loss: int
    blocks: tuple[Block, ...]
    returned: frozenset[int] = frozenset()

    @property
    def eager_time(self) -> int:
        """Nanoseconds of the step without recomputation."""
        return sum(n.time + (n.backward.time if n.backward else 0) for n in self.nodes)

    @property
    def form(self) -> tuple[object, ...]:
        """What is equal in problems that differ in bytes and times only, so that schedules of one are of the other."""
        nodes = tuple((n.reads, n.makes, n.rerun, n.backward and n.backward.reads) for n in self.nodes)
        return nodes, tuple(d.owner for d in self.data), self.held, self.returned

    def backward_order(self) -> list[int]:
        """Nodes with a backward, in the order in which backwards run."""
        return [i for i in reversed(range(len(self.nodes))) if self.nodes[i].backward]

    def free_reruns(self) -> Problem:
        """The problem in which nodes that may run again only ``within`` some backwards run once. Its schedules are
        schedules of this one; solvers that know no ``within`` take it.
        """
        nodes = (n if n.within is None else replace(n, rerun=False, within=None) for n in self.nodes)
        return replace(self, nodes=tuple(nodes))

    def verify(self) -> None:
        """Raise ``ProblemError`` for the first invariant that does not hold."""
        self._verify_references()
        for i in range(len(self.nodes)):
            self._verify_node(i)
        for d, datum in enumerate(self.data):
            if d not in self.nodes[datum.owner].makes:
                raise ProblemError(f"data {d} ({datum.name}) is not made by its owner {datum.owner}")
        check_whole("the problem", loss=self.loss)
        self._verify_blocks()

    def _verify_blocks(self) -> None:
        at = 0
        first: dict[int, tuple[Block, list[bool]]] = {}
        for block in self.blocks:
            if block.start != at or block.stop <= at:
                raise ProblemError(f"block {block} does not continue at node {at}")
            at = block.stop
            backwards = [node.backward is not None for node in self.nodes[block.start : block.stop]]
            other, wanted = first.setdefault(block.kind, (block, backwards))
            if backwards != wanted:
                raise ProblemError(f"{block} and {other} are of one kind, but their nodes or backwards do not match")
        if at != len(self.nodes):
            raise ProblemError(f"blocks end at node {at} of {len(self.nodes)}")

    def _verify_references(self) -> None:
        """Raise ``ProblemError`` for the first index of a node or datum that does not exist."""
        for d, datum in enumerate(self.data):
            check_whole(f"data {d} ({datum.name})", size=datum.size, owner=datum.owner)
            if not 0 <= datum.owner < len(self.nodes):
                raise ProblemError(f"data {d} ({datum.name}) has the owner {datum.owner}, which does not exist")
        given = [(d, "the held data") for d in sorted(self.held)] + [(d, "the returned data") for d in self.returned]
        read = ((d, n.name) for n in self.nodes for d in n.reads + n.makes + (n.backward.reads if n.backward else ()))
        for d, where in (*given, *read):
            check_whole(where, reference=d)
            if not 0 <= d < len(self.data):
                raise ProblemError(f"{where}: there is no data {d}")

    def _verify_node(self, i: int) -> None:
        node = self.nodes[i]
        where = f"node {i} ({node.name})"
        for d in node.reads:
            if self.data[d].owner >= i:
                raise ProblemError(f"{where} reads {self.data[d].name}, which no earlier node makes")
        check_whole(where, time=node.time, peak=node.peak, rng=node.rng, warm=node.least_time)
        if node.within is not None and not 0 <= node.within[1] <= node.within[0] < len(self.nodes):
            raise ProblemError(f"{where} runs again within {node.within}, which are no backwards in order")
        if node.least_time > node.time:
            raise ProblemError(f"{where}: warm is {node.warm} ns, and time is less")
        if node.peak < sum(self.data[d].size for d in node.makes):
            raise ProblemError(f"{where}: peak is less than the bytes it makes")
        if (backward := node.backward) is None:
            return
        figures = {"time": backward.time, "before": backward.before, "peak": backward.peak, "after": backward.after}
        check_whole(f"the backward of {where}", **figures)
        if backward.peak < max(backward.before, backward.after):
            raise ProblemError(f"{where}: backward peak below its gradients")
        for d in backward.reads:
            if self.data[d].owner > i:
                raise ProblemError(f"the backward of {node.name} reads {self.data[d].name}, made after it")
