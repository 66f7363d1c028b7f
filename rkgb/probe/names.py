"""Display names: what people read for operations, tensors and storages, from D to the program of a plan.

A name is the module's path and the operation, ``h.0.attn.softmax``; the path alone, ``h.0.attn.c_attn``, for a
submodule that calls no other and does one thing. Names are decided here once, when D is made. S, K, schedules, tables,
pictures and errors show them; the code that runs a plan refers to values by number.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable

from rkgb.graphs import D_graph, Node
from rkgb.probe.decompose import DRAWN, MASK


def with_display_names(d: D_graph) -> D_graph:
    """``d`` with display names for its nodes (``Node.label``), storages and values; sources keep theirs.

    A storage has the label of the node that allocates it. A node that allocates several adds the name of the result:
    ``topk.values``. The first value in a storage has the storage's name; the others add their operation:
    ``h.0.attn.c_attn.view``. Equal names are numbered from the second on: ``linear``, ``linear_1``.
    """
    unique = _Unique(d.names[v] for v in d.sources)
    values = list(d.names)
    storages = [d.names[x.source] if x.source is not None else "" for x in d.storages]
    nodes = []
    for k, (node, base) in enumerate(zip(d.nodes, _bases(d), strict=True)):
        homes = {v: d.values[v].storage for v in node.outputs}
        own = {x for x in homes.values() if d.storages[x].owner == k}
        inside = not own and all(d.storages[x].owner is not None for x in homes.values()) and homes
        label = "" if inside else unique.name(base)
        for v, x in homes.items():
            if x in own and not storages[x]:
                values[v] = storages[x] = label if len(own) == 1 else unique.name(f"{label}.{_result(node, v)}")
            elif v == node.outputs[0] and not own and not inside:
                values[v] = label
            else:
                values[v] = unique.name(f"{storages[x]}.{_word(node.name)}")
        nodes.append(dataclasses.replace(node, label=label or values[node.outputs[0]]))
    return dataclasses.replace(d, names=tuple(values), nodes=tuple(nodes), storage_names=tuple(storages))


def _bases(d: D_graph) -> list[str]:
    """The label of each node, without the number that makes it unique."""
    inner = {path[:k] for path in {n.path for n in d.nodes} for k, c in enumerate(path) if c == "."}
    words = [_word(node.name) for node in d.nodes]
    for k, (a, b) in enumerate(itertools.pairwise(node.name for node in d.nodes)):
        words[k] = {DRAWN: "bits", MASK: "mask"}.get((a, b), words[k])
    allocates = [any(d.storages[d.values[v].storage].owner == k for v in n.outputs) for k, n in enumerate(d.nodes)]
    paths = [node.path for node in d.nodes]
    done = {(path, word) for path, word, new in zip(paths, words, allocates, strict=True) if new}
    several = Counter(path for path, _ in done)  # how many things allocating operations do there
    bases = []
    for path, word, new in zip(paths, words, allocates, strict=True):
        speaks = path not in inner and not path.rpartition(".")[2].isdigit()
        alone = new and speaks and several[path] == 1
        bases.append(path if path and alone else f"{path}.{word}" if path else word)
    return bases


def _word(operation: str) -> str:
    """The name of an operation, without the marks of operations in place and of private ones."""
    return operation.strip("_") or operation


def _result(node: Node, v: int) -> str:
    """What an operation of several results calls ``v``: a name of its schema, or else the number."""
    k = node.outputs.index(v)
    returns = getattr(getattr(node.op, "_schema", None), "returns", ())
    return (returns[k].name if len(returns) == len(node.outputs) else "") or str(k)


class _Unique:
    def __init__(self, taken: Iterable[str]) -> None:
        self.count = Counter(taken)

    def name(self, base: str) -> str:
        """``base``, or ``base_1`` and so on where it is taken; in letters, digits, underscores and dots."""
        name = base = re.sub(r"[^\w.]", "_", base)
        while self.count[name]:
            name, self.count[base] = f"{base}_{self.count[base]}", self.count[base] + 1
        self.count[name] = 1
        return name
