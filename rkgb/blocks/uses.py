"""Aliases that keep the uses of a value in order, which decides how the sum of their gradients is rounded.

Autograd adds the gradients of a value's uses in reverse order. An in-place operation runs with the group whose memory
it changes, earlier or later than in the program. It then reads its arguments through aliases: views that stay where
the program reads the value.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch

from rkgb.graphs import D_graph, Facts, Node, Ref, Saved

Use = tuple[int, int]
"""(D node, value that it reads)."""


def moved_uses(d: D_graph, groups: list[list[int]]) -> set[Use]:
    """Uses whose order among the uses of their value changes when ``groups`` run one after the other.

    Views and in-place changes of the value itself are left out: no alias can put them in order.
    """
    at = {k: place for place, k in enumerate(itertools.chain(*groups))}
    uses: dict[int, list[int]] = {}
    for k, node in enumerate(d.nodes):
        if any(d.values[v].requires_grad for v in node.outputs):
            for v in node.reads():
                if d.values[v].requires_grad:
                    uses.setdefault(v, []).append(k)
    moved: set[Use] = set()
    for v, nodes in uses.items():
        places = [at[k] for k in nodes]
        latest = itertools.accumulate(places, max)
        earliest = [*itertools.accumulate(reversed(places), min)][::-1]
        for k, place, before, behind in zip(nodes, places, latest, earliest, strict=True):
            touched = {*d.facts[k].writes, *(d.values[u].storage for u in d.nodes[k].outputs)}
            if not before == place == behind and d.values[v].storage not in touched:
                moved.add((k, v))
    return moved


def with_aliases(d: D_graph, uses: set[Use]) -> D_graph:
    """``d`` with an alias in front of each of ``uses``."""
    names, values = list(d.names), dict(d.values)
    nodes: list[Node] = []
    facts: list[Facts] = []
    number: dict[int, int] = {}  # of each node, in the new graph
    for k, node in enumerate(d.nodes):
        put = {v: Ref(v) for v in node.reads()}
        for v in node.reads():
            if (k, v) in uses:
                alias = len(names)
                put[v] = Ref(alias)
                values[alias] = d.values[v]
                operation = torch.ops.aten.alias.default
                where = node.mode, node.line, node.path
                names.append(_new_name(names, f"{d.storage_names[d.values[v].storage]}.alias"))
                nodes.append(Node(operation, "alias", (Ref(v),), (), (alias,), False, *where, names[-1]))
                facts.append(Facts((), (), Saved((), ())))
        number[k] = len(nodes)
        nodes.append(node.with_values(put.__getitem__))
        facts.append(d.facts[k])
    storages = tuple(s if s.owner is None else dataclasses.replace(s, owner=number[s.owner]) for s in d.storages)
    changed = dataclasses.replace(
        d, names=tuple(names), nodes=tuple(nodes), facts=tuple(facts), values=values, storages=storages
    )
    changed.verify()
    return changed


def _new_name(names: list[str], name: str) -> str:
    taken = set(names)
    return next(n for n in itertools.chain([name], (f"{name}_{k}" for k in itertools.count(1))) if n not in taken)
