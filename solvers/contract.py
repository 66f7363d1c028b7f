"""A smaller block with the same optimum for any peak: nodes that are only ever worth running together become one.

Node i is merged into its only reader j when no backward and no later block reads what i makes, and j's
data are together no larger: keeping i's datum for a later run of j is then never better than keeping
what j makes. Attention's scale, mask and softmax become one node, as do a projection, its dropout and
the residual sum.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from solvers.block import BlockView, Runs, Stage
from solvers.problem import Node


@dataclass(frozen=True, slots=True)
class Contraction:
    """``view``: the smaller block. ``members[k]``: the nodes of the original block that its node k stands for."""

    view: BlockView
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def trivial(cls, view: BlockView) -> Contraction:
        """Nothing merged."""
        return cls(view, tuple((i,) for i in range(len(view.nodes))))

    def expand(self, runs: Runs) -> Runs:
        """The same runs, in nodes of the original block."""
        return tuple(tuple(sorted(i for k in stage for i in self.members[k])) for stage in runs)


def contract(view: BlockView) -> Contraction:
    """Merge what can be merged in ``view``."""
    nodes: list[Node | None] = list(view.nodes)
    members: list[tuple[int, ...]] = [(i,) for i in range(len(nodes))]
    kept = set().union(view.interface, *(stage.reads for stage in view.stages))
    for i in range(len(nodes)):
        j = _partner(view, nodes, i, kept)
        first = nodes[i]
        if first is None or j is None:
            continue
        second = nodes[j]
        assert second is not None
        reads = dict.fromkeys((*first.reads, *(d for d in second.reads if d not in first.makes)))
        members[j] = tuple(sorted((*members[i], *members[j])))
        peak = _peak(view, members[j])
        nodes[j] = dataclasses.replace(second, time=first.time + second.time, reads=tuple(reads), peak=peak)
        nodes[i] = None
    return _renumber(view, nodes, members)


def _peak(view: BlockView, members: tuple[int, ...]) -> int:
    """The most bytes while ``members`` run one after the other, each datum dropped after its last reader among them."""
    peak = live = 0
    last = {d: i for i in members for d in view.nodes[i].reads}
    for i in members:
        peak = max(peak, live + view.nodes[i].peak)
        live += sum(view.sizes[d] for d in view.nodes[i].makes if last.get(d, i) > i)
        live -= sum(view.sizes[d] for d in view.nodes[i].reads if last[d] == i and view.owners[d] in members)
    return peak


def _partner(view: BlockView, nodes: list[Node | None], i: int, kept: set[int]) -> int | None:
    """The node that i can be merged into."""
    node = nodes[i]
    if node is None or not node.rerun or not node.makes or not kept.isdisjoint(node.makes):
        return None
    readers = [j for j, other in enumerate(nodes) if other and not set(node.makes).isdisjoint(other.reads)]
    if len(readers) != 1:
        return None
    reader = nodes[readers[0]]
    assert reader is not None
    passed = sum(view.sizes[d] for d in set(node.makes) & set(reader.reads))
    smaller = sum(view.sizes[d] for d in reader.makes) <= passed
    return readers[0] if smaller and reader.rerun else None


def _renumber(view: BlockView, nodes: list[Node | None], members: list[tuple[int, ...]]) -> Contraction:
    left = [i for i, node in enumerate(nodes) if node is not None]
    data = [d for d, owner in enumerate(view.owners) if nodes[owner] is not None]
    node_at = {i: k for k, i in enumerate(left)}
    data_at = {d: k for k, d in enumerate(data)}

    def renamed(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(data_at[d] for d in ids)

    def stage(old: Stage) -> Stage:
        last = max((k for i, k in node_at.items() if i <= old.node), default=-1)
        return dataclasses.replace(old, node=last, reads=frozenset(data_at[d] for d in old.reads))

    smaller = BlockView(
        nodes=tuple(
            dataclasses.replace(node, reads=renamed(node.reads), makes=renamed(node.makes))
            for node in nodes
            if node is not None
        ),
        owners=tuple(node_at[view.owners[d]] for d in data),
        sizes=tuple(view.sizes[d] for d in data),
        interface=frozenset(data_at[d] for d in view.interface),
        stages=tuple(stage(s) for s in view.stages),
        base=view.base,
    )
    return Contraction(smaller, tuple(members[i] for i in left))
