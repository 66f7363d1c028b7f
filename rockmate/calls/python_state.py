"""What a module's Python may read that is no tensor: attributes, classes, variables, arguments.

A plan is made of one run of the module's Python, and is right as long as that would run the same way again. Plain
attributes of modules are part of the key of a plan (``rockmate/calls/state.py``). The rest can be anything, from a
list to a trainer with the whole program behind it. So a plan notes what of it the code that ran can read, by the names
that the code contains (``rkgb/trace/code.py``): by value as far as values go, and else by identity. TorchDynamo guards
each object that it sees read; names see a little more, and need no interpreter of Python.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from rkgb.trace.code import Code, is_installed
from rkgb.trees import slots_of

PLAIN = frozenset({bool, int, float, str, type(None)})
NOTES = ("_is_", "_fsdp")  # what libraries note on modules for themselves, in attributes that begin so
_VALUES = (complex, bytes, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, slice, range, Enum)
_OF_MODULES = frozenset(torch.nn.Module().__dict__)
_FOREIGN = frozenset({"torch", "rockmate", "rkgb", "solvers"}) | sys.stdlib_module_names
# Objects looked into for one attribute at most; beyond, an object is what it is, not what it holds.
_MOST = 2000

Place = tuple[str, ...]
Found = dict[Place, Hashable]


@dataclass(frozen=True, eq=False)
class PythonState:
    """What was ``found`` for a plan, by place; ``code`` says where to look."""

    code: Code
    found: Found

    def changed(self, now: Found) -> set[Place]:
        """Places where something else is found now."""
        return {place for place in self.found.keys() | now.keys() if self.found.get(place) != now.get(place)}


def find(model: torch.nn.Module, arguments: Sequence[Any], code: Code) -> Found:
    """Of ``model``, called with ``arguments`` (leaves; tensors are left out), as far as ``code`` can read it.

    Runs at every call.
    """
    found: Found = {}
    own = _submodules(model)
    describe = _Describer(code.names, own, by_identity=True)
    names = code.names - _OF_MODULES
    classes: dict[type, None] = {}
    for m, name in own.items():
        classes[type(m)] = None
        for k in names.intersection(m.__dict__):
            v = m.__dict__[k]
            if not (isinstance(v, torch.Tensor) or (type(v) in PLAIN and not k.startswith(NOTES))):
                found["attribute", name, k] = describe(v)
    for cls in classes:
        if of_class := describe.of_class(cls):
            found["class", cls.__module__, cls.__qualname__] = of_class
    for variables, read in code.scopes:
        for k in read & variables.keys():
            found["global", str(variables.get("__name__")), k] = describe(variables[k])
    for at, (function, k, cell) in enumerate(code.cells):
        if cell != CellType():
            found["variable", function, k, str(at)] = describe(cell.cell_contents)
    objects = [(str(at), v) for at, v in enumerate(arguments) if not (isinstance(v, torch.Tensor) or in_key(v))]
    if objects:
        given = _Describer(code.names, own, by_identity=False)
        found |= {("argument", at): given(v) for at, v in objects}
    return found


def in_key(argument: Any) -> bool:
    """Whether the key of a call has the value of an argument that is no tensor."""
    if isinstance(argument, (np.ndarray, np.generic)):
        return not argument.dtype.hasobject
    return type(argument) in PLAIN


def _submodules(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Each with its qualified name, as ``named_modules``, but in less time."""
    found: dict[torch.nn.Module, str] = {}
    left = [(model, "")]
    while left:
        m, prefix = left.pop()
        if m not in found:
            found[m] = prefix[:-1]
            left += [(child, f"{prefix}{k}.") for k, child in m._modules.items() if child is not None]
    return found


class _Same:
    """An object by its identity; where that is possible it is not kept alive."""

    def __init__(self, thing: Any) -> None:
        self.get: Callable[[], Any]
        try:
            self.get = weakref.ref(thing)
        except TypeError:
            self.get = lambda: thing

    def __eq__(self, other: object) -> bool:
        mine = self.get()
        return isinstance(other, _Same) and mine is not None and mine is other.get()

    def __hash__(self) -> int:
        return 0


