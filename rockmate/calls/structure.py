"""What the operations of a captured program write and make, without a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rkgb.storages import has_memory, storage_key
from rkgb.trees import tensors_in
from rockmate.calls.captured import name_of

_QUICK = 2**21
"""Bytes: where the mean operation makes fewer, a run takes less time than to see what the program does without."""

_IN_PLACE = frozenset("iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul".split())


def writes(node: fx.Node) -> bool:
    """Whether an operation may change what it is given in place."""
    if not node.op.startswith("call"):
        return False
    name = name_of(node)
    in_place = name.endswith("_") and not name.endswith("__")
    assigns = node.op == "call_function" and (name in _IN_PLACE or name == "setitem")
    return in_place or assigns or node.op == "call_module" or bool({"out", "inplace"} & node.kwargs.keys())


def memory_of(node: fx.Node) -> set[int]:
    """What tells the memory of a node's tensors from others'."""
    return {storage_key(t) for t in tensors_in(node.meta.get("example_value")) if has_memory(t)}


def graphs_within(program: fx.GraphModule) -> list[fx.GraphModule]:
    """``program`` and the graphs within it."""
    return [m for m in program.modules() if isinstance(m, fx.GraphModule)]


def is_quick(program: fx.GraphModule) -> bool:
    """Whether a run of ``program`` takes less time than to see what it does without, as its results are small."""
    nodes = [n for graph in graphs_within(program) for n in graph.graph.nodes]
    given = [n.meta.get("example_value") for n in nodes if n.op == "placeholder"]
    made = [n.meta.get("example_value") for n in nodes if n.op != "placeholder"]
    known, captured = {_storage(t) for t in tensors_in(given)}, 0  # bytes, at the sizes of the capture
    for t in tensors_in(made):
        if _storage(t) not in known:
            known.add(_storage(t))
            captured += t.dtype.itemsize * _as_captured(t.numel())
    return bool(captured < _QUICK * sum(node.op.startswith("call") for node in nodes))


def _as_captured(count: Any) -> int:
    """``count`` at the sizes of the capture; 0 if it follows from values."""
    if isinstance(count, int):
        return count
    return int(count.node.hint) if count.node.has_hint() else 0


def _storage(t: torch.Tensor) -> int:
    return storage_key(t) if has_memory(t) else id(t)
