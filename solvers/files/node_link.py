"""Public rematerialization graphs in NetworkX's node-link JSON, of two kinds.

- Checkmate's: nodes have ``id``, ``cost_cpu`` (time) and ``cost_ram`` (bytes of the output).
- Layered graphs: nodes have ``name``, ``duration`` and ``out_cost``; ``graph.order``, where given, is the order.

Links have ``source`` and ``target``, or ``"0"`` and ``"1"``: the second reads the output of the first. Without
``graph.order``, the nodes' order in the file is kept as far as links allow. Whole times stay as they are. Other times
are multiplied by the smallest power of ten, up to 10^9, that makes all of them whole; what is left is rounded. This
factor is the problem's ``scale``: costs divided by it are in the file's unit. Bytes are rounded up.
"""

from __future__ import annotations

from math import ceil, isfinite
from typing import Any

from solvers.errors import ProblemError
from solvers.whole.graph import GraphNode, GraphProblem, topological

MOST_DIGITS = 9


def from_node_link(content: dict[str, Any]) -> GraphProblem:
    """The problem in a node-link object; ``ProblemError`` names the node or link that is wrong."""
    nodes = content["nodes"]
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        raise ProblemError("nodes is not a list of objects")
    keys = _keys(nodes)
    names = [_name(node, keys[0], at) for at, node in enumerate(nodes)]
    at = {name: k for k, name in enumerate(names)}
    if len(at) < len(names):
        twice = next(name for k, name in enumerate(names) if at[name] != k)
        raise ProblemError(f"two nodes have the {keys[0]} {twice!r}")
    links = content.get("links", content.get("edges"))
    if not isinstance(links, list):
        raise ProblemError("links is not a list")
    edges = sorted({_link(link, at) for link in links})
    order = _order(content.get("graph"), names, edges)
    place = {old: new for new, old in enumerate(order)}
    reads: list[list[int]] = [[] for _ in nodes]
    for a, b in edges:
        reads[place[b]].append(place[a])
    times, scale = _whole([_number(nodes[k], keys[1], names[k]) for k in order])
    sizes = [ceil(_number(nodes[k], keys[2], names[k])) for k in order]
    label = [str(nodes[k].get("name", names[k])) for k in order]
    made = (GraphNode(label[i], times[i], sizes[i], tuple(sorted(reads[i]))) for i in range(len(order)))
    return GraphProblem(tuple(made), "the file's own", scale)


def _keys(nodes: list[dict[str, Any]]) -> tuple[str, str, str]:
    """The keys of identity, time and bytes in this file."""
    first = nodes[0] if nodes else {}
    if "cost_cpu" in first or not nodes:
        return "id", "cost_cpu", "cost_ram"
    if "duration" in first:
        return ("id" if "id" in first else "name"), "duration", "out_cost"
    raise ProblemError("nodes have neither cost_cpu and cost_ram nor duration and out_cost")


def _name(node: dict[str, Any], key: str, at: int) -> Any:
    name = node.get(key)
    if isinstance(name, bool) or not isinstance(name, int | str):
        raise ProblemError(f"nodes[{at}] has the {key} {name!r}; expected a number or a string")
    return name


def _number(node: dict[str, Any], key: str, name: object) -> int | float:
    value = node.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise ProblemError(f"node {name!r} has {key} {value!r}; expected a number from 0")
    return value


def _link(link: Any, at: dict[Any, int]) -> tuple[int, int]:
    if isinstance(link, dict):
        for keys in (("source", "target"), ("0", "1")):
            if keys[0] in link and keys[1] in link:
                ends = link[keys[0]], link[keys[1]]
                for end in ends:
                    if not isinstance(end, int | str) or end not in at:
                        raise ProblemError(f"a link leads from {ends[0]!r} to {ends[1]!r}; there is no node {end!r}")
                return at[ends[0]], at[ends[1]]
    raise ProblemError(f"the link {link!r:.60} has neither source and target nor 0 and 1")


def _order(graph: Any, names: list[Any], edges: list[tuple[int, int]]) -> list[int]:
    """The file's order, checked, if it has one; else a topological order."""
    order = topological(names, edges)
    given = graph.get("order") if isinstance(graph, dict) else None
    if given is None:
        return order
    at = {name: k for k, name in enumerate(names)}
    if not isinstance(given, list) or set(given) != set(names) or len(given) != len(names):
        raise ProblemError("graph.order does not name every node once")
    place = {at[name]: k for k, name in enumerate(given)}
    for a, b in edges:
        if place[a] >= place[b]:
            raise ProblemError(f"graph.order has node {names[b]!r} before {names[a]!r}, which it reads")
    return [at[name] for name in given]


def _whole(times: list[int | float]) -> tuple[list[int], int]:
    """``times`` as whole numbers, and the factor by which they were multiplied."""
    digits = 0
    while digits < MOST_DIGITS and any(round(t * 10**digits, 6) % 1 for t in times):
        digits += 1
    return [round(t * 10**digits) for t in times], 10**digits
