"""Equivalence: blocks (and nodes) that are alike but for names, the identity of parameters, and rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from rkgb.graphs import D_graph, Ref, S_graph, S_node, Source, Storage, Structure
from rkgb.sample import Sample, call_of

if TYPE_CHECKING:
    from rkgb.cost.measure import Cost
    from rkgb.Ktools import K_graph


# Work and memory of these do not depend on a float that they are given: the rate of a draw, or a scale. With stochastic
# depth it is another in every layer.
_RATED = frozenset("bernoulli bernoulli_ mask mul mul_ div div_".split())


def block_keys(s: S_graph) -> list[Hashable]:
    """One key a block; equal keys mean that the blocks cost the same: they are alike up to renaming, and to rates."""
    return [nodes_key(s.d, s.nodes[a:b]) for a, b in s.blocks]


def classes(s: S_graph) -> list[int]:
    """For each block the number of its class, numbered by first appearance."""
    number: dict[Hashable, int] = {}
    return [number.setdefault(key, len(number)) for key in block_keys(s)]


def nodes_key(d: D_graph, nodes: Sequence[S_node], exact: bool = False) -> Hashable:
    """A canonical form: operations, constants, forms of values, and how values and their memory are connected.

    ``exact``: rates count as well, so that equal keys compute the same on equal values.
    """
    local: dict[int, int] = {}
    storages: dict[int, int] = {}

    def name(v: int) -> Hashable:
        if v not in local:
            local[v] = len(local)
            storage = d.values[v].storage
            return (local[v], storages.setdefault(storage, len(storages)), *_description(d, v))
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


def _description(d: D_graph, v: int) -> tuple[Hashable, ...]:
    value = d.values[v]
    source = d.sources.get(v)
    form = (value.shape, value.stride, value.dtype, value.device, value.requires_grad)
    # A source that several nodes read is told apart from one that is the block's alone by its use, not its name.
    return (*form, source.kind if source else "")


class Blocks(NamedTuple):
    """The blocks of a module: ``classes`` lists the blocks of each class, ``K`` has one graph a block, and the same
    one for blocks that are equal, ``S`` one graph a class: its first block, on its own."""

    classes: list[list[int]]
    K: list[K_graph]
    S: list[S_graph]


def S_list_to_K_list_eco(
    s: S_graph, model: torch.nn.Module, sample: Sample, costs: Sequence[Cost] | None = None
) -> Blocks:
    """Differentiate the blocks of ``s`` (see ``Stools.cut``), each on its own and equal ones once.

    Bytes and times are those of the block alone: its outputs have their gradients when its backward begins,
    and the gradients of what it reads stay. ``costs``, one a node of ``s``, are measured on ``sample`` unless given.
    """
    from rkgb.cost.measure import measure_nodes
    from rkgb.cost.usage import all_used
    from rkgb.Ktools import S_to_K
    from rkgb.trees import tensors_of

    if costs is None:
        costs = measure_nodes(s, model, tensors_of(call_of(sample)))
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
    """What the K graph of a block depends on beside its class: what leaves it, which gradients are there already."""
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
    """Block ``b`` as a graph of its own: what it reads of earlier blocks are inputs, what later ones read, outputs."""
    d, (start, stop) = s.d, s.blocks[b]
    nodes, after = s.nodes[start:stop], _read_from(s, stop)
    ops = sorted(op for node in nodes for op in node.ops)
    at = {op: k for k, op in enumerate(ops)}
    made = dict.fromkeys(v for op in ops for v in d.nodes[op].outputs)
    read = dict.fromkeys(v for node in nodes for v in node.reads if v not in made)
    inputs = [v for v in read if v not in d.sources or d.sources[v].kind == "input"]
    outputs = tuple(v for node in nodes for v in node.makes if v in after)
    home = {d.values[v].storage: v for v in reversed(read)}
    structure = Structure(_flat(len(outputs)), ())
    own = D_graph(
        names=d.names,
        sources={v: d.sources[v] for v in read if v in d.sources}
        | {v: Source("input", k) for k, v in enumerate(inputs)},
        nodes=tuple(d.nodes[op] for op in ops),
        outputs=outputs,
        structure=structure,
        values={v: d.values[v] for v in (*read, *made) if v in d.values},
        storages=tuple(
            Storage(x.bytes, None if x.owner is None else at.get(x.owner), home.get(k))
            for k, x in enumerate(d.storages)
        ),
        facts=tuple(d.facts[op] for op in ops),
    )
    moved = tuple(dataclasses.replace(node, ops=tuple(at[op] for op in node.ops)) for node in nodes)
    block = S_graph(own, moved, ((0, len(moved)),))
    own.verify()
    block.verify()
    return block


def _flat(count: int) -> pytree.TreeSpec:
    """The structure of so many results."""
    return pytree.tree_structure(((0,) * count, {}))
