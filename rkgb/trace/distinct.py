"""The distinct calls of a trace without data: each function with what it is given, as far as that shows."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.nodes import Mode
from rkgb.storages import storage_key
from rkgb.trees import map_tensors


@dataclass(frozen=True, slots=True)
class Like:
    """How a tensor lies in ``memory``, which has a number of its own in each call."""

    memory: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Distinct:
    """A call. ``args``, ``kwargs``: as given, with a ``Like`` in the place of each tensor but numbers on the CPU.
    ``memory``: bytes of each memory.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mode: Mode
    memory: tuple[int, ...]


class DistinctCalls:
    """Those that were noted, each once."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Distinct] = {}

    def note(self, call: Distinct) -> None:
        self._found.setdefault((call.func, repr((call.args, call.kwargs)), call.memory, call.mode), call)

    @staticmethod
    def form(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> Distinct:
        """A call that comes under ``mode``, which may change how its tensors lie."""
        numbers: dict[int, int] = {}
        memory: list[int] = []

        def like(t: torch.Tensor) -> Any:
            if not t.is_meta:
                return t.detach().clone()
            key = storage_key(t)
            if key not in numbers:
                numbers[key] = len(memory)
                memory.append(t.untyped_storage().nbytes())
            return Like(numbers[key], int(t.storage_offset()), tuple(t.shape), t.stride(), t.dtype, t.requires_grad)

        args, kwargs = map_tensors((args, kwargs), like)
        return Distinct(func, args, kwargs, mode, tuple(memory))

    def calls(self) -> tuple[Distinct, ...]:
        """All, in the order in which they came."""
        return tuple(self._found.values())
