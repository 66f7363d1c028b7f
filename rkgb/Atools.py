"""Equivalence: blocks (and nodes) that are alike but for names and the identity of parameters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from rkgb.graphs import D_graph, Ref, S_graph, S_node


def block_keys(s: S_graph) -> list[Hashable]:
    """One key a block; equal keys mean that the blocks are the same up to renaming."""
    return [nodes_key(s.d, s.nodes[a:b]) for a, b in s.blocks]


def classes(s: S_graph) -> list[int]:
    """For each block the number of its class, numbered by first appearance."""
    number: dict[Hashable, int] = {}
    return [number.setdefault(key, len(number)) for key in block_keys(s)]


def nodes_key(d: D_graph, nodes: Sequence[S_node]) -> Hashable:
    """A canonical form: operations, constants, shapes, and how values are connected."""
    local: dict[int, int] = {}

    def name(v: int) -> Hashable:
        if v not in local:
            local[v] = len(local)
            return (local[v], *_description(d, v))
        return local[v]

    def freeze(arg: Any) -> Hashable:
        if isinstance(arg, Ref):
            return name(arg.index)
        if isinstance(arg, (list, tuple)):
            return tuple(freeze(a) for a in arg)
        if isinstance(arg, torch.Tensor):
            return (str(arg.dtype), tuple(arg.shape), tuple(arg.flatten().tolist()))
        return (type(arg).__name__, repr(arg))

    key: list[Hashable] = []
    for node in nodes:
        for op in node.ops:
            n = d.nodes[op]
            arguments = (freeze(n.args), tuple((k, freeze(a)) for k, a in n.kwargs))
            key.append((str(n.op), n.mode, arguments, tuple(name(v) for v in n.outputs)))
        key.append(tuple(name(v) for v in node.makes))
        key.append((node.fixed, node.saved.private, len(node.saved.storages)))
    return tuple(key)


def _description(d: D_graph, v: int) -> tuple[Hashable, ...]:
    value = d.values[v]
    source = d.sources.get(v)
    form = (value.shape, value.stride, str(value.dtype), str(value.device), value.requires_grad)
    # A source that several nodes read is told apart from one that is the block's alone by its use, not its name.
    return (*form, source.kind if source else "")
