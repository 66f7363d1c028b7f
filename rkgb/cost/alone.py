"""One S node, run alone under autograd, between two small functions.

A tap before it collects the gradients of its inputs; a feed behind it makes the gradients of its results inside the
backward, so that autograd is their only owner, as in a whole step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rkgb.errors import BACKWARD_INSIDE, UnsupportedError
from rkgb.graphs import D_graph, S_node
from rkgb.program import run_node, same
from rkgb.trace.guards import GuardFailed, is_guard

_NOTHING = contextlib.nullcontext()

Layouts = tuple[tuple[int, ...] | None, ...]
"""The strides of some gradients; None: contiguous."""


class _Tap(torch.autograd.Function):
    """Identity; its backward hands the gradients over to ``collect`` and stops."""

    @staticmethod
    def forward(ctx: Any, collect: Callable[[Any], None], anchor: torch.Tensor, *xs: torch.Tensor) -> Any:
        ctx.collect = collect
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.collect(grads)
        return (None,) * (len(grads) + 2)


class _Feed(torch.autograd.Function):
    """Ends the graph; its backward makes one gradient for each result."""

    @staticmethod
    def forward(
        ctx: Any, note: Callable[[Any], None], layouts: Layouts, together: bool, *ys: torch.Tensor
    ) -> torch.Tensor:
        ctx.note, ctx.like = note, [(y.shape, x, y.dtype, y.device) for y, x in zip(ys, layouts, strict=True)]
        ctx.together = together
        return torch.empty((), device=ys[0].device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        grads = tuple(gradients_together(ctx.like) if ctx.together else (gradient(*form) for form in ctx.like))
        ctx.note(grads)
        return (None, None, None, *grads)


def gradients_together(
    forms: Sequence[tuple[torch.Size, tuple[int, ...] | None, torch.dtype, torch.device]],
) -> list[torch.Tensor]:
    """Gradients of one type that are views of one memory, as are the gradients of what ``cat`` reads."""
    like = [gradient(shape, stride, dtype, torch.device("meta")) for shape, stride, dtype, _ in forms]
    counts = [t.untyped_storage().nbytes() // t.element_size() for t in like]
    starts = itertools.accumulate(counts, initial=0)
    memory = torch.ones(sum(counts), dtype=like[0].dtype, device=forms[0][3])
    return [memory.as_strided(t.shape, t.stride(), start) for t, start in zip(like, starts, strict=False)]


def gradient(
    shape: torch.Size, stride: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A gradient of ones, contiguous or with the strides given."""
    if stride is None:
        return torch.ones(shape, dtype=dtype, device=device)
    dense = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    if 0 not in stride:
        return dense.fill_(1)
    return torch.ones(dense.untyped_storage().nbytes() // dtype.itemsize, dtype=dtype, device=device).as_strided(
        shape, stride
    )


class NodeRun:
    """One S node, ready to run alone on given values of what it reads.

    ``fed``: positions in ``makes`` whose gradients its backward gets, with the strides ``layouts``. ``given``: leaves
    that have a ``.grad`` already.
    """

    def __init__(
        self,
        d: D_graph,
        node: S_node,
        values: dict[int, torch.Tensor],
        fed: tuple[int, ...],
        layouts: Layouts,
        given: frozenset[int] = frozenset(),
    ) -> None:
        self.d, self.node, self.fed, self.layouts = d, node, fed, layouts
        self.ops = [d.nodes[op] for op in node.ops]
        self.inputs = [v for v in node.reads if not is_parameter(d, v)]
        self.tapped = [v for v in self.inputs if d.values[v].requires_grad]
        self.values = values
        self.leaves = {v: _leaf(values[v], v in given) for v in node.reads if is_parameter(d, v)}
        self.without_grad = [leaf for leaf in self.leaves.values() if leaf.grad is None]
        self.device = next((d.values[v].device for v in (*node.makes, *node.reads)), torch.device("cpu"))
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, collect: Callable[[Any], None] = lambda _: None) -> list[torch.Tensor]:
        """The results (``makes``) of one run under autograd."""
        self.drop_gradients()
        env = {v: self.values[v].detach() for v in self.inputs} | self.leaves
        if self.tapped:
            env |= zip(self.tapped, _Tap.apply(collect, self.anchor, *[env[v] for v in self.tapped]), strict=True)
        for op in self.ops:
            with contextlib.suppress(GuardFailed) if is_guard(op) else _NOTHING:  # a draw made again is another one
                env.update(zip(op.outputs, run_node(op, env.__getitem__), strict=True))
        return [env[v] for v in self.node.makes]

    def drop_gradients(self) -> None:
        """Leaves without a ``.grad`` are again without one."""
        for leaf in self.without_grad:
            leaf.grad = None

    def ends(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results whose gradients go in."""
        return [results[k] for k in self.fed]

    def gradients(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients for ``ends(results)``."""
        return [gradient(t.shape, x, t.dtype, t.device) for t, x in zip(self.ends(results), self.layouts, strict=True)]


@contextlib.contextmanager
def gradients_watched(model: torch.nn.Module, d: D_graph, node: S_node) -> Iterator[None]:
    """Raise ``UnsupportedError`` if the backward of ``node`` gives parameters of ``model`` gradients by itself."""
    functions = [d.nodes[op] for op in node.ops if not isinstance(d.nodes[op].op, torch._ops.OpOverload)]
    if not functions:
        yield
        return
    before = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    try:
        yield
    finally:
        changed = [p for p, g, copy in before if p.grad is not g or not (g is None or copy is None or same(g, copy))]
        for p, g, copy in before if changed else ():
            p.grad = g if g is None or copy is None else g.copy_(copy)
    if changed:
        raise UnsupportedError(BACKWARD_INSIDE.format(what=functions[0].name, line=functions[0].line))


def feed(
    note: Callable[[Any], None], run: NodeRun, results: list[torch.Tensor], *, together: bool = False
) -> torch.Tensor:
    """A tensor whose ``backward()`` gives every result that needs one its gradient; ``note`` is told of them.

    ``together``: as views of one memory.
    """
    end: torch.Tensor = _Feed.apply(note, run.layouts, together, *run.ends(results))
    return end


def is_parameter(d: D_graph, v: int) -> bool:
    """Sources that require grad end in autograd's accumulation into ``.grad``."""
    return v in d.sources and d.values[v].requires_grad


def _leaf(t: torch.Tensor, given: bool) -> torch.Tensor:
    """The same memory with a ``.grad`` of its own, present if ``given``."""
    leaf = t.detach().requires_grad_(t.requires_grad)
    if t.requires_grad and given:
        leaf.grad = torch.zeros_like(t)
    return leaf
