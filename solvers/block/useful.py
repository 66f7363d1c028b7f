"""Which nodes of a block are worth running again, and when."""

from __future__ import annotations

from collections.abc import Iterable

from solvers.block.block import BlockView, Reruns


def useful_nodes(view: BlockView) -> list[tuple[list[int], set[int]]]:
    """For each stage, the nodes that lead to what its backward reads, and the data that it or a later stage can use."""
    result: list[tuple[list[int], set[int]]] = []
    for s, stage in enumerate(view.stages):
        nodes, _ = ancestors(view, stage.node, set(stage.reads))
        _, data = ancestors(view, stage.node, set().union(*(later.reads for later in view.stages[s:])))
        result.append((nodes, data))
    return result


def ancestors(view: BlockView, last: int, data: set[int]) -> tuple[list[int], set[int]]:
    """The nodes up to ``last`` that lead to ``data``, and ``data`` with all that these nodes read; ``data`` grows."""
    nodes = []
    for i in range(last, -1, -1):
        if not data.isdisjoint(view.nodes[i].makes):
            nodes.append(i)
            data.update(view.nodes[i].reads)
    return nodes[::-1], data


def late_runs(view: BlockView, chosen: Iterable[int]) -> Reruns:
    """The reruns in which each node of ``chosen`` runs once, in the first stage that needs it."""
    left = set(chosen)
    runs: list[tuple[int, ...]] = []
    for stage in view.stages:
        needed = set(stage.reads)
        now: list[int] = []
        for i in range(stage.node, -1, -1):
            if i in left and not needed.isdisjoint(view.nodes[i].makes):
                now.append(i)
                needed.update(view.nodes[i].reads)
        left.difference_update(now)
        runs.append(tuple(reversed(now)))
    return tuple(runs)
