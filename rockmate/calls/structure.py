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


def keeps_what_is_written(program: fx.GraphModule) -> fx.Node | None:
    """An ``autograd.Function`` that keeps memory which forward was given, where that is written behind it or in a
    backward. Eager mode's backward reads an attribute as it is by then; that of a capture saves it, which is an error.
    """
    bodies = {n: _bodies(g, n) for g in graphs_within(program) for n in g.graph.nodes if is_function(n)}
    in_backwards = {x for _, backward in bodies.values() for n in backward.graph.nodes for x in _written(n)}
    for graph in graphs_within(program):
        written = set(in_backwards)
        node: fx.Node
        for node in reversed(graph.graph.nodes):
            if is_function(node) and written & _kept_of_given(bodies[node][0]):
                return node
            written |= _written(node)
    return None


def is_function(node: fx.Node) -> bool:
    """Whether it applies an ``autograd.Function`` that TorchDynamo has captured."""
    return str(getattr(node.target, "_name", "")) == "autograd_function_apply"


def _bodies(graph: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, fx.GraphModule]:
    return getattr(graph, str(node.args[0])), getattr(graph, str(node.args[1]))


def _kept_of_given(forward: fx.GraphModule) -> set[int]:
    """The memory that the forward of a function is given, and keeps for its backward."""
    kept: Any = forward.graph.output_node().args[0][1]  # type: ignore[index]
    given = {x for n in forward.graph.find_nodes(op="placeholder") for x in memory_of(n)}
    return given & {x for n in kept if isinstance(n, fx.Node) for x in memory_of(n)}


def _written(node: fx.Node) -> set[int]:
    """The memory that an operation may change."""
    changed = node.all_input_nodes[: None if "out" in node.kwargs else 1] if writes(node) else []
    return {x for n in changed for x in memory_of(n)}


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
