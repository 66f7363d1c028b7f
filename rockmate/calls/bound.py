"""Whether a budget is so large that nothing needs to be planned, from sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import fx

from rkgb.storages import storage_key
from rkgb.trees import tensors_in

SPARE = 4
"""Times the bytes of all results: their gradients, what single operations keep beside, and their temporary memory.

This is a guess, so the first step is measured."""


def rough_peak(program: fx.GraphModule, arguments: Sequence[Any]) -> float:
    """Bytes that a training step of ``program`` hardly exceeds: ``SPARE`` times what all of its results take together,
    and gradients of parameters that have none. Infinite where sizes follow from values (x[mask]).
    """
    missing = {id(p): p for p in arguments if isinstance(p, torch.nn.Parameter) and p.requires_grad and p.grad is None}
    return SPARE * rough_bytes(program, arguments) + sum(p.nbytes for p in missing.values())


def rough_bytes(program: fx.GraphModule, arguments: Sequence[Any]) -> float:
    """Bytes of all results of ``program`` together; infinite where sizes follow from values."""
    numbers: dict[Any, int] = {}
    known: set[int] = set()
    for node, value in zip(program.graph.find_nodes(op="placeholder"), arguments, strict=True):
        example = node.meta.get("example_value")
        if isinstance(example, torch.SymInt):
            numbers[example.node.expr] = int(value)
        elif isinstance(example, torch.Tensor):
            known.add(_storage(example))
    total = 0
    for node in program.graph.nodes:
        if node.op != "placeholder":
            for t in tensors_in(node.meta.get("example_value")):
                if _storage(t) not in known:
                    known.add(_storage(t))
                    size = _bytes(t, numbers)
                    if size is None:
                        return inf
                    total += size
    return total


def _storage(t: torch.Tensor) -> int:
    plain = t.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(t)
    return storage_key(t) if plain else id(t)


def _bytes(t: torch.Tensor, numbers: dict[Any, int]) -> int | None:
    """None where the size is not known before the program runs."""
    count: Any = t.numel()
    if isinstance(count, torch.SymInt):
        count = count.node.expr.xreplace(numbers)
        if getattr(count, "free_symbols", ()):  # a bare symbol has become a plain number
            return None
    return int(count) * t.dtype.itemsize
