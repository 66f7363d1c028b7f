"""Values between the stages of a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rkgb.storages import version_of
from rkgb.trees import tensor_leaves

Function = Callable[[Any], Any]
"""A stage: a module or a function of one value (a tensor, or a structure of tensors)."""


@dataclass(frozen=True)
class Held:
    """A value from which a stage is recomputed, and the version counters of its tensors."""

    value: Any
    versions: list[int]

    @classmethod
    def of(cls, x: Any) -> Held:
        """``x`` without its history, as it is now."""
        return cls(detached(x), versions_of(x))

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


def detached(value: Any) -> Any:
    """The same memory without history, requiring grad where the original does."""
    return mapped(lambda t: t.detach().requires_grad_(t.requires_grad), value)


def device_of(x: Any) -> torch.device:
    """The device of the first tensor in ``x``; the CPU where there is none."""
    return next((t.device for t in tensor_leaves(x)), torch.device("cpu"))


def mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``change(t)`` for each tensor t in it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return pytree.tree_map(lambda t: change(t) if isinstance(t, torch.Tensor) else t, value)
