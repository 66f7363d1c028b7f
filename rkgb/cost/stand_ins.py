"""Which nodes must run for the distinct ones to be measured on real values.

Equal nodes give results of equal form, so a result of the first of them stands in for those of the others: the norm
behind forty-eight equal layers can be measured on what the first layer gives, and the others need not run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rkgb.graphs import S_graph


@dataclass(frozen=True, slots=True)
class Runs:
    """``measured``: nodes that are the first of their key. ``needed``: nodes whose results are read by what runs or is
    measured. ``reads``: for each node of both, the values in place of ``S_node.reads``. ``last``: the last reader."""

    measured: frozenset[int]
    needed: frozenset[int]
    reads: dict[int, tuple[int, ...]]
    last: dict[int, int]


def runs(s: S_graph, keys: Sequence[Hashable], stand_ins: bool) -> Runs:
    """What to run, with or without stand-ins. ``keys``: one a node, equal for equal nodes.

    Only values that gradients reach have one: indices, masks and what Python reads stay what they are.
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
