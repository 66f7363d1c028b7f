"""The numbers among an operation's arguments that may follow from sizes, or from numbers of a call.

Such are arguments whose type in the schema is ``SymInt``, ``Scalar`` or ``float``, and numbers that torch made a tensor
of, as in ``x[0] = n`` and ``x / t``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch


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