class _Describer:
    """Values by which to tell whether what ``names`` reach in an object has changed.

    ``by_identity``: another object is another thing though it holds the same.
    """

    def __init__(self, names: frozenset[str], own: dict[torch.nn.Module, str], *, by_identity: bool) -> None:
        self.names, self.by_identity = names, by_identity
        self._done: dict[int, Hashable] = {id(m): ("own", name) for m, name in own.items()}
        self._left = 0

    def __call__(self, x: Any) -> Hashable:
        self._left = _MOST
        return self._of(x)

    def of_class(self, cls: type) -> Hashable:
        """What the class and those that it inherits from define, but those of torch and of Python itself."""
        known = self._done.get(id(cls))
        if known is None:
            self._done[id(cls)] = ()
            known = self._done[id(cls)] = tuple(
                (k, self._of(vars(c)[k]))
                for c in cls.__mro__
                if not _foreign(c.__module__)
                for k in sorted(self.names & vars(c).keys())
            )
        return known

    def _of(self, x: Any) -> Hashable:
        kind: Any = type(x)
        if kind in PLAIN or isinstance(x, _VALUES):
            return kind, x
        if isinstance(x, (FunctionType, type, torch.Tensor)):
            return _Same(x)
        if id(x) not in self._done:
            self._left -= 1
            self._done[id(x)] = kind  # where it holds itself
            self._done[id(x)] = (kind, _Same(x)) if self._left < 0 else (kind, self._inside(x))
        return self._done[id(x)]

    def _inside(self, x: Any) -> Hashable:
        if isinstance(x, MethodType):
            return self._of(x.__func__), self._of(x.__self__)
        if isinstance(x, functools.partial):
            return self._of(x.func), self._all(x.args), self._items(x.keywords)
        if isinstance(x, ContextVar):
            return _Same(x), self._of(x.get(None))
        if isinstance(x, logging.Logger):
            return _Same(x), x.getEffectiveLevel(), x.disabled
        if isinstance(x, (bytearray, array)):
            return bytes(x)
        if isinstance(x, np.ndarray):
            return _Same(x) if x.dtype.hasobject else (x.dtype.str, x.shape, x.tobytes())
        if isinstance(x, ModuleType):
            installed = _foreign(x.__name__) or is_installed(str(getattr(x, "__file__", "")))
            return _Same(x) if installed else self._attributes(vars(x))
        if isinstance(x, torch.nn.Module):
            tensors = self._all([*x.parameters(), *x.buffers()])
            return _Same(x), tensors, self._items(x._modules), x.training, self._attributes(vars(x))
        holds = self._holds(x)
        if not holds and _foreign(type(x).__module__) and not isinstance(x, SimpleNamespace):
            by_value = getattr(type(x), "__hash__", None) not in (None, object.__hash__)
            return x if by_value else _Same(x)
        slots = tuple((k, self._of(getattr(x, k))) for k in slots_of(x) if k in self.names)
        inside = (*holds, *slots, self._attributes(getattr(x, "__dict__", {})), self.of_class(type(x)))
        return inside if holds or not self.by_identity else (_Same(x), *inside)

    def _holds(self, x: Any) -> tuple[Hashable, ...]:
        """The elements of a container."""
        if isinstance(x, (list, tuple, deque)):
            return (self._all(x),)
        if isinstance(x, Mapping):
            return (self._items(x),)
        if isinstance(x, (set, frozenset)):
            return (frozenset(self._of(e) for e in x),)
        return ()

    def _all(self, things: Sequence[Any]) -> Hashable:
        if all(type(x) in PLAIN for x in things):
            return tuple(things), tuple(map(type, things))
        return tuple(self._of(x) for x in things)

    def _items(self, things: Mapping[Any, Any]) -> Hashable:
        return tuple((self._of(k), self._of(v)) for k, v in things.items())

    def _attributes(self, held: Mapping[str, Any]) -> Hashable:
        return tuple((k, self._of(v)) for k, v in held.items() if k in self.names)


def _foreign(module: str) -> bool:
    """Of torch, of Python itself, or of this project: an attachment changes with every call."""
    return module.partition(".")[0] in _FOREIGN
