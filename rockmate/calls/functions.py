"""An ``autograd.Function`` as TorchDynamo captured it: two programs, and what tells it from others."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from rkgb.probe.skeleton import content
from rockmate.calls.numbers import found_in, is_number, without_rates

_OF_TORCH = re.compile(r"(torch|_operator|builtins)\.")


class Function(torch.nn.Module):
    """An ``autograd.Function`` whose two parts were captured; what its forward keeps is saved by autograd."""

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, marks: dict[str, Any]) -> None:
        super().__init__()
        *self.parts, self.given = _without_unread_numbers(forward, backward)
        self.dirty = frozenset(marks.get("dirty_idx") or ())
        self.without_gradient = frozenset(marks.get("non_differentiable_idx") or ())

    def __repr__(self) -> str:
        """Nodes that call functions count as equal where these print alike: but for numbers that tensors are multiplied
        by, or the like, which change no memory and no time.
        """
        return self._text

    @cached_property
    def _text(self) -> str:
        parts = [(without_rates(part), _read_within(part)) for part in self.parts]
        marks = sorted(self.dirty), sorted(self.without_gradient)
        return f"Function({hashlib.sha256(repr((parts, marks)).encode()).hexdigest()[:16]})"

    @cached_property
    def of_torch(self) -> bool:
        """Whether the version of torch, and how it prints, say what it does."""
        called = [n for part in self.parts for n in part.graph.nodes]
        if any(n.op in ("get_attr", "call_module") for n in called):
            return False
        return all(_OF_TORCH.match(found_in(n.target)) for n in called if n.op == "call_function")

    def forward(self, *arguments: Any) -> Any:
        return _Applied.apply(self, *(arguments[k] for k in self.given))


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Function, *arguments: Any) -> Any:
        output, kept = function.parts[0].forward(*arguments)  # no hooks of modules, as of FlopCounterMode
        several = output if isinstance(output, (tuple, list)) else (output,)
        if function.dirty:
            ctx.mark_dirty(*(several[k] for k in function.dirty))
        if function.without_gradient:
            ctx.mark_non_differentiable(*(several[k] for k in function.without_gradient))
        ctx.function = function
        ctx.others = [None if isinstance(x, torch.Tensor) else x for x in kept]
        ctx.places = [k for k, x in enumerate(kept) if isinstance(x, torch.Tensor)]
        ctx.save_for_backward(*(kept[k] for k in ctx.places))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        kept = list(ctx.others)
        for k, t in zip(ctx.places, ctx.saved_tensors, strict=True):
            kept[k] = t
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # it ends with gradients on: sums would take new memory
            found = ctx.function.parts[1].forward(*gradients, *kept)
        return (None, *(found if isinstance(found, (tuple, list)) else (found,)))


def _without_unread_numbers(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[Any, ...]:
    """Both parts of a function without the sizes that they are given and do not compute with, so that captures of one
    size and of all sizes are alike; and the positions of the arguments that are left.
    """
    first, second = (fx.GraphModule(part, copied(part.graph)) for part in (forward, backward))
    for part in (first, second):
        _erase_unread(part, [n for n in part.graph.nodes if n.op.startswith("call")])
    end, inputs = first.graph.output_node(), second.graph.find_nodes(op="placeholder")
    ends: Any = end.args[0]
    results, kept = ends
    saved = inputs[len(inputs) - len(kept) :]
    erased = _erase_unread(second, saved)
    end.args = ((results, tuple(x for x, p in zip(kept, saved, strict=True) if p not in erased)),)
    _erase_unread(first, [n for n in first.graph.nodes if n.op.startswith("call")])
    arguments, end = first.graph.find_nodes(op="placeholder"), second.graph.output_node()
    erased = _erase_unread(first, arguments)
    left = [k for k, p in enumerate(arguments) if p not in erased]
    if erased:
        end.args = (tuple(end.args[0][k] for k in left),)  # type: ignore[index]
    for part in (first, second):
        part.recompile()
    return first, second, left


def copied(graph: fx.Graph) -> fx.Graph:
    """The same graph, to be changed."""
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def _erase_unread(part: fx.GraphModule, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Take the numbers and sizes among ``nodes`` that nothing reads out of ``part``; those that were."""
    erased = set()
    for node in reversed(nodes):
        if not node.users and (is_number(node) or isinstance(node.meta.get("example_value"), torch.Size)):
            part.graph.erase_node(node)
            erased.add(node)
    return erased


def _read_within(program: fx.GraphModule) -> tuple[Hashable, ...]:
    """What a program reads that is no input."""
    read = [attrgetter(str(n.target))(program) for n in program.graph.find_nodes(op="get_attr")]
    return tuple((x.code, _read_within(x)) if isinstance(x, fx.GraphModule) else content(x) for x in read)
