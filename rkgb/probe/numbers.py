"""The numbers among an operation's arguments that may follow from sizes, or from numbers of a call: read out, put in.

Such are arguments whose type in the schema is ``SymInt``, ``Scalar`` or ``float``, and numbers that torch made a tensor
of, as in ``x[0] = n`` and ``x / t``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from rkgb.graphs import D_graph, Node


def may_be_size(a: Any) -> bool:
    return type(a) in (int, float)


def is_made_of_number(a: Any) -> bool:
    """Whether torch may have made ``a`` of a number of Python's."""
    return isinstance(a, torch.Tensor) and not a.dim() and a.dtype in (torch.int64, torch.float64)


@cache
def sized_arguments(op: Any) -> frozenset[int | str]:
    """The arguments that may follow from sizes, by position and by name: see the top of this file."""
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


def numbers_of(d: D_graph) -> list[int | float]:
    """All numbers that may follow from sizes, in order."""
    numbers = [a for node in d.nodes for a in _of_node(node)]
    return numbers + [c for _, c in d.structure.output_constants if may_be_size(c)]


def _of_node(node: Node) -> Iterator[int | float]:
    sized = sized_arguments(node.op)
    for k, a in (*enumerate(node.args), *node.kwargs):
        if is_made_of_number(a):
            yield a.item()
        elif k in sized:
            for x in a if isinstance(a, (list, tuple)) else (a,):
                if may_be_size(x):
                    yield x


def repeated_in(d: D_graph) -> list[bool]:
    """For each of ``_numbers`` whether an equal one stands before it in its list; the two may be different sizes."""
    repeated = []
    for node in d.nodes:
        sized = sized_arguments(node.op)
        for k, a in (*enumerate(node.args), *node.kwargs):
            if is_made_of_number(a):
                repeated.append(False)
            elif k in sized:
                numbers = [x for x in (a if isinstance(a, (list, tuple)) else (a,)) if may_be_size(x)]
                repeated += [x in numbers[:at] for at, x in enumerate(numbers)]
    return repeated + [False for _, c in d.structure.output_constants if may_be_size(c)]


def with_numbers(node: Node, numbers: Iterator[int | float]) -> Node:
    """``node`` with these numbers in place of its own."""
    sized = sized_arguments(node.op)

    def put(key: int | str, a: Any) -> Any:
        if is_made_of_number(a):
            number = next(numbers)
            return a if a.item() == number else torch.full_like(a, number)
        if key not in sized:
            return a
        if isinstance(a, (list, tuple)):
            return type(a)(next(numbers) if may_be_size(x) else x for x in a)
        return next(numbers) if may_be_size(a) else a

    args = tuple(put(k, a) for k, a in enumerate(node.args))
    kwargs = tuple((name, put(name, a)) for name, a in node.kwargs)
    if node.op is torch.ops.aten.empty_strided.default:
        args = (args[0], strides_as(node.args[0], node.args[1], args[0]) or args[1], *args[2:])
    return node if (args, kwargs) == (node.args, node.kwargs) else dataclasses.replace(node, args=args, kwargs=kwargs)


def strides_as(sizes: Sequence[int], strides: Sequence[int], now: Sequence[int]) -> list[int] | None:
    """Strides without gaps for sizes ``now``, in the order of dimensions that ``strides`` have for ``sizes``.

    None if ``strides`` have gaps.
    """
    order = sorted(range(len(sizes)), key=lambda k: (strides[k], sizes[k]))
    before, after, result = 1, 1, [0] * len(sizes)
    for k in order:
        if strides[k] != before:
            return None
        result[k] = after
        before, after = before * sizes[k], after * now[k]
    return result
