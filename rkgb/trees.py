"""Arguments and outputs as flat lists of leaves: PyTorch's pytrees, and objects with tensors in their attributes.

PyTorch knows lists, tuples, dicts and what libraries register. A dataclass, a cache of keys and values, or a dict of
another class is taken apart by its attributes and items here, and built again with the same class.

There are three ways to the tensors of a structure: ``tensors_of`` knows such objects as well, ``tensor_leaves`` what
PyTorch knows, and ``tensors_in`` lists, tuples and dicts, which is what operations are called with.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from types import CellType, FunctionType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rkgb.errors import UnsupportedError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)


_ITEM, _ATTRIBUTE = "item", "attribute"


@dataclass
class _Parts:
    """Takes the place of an object while its tree is flattened. ``values``: by (item or attribute, key)."""

    owner: Any
    values: dict[tuple[str, Any], Any]


def _parts(thing: Any) -> dict[tuple[str, Any], Any]:
    """The values in an object: items of subclasses of dict and list, attributes, also those in ``__slots__``."""
    parts: dict[tuple[str, Any], Any] = {}
    if isinstance(thing, (dict, list)):
        parts.update(((_ITEM, k), v) for k, v in (thing.items() if isinstance(thing, dict) else enumerate(thing)))
    parts.update(((_ATTRIBUTE, k), v) for k, v in getattr(thing, "__dict__", {}).items())
    for name in slots_of(thing):
        if name not in ("__dict__", "__weakref__"):
            parts[_ATTRIBUTE, name] = getattr(thing, name)
    return parts


def slots_of(thing: Any) -> Iterator[str]:
    """The names in an object's ``__slots__`` that are set."""
    for cls in type(thing).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        yield from (name for name in ((slots,) if isinstance(slots, str) else slots) if hasattr(thing, name))


def _out_of_reach(thing: Any) -> list[Any]:
    """The values in an object that cannot be replaced: elements of sets and tuples, variables in closures."""
    if isinstance(thing, (set, frozenset, tuple)):
        return list(thing)
    if isinstance(thing, functools.partial):
        return [*thing.args, *thing.keywords.values()]
    cells = getattr(thing, "__closure__", None) if isinstance(thing, FunctionType) else None
    return [cell.cell_contents for cell in cells or () if cell != CellType()]


def _set(thing: Any, key: tuple[str, Any], value: Any) -> None:
    kind, name = key
    if kind == _ATTRIBUTE:
        object.__setattr__(thing, name, value)
    else:
        (dict if isinstance(thing, dict) else list).__setitem__(thing, name, value)


def _with_values(owner: Any, keys: Iterable[tuple[str, Any]], values: Iterable[Any]) -> Any:
    """A shallow copy of ``owner`` with these values."""
    made = copy.copy(owner)
    for key, value in zip(keys, values, strict=False):
        _set(made, key, value)
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
        return f"{type(self[0]).__qualname__}{tuple(name for _, name in self[1])}"


pytree.register_pytree_node(
    _Parts,
    lambda p: (list(p.values.values()), _Context((_with_values(p.owner, p.values, repeat(None)), tuple(p.values)))),
    lambda values, context: _with_values(context[0], context[1], values),
    serialized_type_name="rkgb.trees._Parts",
)


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """(leaves, spec) of nested containers and objects.

    Raises ``UnsupportedError`` for objects that refer to themselves, and for those whose tensors cannot be replaced.
    """
    try:
        return pytree.tree_flatten(_opened(tree, ()))
    except RecursionError:
        raise UnsupportedError("an argument or output is a container that is in itself, or nested too deeply") from None


def unflatten(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    return pytree.tree_unflatten(leaves, spec)


def replaced(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """``tree`` with ``function`` applied to its tensors, in containers and objects of its own."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    leaves, spec = flatten(tree)
    return unflatten([function(x) if isinstance(x, torch.Tensor) else x for x in leaves], spec)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree, in the order of its leaves."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of PyTorch's pytree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            if isinstance(item, torch.Tensor):
                yield item
            elif isinstance(item, (list, tuple, dict)):
                yield from tensors_in(item)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))


def map_tensors(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """``tree`` (nested lists, tuples and dicts) with ``function`` applied to its tensors."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(t, function) for t in tree)
    if isinstance(tree, dict):
        return {k: map_tensors(t, function) for k, t in tree.items()}
    return tree


def _opened(tree: Any, around: tuple[int, ...]) -> Any:
    """``tree`` with every object that holds tensors replaced by its parts."""

    def open_leaf(leaf: Any) -> Any:
        if isinstance(leaf, (torch.Tensor, *_PLAIN)) or not _holds_tensors(leaf, ()):
            return leaf
        if id(leaf) in around:
            raise UnsupportedError(f"an argument or output of type {type(leaf).__name__} refers to itself")
        return _Parts(leaf, {k: _opened(v, (*around, id(leaf))) for k, v in _parts(leaf).items()})

    return pytree.tree_map(open_leaf, tree)


def _holds_tensors(thing: Any, around: tuple[int, ...]) -> bool:
    if isinstance(thing, torch.Tensor):
        return True
    if isinstance(thing, (_PLAIN, torch.nn.Module)) or id(thing) in around or len(around) > 8:
        return False
    inside = (*around, id(thing))
    hidden = any(_holds_tensors(part, inside) for p in _out_of_reach(thing) for part in pytree.tree_leaves(p))
    if hidden or isinstance(thing, Iterator):
        raise UnsupportedError(
            f"an argument or output of type {type(thing).__name__} hides tensors, or makes them later, so that a plan "
            "cannot know them: give lists, tuples, dicts, dataclasses or other objects that have them as attributes."
        )
    return any(_holds_tensors(part, inside) for p in _parts(thing).values() for part in pytree.tree_leaves(p))
