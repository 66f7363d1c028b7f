"""The call of a module: the forms in which users give it, and the one in which the code passes it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from rkgb.trees import flatten, unflatten


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call of a module, taken apart at most once. It does not change."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def _flat(self) -> tuple[list[Any], TreeSpec]:
        return flatten((self.args, self.kwargs))

    @property
    def leaves(self) -> list[Any]:
        """What the arguments consist of: tensors and all else, in the order of PyTorch's pytrees."""
        return self._flat[0]

    @property
    def spec(self) -> TreeSpec:
        """How the leaves make up ``(args, kwargs)``."""
        return self._flat[1]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The whole numbers among the leaves."""
        return tuple(leaf for leaf in self.leaves if type(leaf) is int)

    def with_numbers_as_tensors(self) -> Call:
        """The same call with tensors in the place of its whole numbers."""
        leaves = [torch.tensor(leaf) if type(leaf) is int else leaf for leaf in self.leaves]
        return Call(*unflatten(leaves, self.spec))

    def with_tensors(self, replace: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        leaves = [replace(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return Call(*unflatten(leaves, self.spec))


Sample = torch.Tensor | tuple[Any, ...] | list[Any] | dict[str, Any] | Call
"""A tensor, a tuple or list of positional arguments, a dict of keyword arguments, or a ``Call``."""


def call_of(sample: Sample, sample_kwargs: dict[str, Any] | None = None) -> Call:
    """The call that a sample stands for."""
    if isinstance(sample, Call):
        return sample
    if isinstance(sample, dict):
        return Call((), {**sample, **(sample_kwargs or {})})
    return Call(tuple(sample) if isinstance(sample, (tuple, list)) else (sample,), dict(sample_kwargs or {}))


def check_module(model: object) -> None:
    """Raise ``TypeError`` if ``model`` is no module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}: give a torch.nn.Module, and after it the sample")
