"""Guards: nodes that check the values that the module's Python read from tensors.

Such a value may decide which branch Python takes, so a trace is right only for that value. A guard reads again, at
every call and at the same place. If the value is another one it raises ``GuardFailed``, and the caller traces anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from rkgb.graphs import Node
from rkgb.trees import tensor_leaves


class GuardFailed(Exception):
    """A tensor no longer has the value that the module's Python read from it when it was traced."""

    def __init__(self, guard: Guard, found: Any) -> None:
        super().__init__(f"{guard} at {guard.line} found {found!r}")
        self.guard, self.found = guard, found


@dataclass(frozen=True, eq=False, repr=False)
class Guard:
    """The operation of a guard node: ``read(*args)`` must give ``expected`` again. Returns nothing.

    ``name``: what is read, for people ("bool", "item", "shape"). ``line``: the user's source line.
    """

    read: Callable[..., Any]
    name: str
    expected: Any
    line: str

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        value = self.read(*args, **kwargs)
        if not same(value, self.expected):
            raise GuardFailed(self, value)

    def __repr__(self) -> str:
        return f"guard[{self.name} == {self.expected!r}]"


def snapshot(value: Any) -> Any:
    """``value``, copied if it shares memory with the tensor that it was read from."""
    return value.copy() if isinstance(value, numpy.ndarray) else value


def same(a: Any, b: Any) -> bool:
    """Whether two values that Python read are of one type and equal; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, numpy.ndarray):
        return a.dtype == b.dtype and numpy.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def is_guard(node: Node) -> bool:
    return isinstance(node.op, Guard)


# Calls whose results have shapes that depend on the contents of their arguments.
_SHAPED_BY_DATA = frozenset(
    "nonzero argwhere masked_select repeat_interleave bincount combinations one_hot unique unique_consecutive "
    "_unique _unique2 _pack_padded_sequence _pad_packed_sequence tensor_split".split()
)


def shaped_by_data(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the shape of the result of ``name(*args)`` depends on the contents of the arguments."""
    if name == "where":
        return len(args) == 1
    if name == "__getitem__":
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensor_leaves(args[1:]))
    return name in _SHAPED_BY_DATA


def shapes(*results: torch.Tensor) -> list[tuple[int, ...]]:
    """The shapes of tensors, for a guard to compare."""
    return [tuple(t.shape) for t in results]
