"""Values, parameters and generators of a stage, as they are at a moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rkgb.randomness import Drawn, own_generators, random_state
from rkgb.trees import tensor_leaves

Function = Callable[[Any], Any]
"""A stage: a module or a function of one value (a tensor, or a structure of tensors)."""


@dataclass(frozen=True)
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


def version_of(t: torch.Tensor) -> int:
    """The version counter of ``t``; 0 for a tensor made in inference mode, which has none."""
    return 0 if t.is_inference() else t._version


def detached(value: Any) -> Any:
    """The same memory without history, requiring grad where the original does."""

    def leaf(t: Any) -> Any:
        return t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t

    return pytree.tree_map(leaf, value)


def owned_by(function: Function) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a stage, by name; none for a plain function."""
    if not isinstance(function, torch.nn.Module):
        return {}
    return {**dict(function.named_parameters()), **dict(function.named_buffers())}


def generator_states(function: Function, x: Any) -> dict[Drawn, torch.Tensor]:
    """The states of the generators that a stage may draw from on the input ``x``.

    These are the default generators of the CPU and of the devices of ``x`` and the parameters, and those that the
    stage's modules hold.
    """
    module = function if isinstance(function, torch.nn.Module) else torch.nn.Module()
    devices = {t.device for t in (*tensor_leaves(x), *module.parameters())} | {torch.device("cpu")}
    sources: list[Drawn] = [*devices, *own_generators(module)]
    return {source: random_state(source) for source in sources}


def device_of(x: Any) -> torch.device:
    """The device of the first tensor in ``x``; the CPU where there is none."""
    return next((t.device for t in tensor_leaves(x)), torch.device("cpu"))


def mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``change(t)`` for each tensor t in it."""
    return pytree.tree_map(lambda t: change(t) if isinstance(t, torch.Tensor) else t, value)
