"""A general rematerialization problem: a graph of computations, each of which may run any number of times.

Bytes and times are integers; ``unit`` names the unit of time (nanoseconds unless a file has another). Node ``i`` is
``problem.nodes[i]``, and datum ``i`` is its output. Nodes first run in their order.

A schedule is a sequence of ``Run`` and ``Del`` steps. Each node runs at least once, and all that it reads is live then.
Memory while a node runs is the bytes of live outputs, plus its own output, plus its ``transient``.
``solvers.whole.walker`` is the reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from solvers.errors import ProblemError, check_whole


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One computation: ``time`` in the problem's unit, ``size`` bytes of output, ``transient`` bytes while it runs.

    ``reads`` are the nodes whose outputs it reads.
    """

    name: str
    time: int
    size: int
    reads: tuple[int, ...]
    transient: int = 0


@dataclass(frozen=True, slots=True)
class GraphProblem:
    """Nodes in topological order: each reads only earlier ones (checked by ``verify``).

    A time of ``scale`` is one ``unit``.
    """

    nodes: tuple[GraphNode, ...]
    unit: str = "ns"
    scale: int = 1

    @property
    def eager_time(self) -> int:
        """The time of running every node once."""
        return sum(node.time for node in self.nodes)

    def verify(self) -> None:
        """Raise ``ProblemError`` for the first invariant that does not hold."""
        if self.scale < 1:
            raise ProblemError(f"the scale is {self.scale}; it is at least 1")
        for i, node in enumerate(self.nodes):
            if not isinstance(node, GraphNode):
                raise ProblemError(f"node {i} is {node!r:.40}; expected a GraphNode")
            where = f"node {i} ({node.name})"
            check_whole(where, time=node.time, size=node.size, transient=node.transient)
            for j in node.reads:
                check_whole(where, reference=j)
                if not 0 <= j < i:
                    raise ProblemError(f"node {i} ({node.name}) reads node {j}, which is not an earlier node")
            if len(set(node.reads)) < len(node.reads):
                raise ProblemError(f"node {i} ({node.name}) reads the same node twice")


def topological(names: Sequence[object], edges: Iterable[tuple[int, int]]) -> list[int]:
    """The positions of ``names`` in topological order, the lowest first where ``edges`` allow several.

    Raises ``ProblemError``, which names a node on a cycle.
    """
    import networkx as nx  # here, since only files of other programs have links

    graph = nx.DiGraph(edges)
    graph.add_nodes_from(range(len(names)))
    try:
        return list(nx.lexicographical_topological_sort(graph))
    except nx.NetworkXUnfeasible:
        stuck = min(nx.find_cycle(graph))[0]
        raise ProblemError(f"the graph has a cycle through or before node {names[stuck]!r}") from None
