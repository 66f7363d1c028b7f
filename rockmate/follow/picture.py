"""The plan of a followed step as a picture: each operation, in the colour of what becomes of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rockmate.budget import show_bytes
from rockmate.planning.fates import fates
from rockmate.planning.picture import COLOURS
from solvers import Problem, Schedule


def draw(problem: Problem, schedule: Schedule, places: Sequence[str], title: str) -> Any:
    """``schedule`` as a ``graphviz.Digraph``; ``places``: the user's source line of each node."""
    import graphviz

    graph = graphviz.Digraph(graph_attr={"label": title, "labelloc": "t"}, node_attr={"shape": "box"})
    drawn = {i for i, node in enumerate(problem.nodes) if node.makes}
    for i, fate in enumerate(fates(problem, schedule)):
        node = problem.nodes[i]
        if i in drawn:
            size = show_bytes(sum(problem.data[d].size for d in node.makes))
            label = "\n".join(text for text in (node.name, places[i], size) if text)
            graph.node(str(i), label, style="filled", fillcolor=COLOURS[fate.kind])
            for j in dict.fromkeys(problem.data[d].owner for d in node.reads):
                graph.edge(str(j), str(i))
    return graph
