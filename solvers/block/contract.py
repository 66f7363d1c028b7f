"""Groups of nodes that are only useful if they run together, and share one variable per stage.

Node i runs with its *leader* j if j (or its group) alone reads the data of i, neither a backward nor a later block
reads them, and the data of j take no more bytes. Keeping the data of i for a later run of j is then no better than
keeping the data of j. Attention's scale, mask and softmax run together, as do a projection, its dropout and the
residual sum. Memory is still counted for each node.

Without a limit on the peak, no optimum is lost. With one, schedules are excluded in which i runs in a stage for the use
of j in a later stage.
"""

from __future__ import annotations

from solvers.block.block import BlockView


def leaders(view: BlockView) -> tuple[int, ...]:
    """For each node of ``view``, the node that it always runs with; itself if it has no leader."""
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
