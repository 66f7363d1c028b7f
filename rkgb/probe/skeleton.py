"""What two traces of one model at different sizes have in common."""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import cache
from typing import Any

import torch

from rkgb.graphs import Facts, Node, Ref, S_graph, Source, Value
from rkgb.probe.operations import is_python


def skeleton(s: S_graph) -> Hashable:
    """A key that is equal for graphs of captured programs that differ in sizes only."""
    d = s.d
    return (
        tuple(map(_operation, d.nodes)),
        d.outputs,
        tuple(sorted((v, source_form(x)) for v, x in d.sources.items())),
        tuple((v, *_form(x), x.storage) for v, x in d.values.items()),
        tuple((x.shape, x.stride) for v, x in d.values.items() if v in d.sources and d.sources[v].kind != "input"),
        tuple((x.owner, x.source) for x in d.storages),
        tuple(_facts_key(facts) for facts in d.facts),
        str(d.structure.outputs),
        tuple((k, "number" if may_be_size(c) else repr(c)) for k, c in d.structure.output_constants),
        (d.structure.assigned, d.structure.written),
        tuple((n.ops, n.reads, n.makes, n.storages, n.saved.storages, bool(n.saved.private), n.fixed) for n in s.nodes),
        s.blocks,
    )


def _operation(node: Node) -> Hashable:
    sized, own = sized_arguments(node.op), is_python(node)
    arguments = tuple(_frozen(a, k in sized or (own and type(a) is int)) for k, a in enumerate(node.args))
    keywords = tuple((name, _frozen(a, name in sized)) for name, a in node.kwargs)
    op: Hashable = node.op if isinstance(node.op, torch._ops.OpOverload) else str(node.op)
    return op, node.name, arguments, keywords, node.outputs, node.several, node.mode


def _frozen(a: Any, sized: bool) -> Hashable:
    if isinstance(a, (list, tuple)):
        return tuple(_frozen(x, sized) for x in a)
    if isinstance(a, torch.Tensor):
        # As torch makes one of a number, in ``x[0] = n`` and ``x / t``.
        of_number = not a.dim() and a.dtype in (torch.int64, torch.float64)
        return ("size", str(a.device)) if of_number else content(a)
    if sized and may_be_size(a):
        return "size"
    return a if isinstance(a, Ref) else repr(a)


def may_be_size(a: Any) -> bool:
    return type(a) in (int, float)


@cache
def sized_arguments(op: Any) -> frozenset[int | str]:
    """The arguments that may follow from sizes, or from numbers of a call, by position and by name: those whose type in
    the schema is ``SymInt``, ``Scalar`` or ``float``.
    """
    if not isinstance(op, torch._ops.OpOverload):
        return frozenset()
    inside = str(op._schema).partition("(")[2].rpartition(") ->")[0]
    sized: set[int | str] = set()
    position = 0
    for argument in re.split(r", (?![^(\[]*[)\]])", inside):
        kind, _, name = argument.strip().partition(" ")
        if re.match(r"SymInt|Scalar|float", kind):
            sized |= {position, name.partition("=")[0]}
        position += kind != "*"
    return frozenset(sized)


def content(t: torch.Tensor) -> Hashable:
    """A constant: small ones by value."""
    few = t.numel() <= 4096 and t.layout == torch.strided
    return (str(t.dtype), tuple(t.shape), repr(t.tolist()) if few else str(id(t)))


def source_form(source: Source) -> tuple[str, str]:
    """What a value that no node makes is."""
    return source.kind, repr(content(source.key)) if isinstance(source.key, torch.Tensor) else repr(source.key)


def _form(value: Value) -> tuple[Hashable, ...]:
    return str(value.dtype), str(value.device), value.requires_grad, len(value.shape)


def _facts_key(facts: Facts) -> Hashable:
    return (
        facts.writes,
        facts.random,
        facts.unseen,
        facts.saved.storages,
        bool(facts.saved.private),
        facts.context.storages,
        bool(facts.context.private),
    )
