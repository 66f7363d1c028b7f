"""From graphs to the problem that solvers are given."""

from __future__ import annotations

from rkgb.device import kind_of
from rkgb.pipeline import Graphs
from rockmate.planning.room import Room
from solvers import Backward, Block, Data, Node, Problem


def problem_of(graphs: Graphs, room: Room, costs: str) -> Problem:
    """The solvers' problem of ``graphs``, with ``room`` for the loss but for what is kept of it.

    ``costs``: how times were found. Where they were measured, a node's time is that of a second run with the Python
    around it. What first runs take less is taken off all backwards, so that a step without recomputation takes what was
    measured. Right after the run that made its inputs, code and inputs are in the caches (``Node.warm``).
    """
    k = graphs.K
    beside, beside_warm = _beside_a_rerun(graphs) if costs == "measured" else (0, 0)
    backward = sum(n.backward.time for n in k.nodes if n.backward)
    left = max(0.0, 1 - beside * sum(n.rerun for n in k.nodes) / backward) if backward else 1.0
    nodes = tuple(
        Node(
            n.name,
            n.time + beside * n.rerun,
            n.reads,
            n.makes,
            n.peak,
            Backward(int(b.time * left), b.reads, b.before, b.peak + b.extra, b.after) if (b := n.backward) else None,
            n.rerun,
            n.random_bytes,
            n.warm + beside_warm if n.rerun and n.warm + beside_warm < n.time + beside else None,
        )
        for n in k.nodes
    )
    kinds: dict[tuple[int, tuple[bool, ...]], int] = {}  # of two heads of one class, the loss may read one alone
    blocks = tuple(
        Block(a, b, kinds.setdefault((of_class, tuple(n.backward is not None for n in nodes[a:b])), len(kinds)))
        for (a, b), of_class in zip(k.s.blocks, graphs.classes, strict=True)
    )
    data = tuple(Data(d.name, d.bytes, d.owner) for d in k.data)
    problem = Problem(nodes, data, frozenset(k.held), room.between, blocks, frozenset(k.returned))
    problem.verify()
    return problem


def _beside_a_rerun(graphs: Graphs) -> tuple[int, int]:
    """Nanoseconds of the executor's Python for each node that runs again, and of one right after another."""
    kind = kind_of(graphs.S.device)
    return kind.beside_a_rerun(sum(x.bytes for x in graphs.D.storages)), kind.beside_a_rerun(0)
