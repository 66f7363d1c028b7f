"""Whether a budget is so large that nothing needs to be planned, from sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

SPARE = 4
"""Times the bytes of all results: their gradients, what single operations keep beside, and their temporary memory.

This is a guess, so the first step is measured."""


def rough_peak(program: fx.GraphModule, arguments: Sequence[Any]) -> int:
    """Bytes that a training step of ``program`` hardly exceeds: ``SPARE`` times what all of its results take together,
    and gradients of parameters that have none.
    """
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
            for t in _tensors(node.meta.get("example_value")):
                if _storage(t) not in known:
                    known.add(_storage(t))
                    total += _bytes(t, numbers)
    missing = {id(p): p for p in arguments if isinstance(p, torch.nn.Parameter) and p.requires_grad and p.grad is None}
    return SPARE * total + sum(p.nbytes for p in missing.values())


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [t for x in tree for t in _tensors(x)] if isinstance(tree, (list, tuple)) else []


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout == torch.strided else id(t)


def _bytes(t: torch.Tensor, numbers: dict[Any, int]) -> int:
    count = t.numel()
    if isinstance(count, torch.SymInt):
        count = int(count.node.expr.xreplace(numbers))
    return int(count) * t.dtype.itemsize
