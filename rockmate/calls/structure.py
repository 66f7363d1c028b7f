"""What the operations of a captured program write, and what of it nothing reads."""

from __future__ import annotations

from torch import fx
from torch._ops import HigherOrderOperator

from rkgb.storages import has_memory, storage_key
from rkgb.trees import tensors_in
from rockmate.calls.captured import name_of

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
