"""What the operations of a captured program write and make, without a run: whether memory needs a plan, and a run much
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from rkgb.storages import has_memory, storage_key
from rkgb.trace.casts import RECURRENT
from rkgb.trees import tensors_in
from rockmate.calls.captured import name_of

SPARE = 4
"""Times the bytes of all results: their gradients, what single operations keep beside, and their temporary memory.

This is a guess, so the first step is measured."""


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


def computes_unread(program: fx.GraphModule) -> bool:
    """Whether the program may make tensors on which neither its outputs nor what it is given depend. Plans leave out
    what makes these.
    """
    *before, output = program.graph.nodes
    needed = {*output.all_input_nodes}
    live = {x for n in before if not n.op.startswith("call") or n in needed for x in memory_of(n)}
    for node in reversed([n for n in before if n.op.startswith("call")]):
        read = {x for n in node.all_input_nodes for x in memory_of(n)}
        if node in needed or (writes(node) and live & read):
            needed.update(node.all_input_nodes)
            live.update(read)
        elif not read >= memory_of(node):
            return True
    return False


def memory_of(node: fx.Node) -> set[int]:
    """What tells the memory of a node's tensors from others'."""
    return {storage_key(t) for t in tensors_in(node.meta.get("example_value")) if has_memory(t)}


def inputs_of_functions(program: fx.GraphModule) -> frozenset[str]:
    """The inputs that are handed to an ``autograd.Function``: a number among them may count in its backward only."""
    called = (n for n in program.graph.nodes if n.op == "call_module" or isinstance(n.target, HigherOrderOperator))
    return frozenset(i.name for n in called for i in n.all_input_nodes if i.op == "placeholder")


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


class Results:
    """How many elements the results of a captured program have, by the sizes of its arguments."""

    def __init__(self, program: fx.GraphModule) -> None:
        self._numbers: list[tuple[int, Any]] = []  # positions of arguments that are numbers: what they are called
        self._counts: dict[Any, int] = {}  # different expressions, which numbers of elements follow from: their places
        self._allocated: list[tuple[int, int]] = []  # of results with memory of their own: the place, bytes an element
        captured = 0  # bytes, at the sizes of the capture
        for k, node in enumerate(program.graph.find_nodes(op="placeholder")):
            example = node.meta.get("example_value")
            if isinstance(example, torch.SymInt):
                self._numbers.append((k, example.node.expr))
        nodes = [n for graph in graphs_within(program) for n in graph.graph.nodes]
        given = [n.meta.get("example_value") for n in nodes if n.op == "placeholder"]
        made = [n.meta.get("example_value") for n in nodes if n.op != "placeholder"]
        known = {_storage(t) for t in tensors_in(given)}
        for t in tensors_in(made):
            count: Any = t.numel()
            place = self._place(count)
            if _storage(t) not in known:
                known.add(_storage(t))
                captured += t.dtype.itemsize * _as_captured(count)
                self._allocated.append((place, t.dtype.itemsize))
        self.quick = captured < _QUICK * sum(node.op.startswith("call") for node in nodes)  # to compute
        self._allocated += [(self._place(count), size) for node in nodes for count, size in _within(node)]

    def _place(self, count: Any) -> int:
        """Where ``count``, a number of elements, is among the different ones."""
        expression = count.node.expr if isinstance(count, torch.SymInt) else count
        return self._counts.setdefault(expression, len(self._counts))

    def counts(self, arguments: Sequence[Any]) -> tuple[int, ...] | None:
        """The different numbers of elements, in the same order for all ``arguments``; None where sizes follow from
        values (x[mask]).
        """
        numbers = {expression: int(arguments[k]) for k, expression in self._numbers}
        found = []
        for expression in self._counts:
            count = expression if isinstance(expression, int) else expression.xreplace(numbers)
            if getattr(count, "free_symbols", ()):  # a bare symbol has become a plain number
                return None
            found.append(int(count))
        return tuple(found)

    def rough_bytes(self, counts: tuple[int, ...] | None) -> float:
        """Bytes of all results, and of what operations keep beside; infinite where sizes follow from values."""
        return inf if counts is None else sum(counts[place] * size for place, size in self._allocated)


def _within(node: fx.Node) -> list[tuple[Any, int]]:
    """How many numbers an operation may keep that are no results, and bytes of each: the weights of attention, of all
    pairs of positions; in each step of recurrent ones, as many as their weights have rows.
    """
    examples: list[Any] = [n.meta.get("example_value") for n in node.all_input_nodes]
    if node.target in RECURRENT:
        rows = [t.shape[0] for t in examples[1:] if isinstance(t, torch.Tensor) and t.dim() == 2]
        return [(prod(examples[0].shape[:-1]) * sum(rows), examples[0].dtype.itemsize)]
    if (name := name_of(node)) not in ("scaled_dot_product_attention", "multi_head_attention_forward"):
        return []
    given: dict[str, Any] = dict(zip(("query", "key", "value", "", "num_heads"), node.args, strict=False)) | node.kwargs
    query, key = (given[k].meta["example_value"] for k in ("query", "key"))
    of_each = key.shape[-2] if name[0] == "s" else key.shape[0] * given["num_heads"]
    return [(prod(query.shape[:-1]) * of_each, query.dtype.itemsize)]


def rough_peak(size: float, arguments: Sequence[Any]) -> float:
    """Bytes that a training step hardly exceeds whose results have ``size`` bytes together: ``SPARE`` times that, and
    gradients of parameters that have none.
    """
    missing = {id(p): p for p in arguments if isinstance(p, torch.nn.Parameter) and p.requires_grad and p.grad is None}
    return SPARE * size + sum(p.nbytes for p in missing.values())


def _as_captured(count: Any) -> int:
    """``count`` at the sizes of the capture; 0 if it follows from values."""
    if isinstance(count, int):
        return count
    return int(count.node.hint) if count.node.has_hint() else 0


def _storage(t: torch.Tensor) -> int:
    return storage_key(t) if has_memory(t) else id(t)
