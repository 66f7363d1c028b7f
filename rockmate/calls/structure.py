"""What a captured program does, its sizes left out.

TorchDynamo captures a model again for other sizes, and for other attributes. Only in the first case is it the same
program, and what was learned of one serves the other. Values do not tell the cases apart: a part under ``no_grad``, or
another parameter with the same values, changes gradients only.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from rkgb.probe.skeleton import content
from rkgb.storages import has_memory, storage_key
from rkgb.trees import tensors_in
from rockmate.calls.captured import Checkpointed, Function, captured_sources, program_identity
from rockmate.calls.numbers import is_number
from rockmate.pieces.piece import Piece

_ARITHMETIC = frozenset(
    "add iadd radd sub isub rsub mul imul rmul multiply subtract div idiv divide true_divide truediv itruediv pow "
    "ipow add_ sub_ mul_ div_ pow_ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ "
    "__pow__".split()
)
"""Where a whole number is a factor or the like, and no size. TorchDynamo makes an input of one that changes."""

_IN_PLACE = frozenset("iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul".split())

_SIZES = frozenset(["size", "stride", "dim", "numel", "storage_offset", "sym_size", "sym_stride", "sym_numel"])


def structure_of(program: fx.GraphModule) -> Hashable:
    """A key that is equal for programs that differ in sizes only. Whole numbers count as sizes, but in arithmetic.

    ``program``: without wrappers (see ``rockmate.calls.captured``).
    """
    return tuple(_lines(program))


def may_write(program: fx.GraphModule) -> bool:
    """Whether the program may change what it is given in place."""
    return any(map(writes, program.graph.nodes))


def writes(node: fx.Node) -> bool:
    """Whether an operation may change what it is given in place."""
    if not node.op.startswith("call"):
        return False
    name = str(getattr(node.target, "__name__", node.target))
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
    called = (n for n in program.graph.nodes if _calls_function(program, n))
    return frozenset(i.name for n in called for i in n.all_input_nodes if i.op == "placeholder")


def _calls_function(program: fx.GraphModule, node: fx.Node) -> bool:
    if node.op != "call_module":
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    called = program.get_submodule(str(node.target))
    if isinstance(called, Checkpointed):
        return any(_calls_function(called.body, n) for n in called.body.graph.nodes)
    return True


def _lines(program: fx.GraphModule) -> Iterator[Hashable]:
    numbers: dict[fx.Node, int] = {}  # of the nodes that are no sizes
    sources = iter(captured_sources(program))
    for node in program.graph.nodes:
        source = next(sources) if node.op == "placeholder" else ""
        if _is_size(node, numbers):
            continue
        numbers[node] = len(numbers)
        if node.op == "placeholder":
            yield source
        elif node.op == "get_attr":
            yield _constant(attrgetter(str(node.target))(program))
        else:
            target = str(node.target)
            what = _constant(program.get_submodule(target)) if node.op == "call_module" else target
            sized = getattr(node.target, "__name__", target) not in _ARITHMETIC
            keywords = tuple((k, _argument(a, numbers, sized)) for k, a in sorted(node.kwargs.items()))
            yield node.op, what, _argument(node.args, numbers, sized), keywords


def _is_size(node: fx.Node, others: Container[fx.Node]) -> bool:
    """Whether a node is a number, and not one that is read from a tensor's values. ``others``: nodes that are not."""
    if not is_number(node):
        return False
    named = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    return named in _SIZES or not any(n in others for n in node.all_input_nodes)


def _argument(a: Any, numbers: dict[fx.Node, int], sized: bool) -> Hashable:
    if isinstance(a, fx.Node):
        return f"%{numbers[a]}" if a in numbers else "size"
    if isinstance(a, (list, tuple)):
        return tuple(_argument(x, numbers, sized) for x in a)
    if isinstance(a, dict):
        return tuple((str(k), _argument(x, numbers, sized)) for k, x in a.items())
    if isinstance(a, slice):
        return "slice", *(_argument(x, numbers, sized) for x in (a.start, a.stop, a.step))
    return "size" if sized and type(a) is int else repr(a)


def _constant(x: Any) -> Hashable:
    """What a node reads that is no input: a tensor, by its values if they are few; a program; another module."""
    if isinstance(x, fx.GraphModule):
        return program_identity(x)
    if isinstance(x, torch.Tensor):
        return content(x)
    if isinstance(x, Checkpointed):
        return structure_of(x.body)
    if isinstance(x, (Function, Piece)):
        return x.identity
    return id(x)
