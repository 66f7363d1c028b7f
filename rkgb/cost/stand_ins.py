"""Which nodes must run so that each distinct node can be measured on real values.

Results of equal nodes have the same form, so a result of the first of them can stand in for those of the others. The
norm after forty-eight equal layers is measured on the output of the first layer, and the other layers need not run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rkgb.graphs import S_graph


@dataclass(frozen=True, slots=True)
class Runs:
    """Which nodes to run and to measure.

    ``measured``: nodes that are the first of their key. ``needed``: nodes whose results a measured or needed node
    reads. ``reads``: for each of these nodes, the values in place of ``S_node.reads``. ``last``: for each value, the
    last node that reads it.
    """

    measured: frozenset[int]
    needed: frozenset[int]
    reads: dict[int, tuple[int, ...]]
    last: dict[int, int]


def runs(s: S_graph, keys: Sequence[Hashable], stand_ins: bool) -> Runs:
    """Which nodes to run and to measure, with or without stand-ins. ``keys``: one for each node, equal for equal nodes.

    Only values that require grad have stand-ins. Indices, masks and numbers that Python reads are not replaced.
    """
    first: dict[Hashable, int] = {}
    stands: dict[int, int] = {}
    maker: dict[int, int] = {}
    for i, (node, key) in enumerate(zip(s.nodes, keys, strict=True)):
        maker.update(dict.fromkeys(node.makes, i))
        of = s.nodes[first.setdefault(key, i)]
        if stand_ins and of is not node:
            stands.update((v, w) for v, w in zip(node.makes, of.makes, strict=True) if s.d.values[v].requires_grad)
    measured = frozenset(first.values())
    needed: set[int] = set() if stand_ins else set(range(len(s.nodes)))
    reads: dict[int, tuple[int, ...]] = {}
    last: dict[int, int] = {}
    for i in reversed(range(len(s.nodes))):
        if i in measured or i in needed:
            reads[i] = tuple(stands.get(v, v) for v in s.nodes[i].reads)
            for v in reads[i]:
                last.setdefault(v, i)
                if v in maker:
                    needed.add(maker[v])
    return Runs(measured, frozenset(needed), reads, last)
