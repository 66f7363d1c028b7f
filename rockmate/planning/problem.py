"""From graphs to the problem that solvers are given."""

from __future__ import annotations

from rkgb.pipeline import Graphs
from rockmate.planning.room import Room
from solvers import Backward, Block, Data, Node, Problem


def problem_of(graphs: Graphs, room: Room) -> Problem:
    """The solvers' problem of ``graphs``, with ``room`` for the loss but for what is kept of it."""
    k = graphs.K
    nodes = tuple(
        Node(
            n.name,
            n.time,
            n.reads,
            n.makes,
            n.peak,
            Backward(b.time, b.reads, b.before, b.peak + b.extra, b.after) if (b := n.backward) else None,
            n.rerun,
            n.random_bytes,
        )
        for n in k.nodes
    )
    blocks = tuple(Block(a, b, kind) for (a, b), kind in zip(k.s.blocks, graphs.classes, strict=True))
    data = tuple(Data(d.name, d.bytes, d.owner) for d in k.data)
    problem = Problem(nodes, data, frozenset(k.held), room.between, blocks, frozenset(k.returned))
    problem.verify()
    return problem
