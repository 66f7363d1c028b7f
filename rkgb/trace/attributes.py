"""What a module's forward assigns to attributes and buffers of modules."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping
from typing import Any

import torch


class State:
    """A record of the attributes of a module and its submodules, to compare with after a forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.buffers = [(n, m, k, b) for n, m in model.named_modules() for k, b in m._buffers.items()]
        self.plain = [(n, m, dict(vars(m))) for n, m in model.named_modules()]
        self.contents = {id(v): contents(v) for _, _, held in self.plain for v in held.values() if _changeable(v)}

    def assigned(self) -> dict[str, torch.Tensor]:
        """The buffers that forward replaced by other tensors, by qualified name."""
        now = [(f"{n}.{k}" if n else k, m._buffers.get(k), b) for n, m, k, b in self.buffers]
        return {name: t for name, t, before in now if t is not before and t is not None}

    def sets(self) -> dict[str, Any]:
        """The attributes that forward set or filled, by qualified name, with their values; containers are copied."""
        return {
            f"{name}.{key}" if name else key: copy.copy(value) if _changeable(value) else value
            for name, module, before in self.plain
            for key, value in vars(module).items()
            if key not in _OF_MODULES and self._set(before.get(key, _NOTHING), value)
        }

    def _set(self, before: Any, now: Any) -> bool:
        if now is before:
            return _changeable(now) and contents(now) != self.contents[id(now)]
        return not _plainly_equal(now, before)


def left_as_it_is(name: str) -> str:
    """The plan's note about an attribute that forward sets and a plan does not."""
    return f"forward sets the attribute {name}; under a plan it is left as it is"


def changed_again(model: torch.nn.Module, sets: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in ``sets`` whose attributes have another value now: forward sets them to another one in each call."""
    changed = []
    for name, value in sets.items():
        module, _, key = name.rpartition(".")
        if not _alike(vars(model.get_submodule(module)).get(key, _NOTHING), value):
            changed.append(name)
    return tuple(changed)


def contents(v: Any) -> Any:
    """The elements of a container, by identity; keys as they are."""
    return [(k, id(x)) for k, x in v.items()] if isinstance(v, dict) else [id(x) for x in v]


def _changeable(v: Any) -> bool:
    return isinstance(v, (list, dict, set, collections.deque))


def _alike(a: Any, b: Any) -> bool:
    """Equal, tensors by value."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return tensors and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if callable(a) or isinstance(a, torch.nn.Module):
        return True
    try:
        return a is b or bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False


_NOTHING = object()
_OF_MODULES = frozenset(vars(torch.nn.Module()))


def _plainly_equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, (int, float, str, tuple)) and bool(a == b)
