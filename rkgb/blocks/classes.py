"""Equality of blocks and of nodes: up to names, the identity of parameters, and rates."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from rkgb.graphs import D_graph, Ref, S_graph, S_node

# The time and memory of these operations do not depend on their float argument, a probability or a scale. With
# stochastic depth it differs from layer to layer.
_RATED = frozenset("bernoulli bernoulli_ mask mul mul_ div div_".split())


def block_keys(s: S_graph) -> list[Hashable]:
    """One key for each block. Blocks with equal keys have equal costs: they differ in names and rates only."""
    return [nodes_key(s.d, s.nodes[a:b]) for a, b in s.blocks]


def classes(s: S_graph) -> list[int]:
    """The class of each block; classes are numbered in order of appearance."""
    number: dict[Hashable, int] = {}
    return [number.setdefault(key, len(number)) for key in block_keys(s)]


def nodes_key(d: D_graph, nodes: Sequence[S_node], exact: bool = False) -> Hashable:
    """A canonical form of ``nodes``: operations, constants, types and shapes, and which values share memory.

    ``exact``: rates count, too. Nodes with equal keys then compute the same on equal values.
    """
    local: dict[int, int] = {}
    storages: dict[int, int] = {}

    def name(v: int) -> Hashable:
        if v not in local:
            local[v], value, source = len(local), d.values[v], d.sources.get(v)
            memory = storages.setdefault(value.storage, len(storages))
            form = (value.shape, value.stride, value.dtype, value.device, value.requires_grad)
            # Of a source only the kind counts. Whether several nodes read it follows from the numbers of values.
            return (local[v], memory, *form, source.kind if source else "")
        return local[v]

    def freeze(arg: Any, rated: bool) -> Hashable:
        if isinstance(arg, Ref):
            return name(arg.index)
        if isinstance(arg, (list, tuple)):
            return tuple(freeze(a, rated) for a in arg)
        if isinstance(arg, torch.Tensor):
            rate = rated and arg.numel() == 1 and arg.is_floating_point()
            return (str(arg.dtype), tuple(arg.shape), () if rate else tuple(arg.flatten().tolist()))
        return (type(arg).__name__, "" if rated and isinstance(arg, float) else repr(arg))

    key: list[Hashable] = []
    for node in nodes:
        for op in node.ops:
            n = d.nodes[op]
            rated = not exact and n.name in _RATED
            arguments = (freeze(n.args, rated), tuple((k, freeze(a, rated)) for k, a in n.kwargs))
            operation = n.op if isinstance(n.op, torch._ops.OpOverload) else str(n.op)
            key.append((operation, n.mode, arguments, tuple(name(v) for v in n.outputs)))
        key.append(tuple(name(v) for v in node.makes))
        saved = tuple(storages.setdefault(x, len(storages)) for x in node.saved.storages)
        key.append((node.fixed, node.saved.private, saved))
    return tuple(key)
