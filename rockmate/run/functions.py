"""Nodes as Python functions: straight-line source, so that running one costs little beside its operations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

from rkgb.graphs import Mode, Node, Ref, refs
from rkgb.program import in_mode
from rkgb.trace.preserved import drop_saved

Function = Callable[[dict[int, torch.Tensor]], None]
"""Takes what a node reads from values by their numbers, and puts what it makes there."""

Segments = Iterable[tuple[bool, Iterable[tuple[Sequence["Op"], Collection[int]]]]]
"""Consecutive nodes: whether autograd is to save nothing; of each the operations, and the values that go after it."""

Whole = Callable[[dict[int, torch.Tensor]], list[torch.Tensor]]
"""The outputs of a program, from the values of its sources."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. ``args``, ``kwargs``: as in the graph; ``mode``: None for the program's."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    several: bool
    mode: Mode | None


def op_of(node: Node, usual: Mode) -> Op:
    """The operation of a D node, in a program whose mode is ``usual``."""
    mode = None if node.mode == usual else node.mode
    function = getattr(node.op, "_op", node.op)  # of an operator what its call would call
    return Op(function, node.args, dict(node.kwargs), node.outputs, node.several, mode)


_DECIDED_BY_ARGUMENTS = frozenset(
    "linear matmul conv1d conv2d conv3d layer_norm group_norm softmax.int log_softmax.int square reshape "
    "flatten.using_ints view_as contiguous type_as to.dtype to.device to.dtype_layout chunk".split()
)
"""Operations made of others, of which these arguments alone decide which, and how they compute."""


def needs_no_recording(node: Node) -> bool:
    """Whether an operation computes the same where autograd does not record it, all its arguments being as they are.

    It does if it has a kernel of its own: autograd's part of it lies in front of the kernel. Others are made of several
    operations, some of which may look at whether what they get, which the first ones made, needs a gradient.
    """
    op = node.op
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = has(op.name(), "CompositeImplicitAutograd")
    return not composite or op.name().removeprefix("aten::") in _DECIDED_BY_ARGUMENTS


def functions_of(nodes: Iterable[tuple[Sequence[Op], Collection[int], bool]]) -> tuple[Function, ...]:
    """A function for the operations of each node, which runs in the program's mode, and puts these values into its
    argument; other results are its own. The third of each: whether autograd records the operations."""
    writer = _Writer()
    names = [writer.define(ops, wanted, recorded) for ops, wanted, recorded in nodes]
    made = writer.executed()
    return tuple(made[name] for name in names)


def whole_of(segments: Segments, outputs: Sequence[int]) -> Whole:
    """One function for all nodes, in the program's mode."""
    writer = _Writer()
    writer.define_whole(segments, outputs)
    whole: Whole = writer.executed()["whole"]
    return whole


@lru_cache(maxsize=64)
def _compiled(source: str) -> CodeType:
    """The code of ``source``, which is the same for a graph at other sizes."""
    return compile(source, "<nodes of a plan>", "exec")


class _Writer:
    """Writes functions. ``names``: what these refer to by name, numbers among it, since sizes change."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "in_mode": in_mode,
            "unrecorded": torch._C._AutoDispatchBelowAutograd,
            "unsaved": drop_saved,
        }
        self.own: set[int] = set()  # values that the function has made so far

    def executed(self) -> dict[str, Any]:
        """The functions that were written, by their names."""
        exec(_compiled("\n".join(self.lines)), self.names)
        return self.names

    def define(self, ops: Sequence[Op], wanted: Collection[int], recorded: bool) -> str:
        """Write one function; its name."""
        name = f"f{len(self.lines)}"
        self.own.clear()
        self.lines.append(f"def {name}(env):")
        if not recorded:
            self.lines.append(" with unrecorded():")
        for op in ops:
            self.run(op, "" if recorded else " ")
        self.lines += [f" env[{v}] = v{v}" for v in sorted(self.own.intersection(wanted))]
        self.lines.append(" return")
        return name

    def define_whole(self, segments: Segments, outputs: Sequence[int]) -> None:
        """Write one function for all nodes, ``whole``."""
        self.lines.append("def whole(env):")
        for unsaved, nodes in segments:
            if unsaved:
                self.lines.append(" with unsaved():")
            for ops, dead in nodes:
                for op in ops:
                    self.run(op, " " if unsaved else "")
                gone = sorted(self.own.intersection(dead))
                if gone:
                    self.lines.append(f"{' ' if unsaved else ''} del {', '.join(f'v{v}' for v in gone)}")
                    self.own.difference_update(gone)
        self.lines.append(f" return [{', '.join(self.spelled(Ref(v)) for v in outputs)}]")

    def run(self, op: Op, indent: str) -> None:
        """Write the line for one operation."""
        arguments = ", ".join(map(self.spelled, op.args))
        if op.kwargs:
            arguments += f", **{self.keywords(op.kwargs)}" if arguments else f"**{self.keywords(op.kwargs)}"
        call = f"{self.named(op.function)}({arguments})"
        results = "".join(f"v{v}, " for v in op.outputs) if op.several else "".join(f"v{v}" for v in op.outputs)
        mode = "" if op.mode is None else f"with in_mode({self.named(op.mode)}): "
        self.lines.append(f"{indent} {mode}{f'{results} = ' if results else ''}{call}")
        self.own.update(op.outputs)

    def keywords(self, kwargs: dict[str, Any]) -> str:
        """Keyword arguments as a dictionary, since operators have such that Python keeps for itself (``from``)."""
        if not refs(list(kwargs.values())):
            return self.named(kwargs)
        return f"{{{', '.join(f'{name!r}: {self.spelled(a)}' for name, a in kwargs.items())}}}"

    def spelled(self, a: Any) -> str:
        """An argument: a value, a list or tuple with some, or a constant."""
        if isinstance(a, Ref):
            return f"v{a.index}" if a.index in self.own else f"env[{a.index}]"
        if isinstance(a, (list, tuple)) and refs(a):
            inside = "".join(f"{self.spelled(x)}, " for x in a)
            return f"[{inside}]" if isinstance(a, list) else f"({inside})"
        return repr(a) if a is None or type(a) is bool else self.named(a)

    def named(self, thing: Any) -> str:
        """A name for anything."""
        name = f"c{len(self.names)}"
        self.names[name] = thing
        return name
