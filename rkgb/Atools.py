"""The distinct blocks of a graph, each as a graph of its own, differentiated once.

``classes`` gives equal blocks one number. ``block_keys`` and ``nodes_key`` define which blocks are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from rkgb.blocks.classes import block_keys, classes, nodes_key
from rkgb.cost.measure import Cost, measure_nodes
from rkgb.cost.usage import all_used
from rkgb.graphs import D_graph, S_graph, Source, Storage, Structure
from rkgb.Ktools import K_graph, S_to_K
from rkgb.sample import Sample, call_of

__all__ = ["Blocks", "S_list_to_K_list_eco", "block_graph", "block_keys", "classes", "nodes_key"]


class Blocks(NamedTuple):
    """The blocks of a module.

    ``classes``: the blocks of each class. ``K``: one graph for each block; equal blocks share it. ``S``: one graph for
    each class, its first block.
    """

    classes: list[list[int]]
    K: list[K_graph]
    S: list[S_graph]


def S_list_to_K_list_eco(
    s: S_graph, model: torch.nn.Module, sample: Sample, costs: Sequence[Cost] | None = None
) -> Blocks:
    """Differentiate the blocks of ``s`` (see ``Stools.cut``), each on its own and equal ones once.

    Bytes and nanoseconds are those of the block alone: the gradients of its outputs are there when its backward begins,
    and the gradients of its inputs stay. ``costs``: one for each node of ``s``; by default measured on ``sample``.
    """
    if costs is None:
        costs = measure_nodes(s, model, call_of(sample).tensors)
    numbers = classes(s)
    of_class: list[list[int]] = [[] for _ in set(numbers)]
    known: dict[Hashable, K_graph] = {}
    graphs: list[K_graph] = []
    for b, ((start, stop), number) in enumerate(zip(s.blocks, numbers, strict=True)):
        of_class[number].append(b)
        exactly = nodes_key(s.d, s.nodes[start:stop], exact=True)
        key = (number, exactly, _surroundings(s, b, model), tuple(cost.results for cost in costs[start:stop]))
        if key not in known:
            block = block_graph(s, b)
            known[key] = S_to_K(block, model, [], costs[start:stop], all_used(block.d))
        graphs.append(known[key])
    return Blocks(of_class, graphs, [block_graph(s, members[0]) for members in of_class])


def _surroundings(s: S_graph, b: int, model: torch.nn.Module) -> Hashable:
    """What the K graph of a block depends on beside its class: its outputs, and which parameters have a gradient."""
    start, stop = s.blocks[b]
    nodes, after = s.nodes[start:stop], _read_from(s, stop)
    leaving = tuple((i, k) for i, n in enumerate(nodes) for k, v in enumerate(n.makes) if v in after)
    own = dict(model.named_parameters())
    parameters = (s.d.sources[v].key for n in nodes for v in n.reads if v in s.d.sources)
    return leaving, tuple(own[p].grad is not None for p in parameters if isinstance(p, str) and p in own)


def _read_from(s: S_graph, position: int) -> set[int]:
    """Values that nodes from ``position`` on read, and the module's outputs."""
    return {v for node in s.nodes[position:] for v in node.reads} | set(s.d.outputs)


def block_graph(s: S_graph, b: int) -> S_graph:
    """Block ``b`` as a graph of its own.

    Its inputs are the values that it reads of earlier blocks, its outputs those that later blocks read.
    """
    d, (start, stop) = s.d, s.blocks[b]
    nodes, after = s.nodes[start:stop], _read_from(s, stop)
    ops = sorted(op for node in nodes for op in node.ops)
    at = {op: k for k, op in enumerate(ops)}
    made = dict.fromkeys(v for op in ops for v in d.nodes[op].outputs)
    read = dict.fromkeys(v for node in nodes for v in node.reads if v not in made)
    inputs = [v for v in read if v not in d.sources or d.sources[v].kind == "input"]
    outputs = tuple(v for node in nodes for v in node.makes if v in after)
    home = {d.values[v].storage: v for v in reversed(read)}
    own = D_graph(
        names=d.names,
        sources={v: d.sources[v] for v in read if v in d.sources}
        | {v: Source("input", k) for k, v in enumerate(inputs)},
        nodes=tuple(d.nodes[op] for op in ops),
        outputs=outputs,
        structure=Structure(pytree.tree_structure(((0,) * len(outputs), {})), ()),
        values={v: d.values[v] for v in (*read, *made) if v in d.values},
        storages=tuple(
            Storage(x.bytes, None if x.owner is None else at.get(x.owner), home.get(k))
            for k, x in enumerate(d.storages)
        ),
        facts=tuple(d.facts[op] for op in ops),
        storage_names=d.storage_names,
        made_by=(*s.made_by, f"block_graph {b}"),
    )
    moved = tuple(dataclasses.replace(node, ops=tuple(at[op] for op in node.ops)) for node in nodes)
    block = S_graph(own, moved, ((0, len(moved)),), own.made_by)
    own.verify()
    block.verify()
    return block
