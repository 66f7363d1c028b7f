"""Whether a captured program may change what it is given."""

from __future__ import annotations

from torch import fx

_IN_PLACE = frozenset("iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul".split())


def may_write(program: fx.GraphModule) -> bool:
    """Whether the program may change what it is given in place."""
    return any(map(_may_write, program.graph.nodes))


def _may_write(node: fx.Node) -> bool:
    if not node.op.startswith("call"):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    in_place = name.endswith("_") and not name.endswith("__")
    assigns = node.op == "call_function" and (name in _IN_PLACE or name == "setitem")
    return in_place or assigns or node.op == "call_module" or bool({"out", "inplace"} & node.kwargs.keys())
