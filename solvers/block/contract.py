"""Nodes of a block that are only worth running together, so that one variable per stage serves them all.

Node i follows its *leader* j, the only node (or group) that reads what i makes, when no backward and no later block
reads it, and what j makes takes no more bytes: keeping i's datum for a later run of j is then no better than
keeping what j makes. Attention's scale, mask and softmax run together, as do a projection, its dropout and the
residual sum. Memory is still counted node by node.

Where the peak is free this loses nothing. Where it is limited it excludes one thing: a run of i in a stage in which
j does not run, for the sake of a later one.
"""

from __future__ import annotations

from solvers.block.block import BlockView


def leaders(view: BlockView) -> tuple[int, ...]:
    """Per node of ``view``, the node that it always runs with; itself where it has no leader."""
    kept = set().union(view.interface, *(stage.reads for stage in view.stages))
    readers: list[set[int]] = [set() for _ in view.sizes]
    for i, node in enumerate(view.nodes):
        for d in node.reads:
            readers[d].add(i)
    leader = list(range(len(view.nodes)))
    for i in reversed(range(len(view.nodes))):
        node = view.nodes[i]
        if not node.rerun or not node.makes or not kept.isdisjoint(node.makes):
            continue
        of_data = {leader[u] for d in node.makes for u in readers[d]}
        if len(of_data) == 1:
            (j,) = of_data
            passed = sum(view.sizes[d] for d in node.makes if readers[d])
            if view.nodes[j].rerun and sum(view.sizes[d] for d in view.nodes[j].makes) <= passed:
                leader[i] = j
    return tuple(leader)
