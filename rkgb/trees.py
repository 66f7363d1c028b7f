"""Arguments and outputs as flat lists of leaves: PyTorch's pytrees, and objects with tensors in their attributes.

PyTorch knows lists, tuples, dicts and what libraries register. A dataclass, or a cache of keys and values, is
taken apart by its attributes here, and built again with the same class.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rkgb.errors import UnsupportedError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)


@dataclass
class _Attributes:
    """Stands for an object while its tree is flattened."""

    owner: Any
    values: dict[str, Any]


def _rebuild(values: Any, context: Any) -> Any:
    owner, names = context
    made = copy.copy(owner)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


class _Context(tuple[Any, ...]):
    """Equal for objects of one class with the same attributes."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and (type(self[0]), self[1]) == (type(other[0]), other[1])

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((type(self[0]), self[1]))

    def __repr__(self) -> str:
        return f"{type(self[0]).__qualname__}{self[1]}"


def _without_tensors(owner: Any) -> Any:
    """A shallow copy that holds none of the values."""
    empty = copy.copy(owner)
    for name in vars(owner):
        object.__setattr__(empty, name, None)
    return empty


pytree.register_pytree_node(
    _Attributes,
    lambda a: (list(a.values.values()), _Context((_without_tensors(a.owner), tuple(a.values)))),
    _rebuild,
    serialized_type_name="rkgb.trees._Attributes",
)


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """(leaves, spec) of nested containers and objects. Raises ``UnsupportedError`` for objects that hold each other."""
    return pytree.tree_flatten(_opened(tree, ()))


def unflatten(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """The tree again, with other leaves."""
    return pytree.tree_unflatten(leaves, spec)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree, in the order of its leaves."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _opened(tree: Any, around: tuple[int, ...]) -> Any:
    """``tree`` with every object that holds tensors replaced by its attributes."""

    def open_leaf(leaf: Any) -> Any:
        if isinstance(leaf, (torch.Tensor, *_PLAIN)) or not _holds_tensors(leaf, ()):
            return leaf
        if id(leaf) in around:
            raise UnsupportedError(f"an argument or output of type {type(leaf).__name__} refers to itself")
        return _Attributes(leaf, {k: _opened(v, (*around, id(leaf))) for k, v in vars(leaf).items()})

    return pytree.tree_map(open_leaf, tree)


def _holds_tensors(thing: Any, around: tuple[int, ...]) -> bool:
    if isinstance(thing, torch.Tensor):
        return True
    if isinstance(thing, (_PLAIN, torch.nn.Module)) or id(thing) in around or len(around) > 8:
        return False
    parts = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    return any(_holds_tensors(part, (*around, id(thing))) for p in parts for part in pytree.tree_leaves(p))
