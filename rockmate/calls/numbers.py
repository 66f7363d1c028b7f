"""Numbers in a captured program, apart from its tensors.

TorchDynamo captures numbers that differ between calls (sizes, counters, rates) as inputs, and computes with them in the
program. A plan is for a program of tensors. So numbers are computed before it, by a program of their own. Those that
tensors are multiplied by, or added to, become tensors without dimensions: other values of these need no other plan.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rkgb.errors import UnsupportedError

NUMBER = "number_"
"""Inputs of the program of tensors that are numbers have names that begin so."""

_ARITHMETIC = frozenset(
    {operator.mul, operator.add, operator.sub, operator.truediv, operator.imul, operator.iadd, operator.isub}
    | {operator.itruediv, torch.mul, torch.add, torch.sub, torch.div}
)

_NAMES = frozenset({"mul", "add", "sub", "div"})

_EITHER_WAY = frozenset({operator.mul, operator.add, torch.mul, torch.add})
"""Where Python hands a number that comes first to the tensor, which takes it second."""

NumberUse = tuple[fx.Node, torch.dtype | None]
"""A number, and the type of the tensor that it becomes; None if it stays a number."""


@dataclass(frozen=True)
class Split:
    """``program``: of tensors. Its inputs are those of the whole at the positions ``kept``, and then ``uses``: numbers
    that ``numbers`` returns, as tensors of a type or as they are. ``outputs``: of the whole, each the position of an
    output of ``program`` (True) or of ``numbers`` (False).
    """

    program: fx.GraphModule
    numbers: fx.GraphModule
    kept: tuple[int, ...]
    uses: tuple[tuple[int, torch.dtype | None], ...]
    outputs: tuple[tuple[bool, int], ...]

    def inputs(self, arguments: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
        """(inputs of ``program``, numbers) for the inputs of the whole."""
        try:
            found = self.numbers(*arguments)
        except (ArithmeticError, ValueError) as error:  # 1 / 0, math.sqrt(-1)
            raise UnsupportedError(f"forward may catch an error of Python's numbers ({error})") from error
        made = (found[k] if dtype is None else torch.tensor(found[k], dtype=dtype) for k, dtype in self.uses)
        return [*(arguments[k] for k in self.kept), *made], found

    def joined(self, results: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, ...]:
        return tuple((results if of_program else numbers)[k] for of_program, k in self.outputs)


def split(whole: fx.GraphModule) -> Split | None:
    """``whole`` as two programs; None if it computes with no numbers."""
    numbers = _numbers(whole)
    if not numbers:
        return None
    returned: list[Any] = [*whole.graph.output_node().args[0]]  # type: ignore[misc]
    others = (node for node in whole.graph.nodes if node not in numbers and node.op != "output")
    read = ((user, n) for user in others for n in user.all_input_nodes if n in numbers)
    uses = list(dict.fromkeys((n, type_beside(user, n)) for user, n in read))
    wanted = list(dict.fromkeys([*(n for n, _ in uses), *(n for n in returned if n in numbers)]))
    inputs = enumerate(whole.graph.find_nodes(op="placeholder"))
    kept = {k: n for k, n in inputs if not (n in numbers or (n.users and all(user in numbers for user in n.users)))}
    results = [n for n in returned if n not in numbers]
    at = itertools.count()
    return Split(
        _program(whole, numbers, list(kept.values()), uses, results),
        _prologue(whole, numbers, wanted),
        tuple(kept),
        tuple((wanted.index(n), dtype) for n, dtype in uses),
        tuple((False, wanted.index(n)) if n in numbers else (True, next(at)) for n in returned),
    )


def is_number(node: fx.Node) -> bool:
    """Whether the value of a node is a number, known or symbolic."""
    return isinstance(node.meta.get("example_value"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


def without_rates(program: fx.GraphModule) -> list[str]:
    """What the program does, but for fractions that tensors are multiplied by, or the like. It is the same in each
    process, unless a function is not found by name, and whatever values are called.
    """
    at = {n: k for k, n in enumerate(program.graph.nodes)}

    def line(n: fx.Node) -> str:
        rated = n.target in _ARITHMETIC or (n.op == "call_method" and str(n.target).rstrip("_") in _NAMES)
        given = fx.node.map_arg((n.args, n.kwargs), lambda a: f"%{at[a]}")
        args, kwargs = fx.node.map_aggregate(given, lambda a: "rate" if rated and type(a) is float else a)
        what = "" if n.op in ("placeholder", "output") else found_in(n.target) or str(n.target)
        return f"{n.op} {what} {args} {kwargs}"

    return [line(n) for n in program.graph.nodes]


def found_in(function: Any) -> str:
    """The name by which a function is found in every process: "torch.relu"; empty if it is not."""
    place, name = str(getattr(function, "__module__", "")), str(getattr(function, "__name__", ""))
    return f"{place}.{name}" if getattr(sys.modules.get(place), name, None) is function else ""


def _numbers(whole: fx.GraphModule) -> set[fx.Node]:
    """Nodes that are numbers and follow from numbers alone; ``item`` reads a number that was given as a tensor.

    A tensor with other uses may be written before it is read: such a number is none of these.
    """
    found: set[fx.Node] = set()
    for node in whole.graph.nodes:
        read = node.all_input_nodes
        if is_number(node):
            given = node.op == "placeholder" or (node.target == "item" and all(map(_is_only_read, read)))
        elif node.target is torch.scalar_tensor and all(user.op == "output" for user in node.users):
            given = False  # a number of the module's Python is handed back as a tensor
        else:
            continue
        if given or (node.op[:4] == "call" and read and found.issuperset(read)):
            found.add(node)
    return found


def _is_only_read(node: fx.Node) -> bool:
    """Whether a node is an input of which nothing but ``item`` is taken."""
    return node.op == "placeholder" and all(user.target == "item" for user in node.users)


def type_beside(node: fx.Node, number: fx.Node) -> torch.dtype | None:
    """The type of a tensor in the place of ``number`` that gives the same bits; None if there may be none.

    An operation on a tensor of single or double precision and a number converts the number to the tensor's type. On one
    of less precision it computes with more, whatever the number is given as, if the tensor has dimensions.
    """
    beside = [a for a in node.args if a is not number]
    if node.target not in _ARITHMETIC or node.kwargs or len(node.args) != 2 or len(beside) != 1:
        return None
    if node.args[0] is number and node.target not in _EITHER_WAY:
        return None
    tensor = beside[0].meta.get("example_value") if isinstance(beside[0], fx.Node) else None
    varies = isinstance(number.meta["example_value"], (torch.SymInt, torch.SymFloat))
    if not varies or not isinstance(tensor, torch.Tensor):
        return None
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor.dtype
    return torch.float64 if tensor.is_floating_point() and tensor.dim() else None


def _program(
    whole: fx.GraphModule, numbers: set[fx.Node], kept: list[fx.Node], uses: list[NumberUse], results: list[Any]
) -> fx.GraphModule:
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in kept:
        known[node] = graph.node_copy(node, known.__getitem__)
    inputs = {use: graph.placeholder(f"{NUMBER}{k}") for k, use in enumerate(uses)}
    for (n, dtype), node in inputs.items():
        if dtype is None:
            node.meta["example_value"] = n.meta["example_value"]
    for node in whole.graph.nodes:
        if node in numbers or node.op in ("placeholder", "output"):
            continue

        def put(n: fx.Node, node: fx.Node = node) -> fx.Node:
            return inputs[n, type_beside(node, n)] if n in numbers else known[n]

        known[node] = copied = graph.node_copy(node, put)
        first = node.args[0] if node.args else None
        if isinstance(first, fx.Node) and first in numbers and type_beside(node, first) is not None:
            copied.args = tuple(reversed(copied.args))  # as Python hands them on
    graph.output(tuple(known[n] if isinstance(n, fx.Node) else n for n in results))
    return fx.GraphModule(whole, graph)


def _prologue(whole: fx.GraphModule, numbers: set[fx.Node], wanted: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in whole.graph.nodes:
        if node.op == "placeholder" or node in numbers:
            known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(tuple(known[n] for n in wanted))
    return fx.GraphModule(whole, graph)
