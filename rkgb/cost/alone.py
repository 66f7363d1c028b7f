"""One S node, run alone under autograd on given values (``Piece`` in ``rkgb/cost/piece.py``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from rkgb.cost.piece import Gradients, Layouts, Tap, ignore
from rkgb.errors import BACKWARD_INSIDE, UnsupportedError
from rkgb.graphs import D_graph, S_graph, S_node, Value
from rkgb.program import run_node, same, source_values
from rkgb.trace.guards import GuardFailed, is_guard

_NOTHING = contextlib.nullcontext()


class NodeRun:
    """One S node, ready to run alone on ``values`` of what it reads.

    ``fed``: positions in ``makes`` of the results that get gradients; ``layouts``: the strides of these gradients.
    ``with_grad``: parameters that have a ``.grad`` already. ``guarded``: whether a guard that fails is an error; after
    random numbers were drawn again it may fail.
    """

    def __init__(
        self,
        d: D_graph,
        node: S_node,
        values: dict[int, torch.Tensor],
        fed: tuple[int, ...],
        layouts: Layouts,
        with_grad: frozenset[int] = frozenset(),
        guarded: bool = True,
    ) -> None:
        self.d, self.node, self.fed, self.layouts, self.guarded = d, node, fed, layouts, guarded
        self.ops = [d.nodes[op] for op in node.ops]
        self.inputs = [v for v in node.reads if not is_parameter(d, v)]
        self.tapped = [v for v in self.inputs if d.values[v].requires_grad]
        self.values = values
        parameters = {v: values[v] for v in node.reads if is_parameter(d, v)}
        self.leaves = {v: t.detach().requires_grad_(t.requires_grad) for v, t in parameters.items()}
        for leaf in (leaf for v, leaf in self.leaves.items() if v in with_grad and leaf.requires_grad):
            leaf.grad = torch.zeros_like(leaf)
        self.without_grad = [leaf for leaf in self.leaves.values() if leaf.grad is None]
        self.device = next((d.values[v].device for v in (*node.makes, *node.reads)), torch.device("cpu"))
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, collect: Callable[[Gradients], None] = ignore) -> list[torch.Tensor]:
        """The results (``makes``) of one run, with history. ``collect`` gets the gradients of the inputs."""
        self.drop_gradients()
        env = {v: self.values[v].detach() for v in self.inputs} | self.leaves
        if self.tapped:
            env |= zip(self.tapped, Tap.apply(collect, self.anchor, *[env[v] for v in self.tapped]), strict=True)
        for op in self.ops:
            with _NOTHING if self.guarded or not is_guard(op) else contextlib.suppress(GuardFailed):
                env.update(zip(op.outputs, run_node(op, env.__getitem__), strict=True))
        return [env[v] for v in self.node.makes]

    def drop_gradients(self) -> None:
        """Remove the ``.grad`` of the parameters that had none at first."""
        for leaf in self.without_grad:
            leaf.grad = None

    def ends(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        return [results[k] for k in self.fed]


@contextlib.contextmanager
def gradients_watched(model: torch.nn.Module, d: D_graph, node: S_node) -> Iterator[None]:
    """Raise ``UnsupportedError`` if a backward within the body changes the ``.grad`` of parameters of ``model``.

    Only an ``autograd.Function`` that calls backward inside its own can do so. The gradients are put back.
    """
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


def is_parameter(d: D_graph, v: int) -> bool:
    """Whether ``v`` is a source that requires grad: autograd accumulates its gradient into ``.grad``."""
    return v in d.sources and d.values[v].requires_grad


def has_strides(value: Value) -> bool:
    """Whether the value has strides. A sparse input has none."""
    return len(value.stride) == len(value.shape)


def on_zeros(s: S_graph, node: S_node, model: torch.nn.Module, inputs: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Inputs for a run of the node alone: parameters and sparse inputs themselves, and zeros in place of all others."""
    forms = {v: s.d.values[v] for v in node.reads}
    own = {v: s.d.sources[v] for v, x in forms.items() if is_parameter(s.d, v) or not has_strides(x)}
    values = source_values(own, model, inputs)
    for v, x in forms.items():
        if v not in own:
            values[v] = torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=x.device).zero_()
    return values
