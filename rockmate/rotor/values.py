"""Values, parameters and generators of a stage, as they are at a moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rkgb.randomness import Drawn, generators_in, random_state
from rkgb.storages import version_of
from rkgb.trees import tensor_leaves

Function = Callable[[Any], Any]
"""A stage: a module or a function of one value (a tensor, or a structure of tensors)."""


@dataclass(slots=True)
class Fixed:
    """A saved parameter or buffer, whose memory stays anyway, and its version counter when it was saved."""

    tensor: torch.Tensor
    version: int

    def read(self) -> torch.Tensor:
        """The tensor. Raises ``RuntimeError``, as autograd does, if it was changed in place since."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter or buffer of shape {tuple(self.tensor.shape)} is at version {self.tensor._version}, "
                f"expected {self.version}"
            )
        return self.tensor


@dataclass(frozen=True)
class Held:
    """A value from which a stage is recomputed, and the version counters of its tensors."""

    value: Any
    versions: list[int]

    @classmethod
    def of(cls, x: Any) -> Held:
        """``x`` without its history, as it is now."""
        value = detached(x)
        return cls(value, versions_of(value))

    def read(self, name: str) -> Any:
        """The value; ``name`` is the stage's. Raises ``RuntimeError`` if it was changed in place since."""
        if versions_of(self.value) != self.versions:
            raise RuntimeError(
                f"the input of {name} was changed in place between forward and backward, and the layer has to run "
                "again from it: change a copy of it, or call backward first"
            )
        return self.value


def versions_of(value: Any) -> list[int]:
    """The version counters of the tensors in ``value``."""
    return [version_of(t) for t in tensor_leaves(value)]


def versions_of_all(tensors: dict[str, torch.Tensor]) -> list[int]:
    """The version counters of ``tensors``, in order."""
    try:
        return [t._version for t in tensors.values()]
    except RuntimeError:  # one was made in inference mode
        return [version_of(t) for t in tensors.values()]


def detached(value: Any) -> Any:
    """The same memory without history, requiring grad where the original does."""

    def leaf(t: Any) -> Any:
        return t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t

    return leaf(value) if isinstance(value, torch.Tensor) else pytree.tree_map(leaf, value)


class Parts:
    """The modules of a stage at a moment, each once, and the parameters and buffers that they have, by name.

    ``modules``: with their names, which end with a dot; none for a plain function. ``owned``: parameters and buffers.
    ``homes``: for each buffer the dictionaries of modules that hold it, and its name there. ``links``: what holds what,
    by name; ``counts``: how many each holds. It is one walk, where torch's ``named_parameters`` and the like take one
    each: they are a good part of the time of a small layer.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.modules: list[tuple[str, torch.nn.Module]] = []
        self.parameters: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.homes: dict[str, list[tuple[dict[str, torch.Tensor | None], str]]] = {}
        self.links: list[tuple[dict[str, Any], str, Any]] = []
        self.counts: list[tuple[dict[str, Any], int]] = []
        named: dict[int, str] = {}
        todo = [("", function)] if isinstance(function, torch.nn.Module) else []
        seen: set[int] = set()
        while todo:
            entry = prefix, module = todo.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            self.modules.append(entry)
            if module._modules:
                children = [(f"{prefix}{k}.", m) for k, m in module._modules.items() if m is not None]
                todo += reversed(children)
            holding = (module._modules, module._parameters, module._buffers)
            self.links += [(held, k, thing) for held in holding for k, thing in held.items()]
            self.counts += [(held, len(held)) for held in holding]
            for name, t in module._parameters.items():
                if t is not None and id(t) not in seen:
                    seen.add(id(t))
                    self.parameters[prefix + name] = t
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    first = named.setdefault(id(buffer), prefix + name)
                    self.buffers[first] = buffer
                    self.homes.setdefault(first, []).append((module._buffers, name))
        self.owned = self.parameters | self.buffers

    @classmethod
    def again(cls, function: Function, before: Parts | None) -> Parts:
        """Those of now; ``before``: those of an earlier moment, which are these if nothing has changed."""
        if before is None or before.function is not function or not before.are_unchanged():
            return cls(function)
        vars(before).pop("attributes", None)
        return before

    def are_unchanged(self) -> bool:
        """Whether the modules have the same modules, parameters and buffers as then."""
        for held, count in self.counts:
            if len(held) != count:
                return False
        return all(held.get(name) is thing for held, name, thing in self.links)

    @cached_property
    def attributes(self) -> list[tuple[torch.nn.Module, tuple[str, ...], tuple[str, ...]]]:
        """Each module, the names of its attributes, and of those that are its own: not what all modules have."""
        found = ((m, tuple(m.__dict__)) for _, m in self.modules)
        return [(m, names, _own(names)) for m, names in found]


_OF_ALL = frozenset(vars(torch.nn.Module())) - {"training"}


@lru_cache(maxsize=4096)
def _own(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in _OF_ALL)


def generator_states(parts: Parts, x: Any) -> dict[Drawn, torch.Tensor]:
    """The states of the generators that a stage of these ``parts`` may draw from on the input ``x``.

    These are the default generators of the CPU and of the devices of ``x`` and the parameters, and those that the
    stage's modules hold.
    """
    devices = {t.device for t in (*tensor_leaves(x), *parts.parameters.values())} | {torch.device("cpu")}
    values = (m.__dict__[name] for m, _, own in parts.attributes for name in own)
    sources: list[Drawn] = [*devices, *dict.fromkeys(generators_in(values))]
    return {source: random_state(source) for source in sources}


def device_of(x: Any) -> torch.device:
    """The device of the first tensor in ``x``; the CPU where there is none."""
    return next((t.device for t in tensor_leaves(x)), torch.device("cpu"))


def mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``change(t)`` for each tensor t in it."""
    return pytree.tree_map(lambda t: change(t) if isinstance(t, torch.Tensor) else t, value)
