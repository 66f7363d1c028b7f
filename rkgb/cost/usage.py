"""What the caller does with a module's outputs: assumed before the first step, and observed in it.

It decides which gradients come from outside, and how long outputs stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rkgb.cost.layouts import unless_contiguous
from rkgb.graphs import D_graph, Value

Expanded = tuple[int, ...]
"""The dimensions in which a gradient that is a view is expanded, as by a sum."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the caller does with the outputs. An output is named by its first position in ``D_graph.outputs``.

    ``roots``: outputs that the backward starts from; their gradients come from outside. ``held``: outputs that the
    caller holds until the backward ends; all others are released before the backward starts. ``attached``: held outputs
    whose autograd graph the caller holds, too.
    ``turned``: roots whose gradients are not contiguous, as those of a loss on a transposed view. None: not known yet;
    a plan must then suffice for both layouts. ``viewed``: roots whose gradients are views, as those of a loss on a
    view: autograd adds nothing to these in place.
    """

    roots: tuple[int, ...]
    held: frozenset[int]
    attached: frozenset[int]
    turned: frozenset[int] | None = None
    viewed: frozenset[tuple[int, Expanded]] = frozenset()

    def root_values(self, d: D_graph) -> tuple[int, ...]:
        """The values that are roots."""
        return tuple(d.outputs[k] for k in self.roots)

    def held_storages(self, d: D_graph) -> frozenset[int]:
        """The storages that the caller holds."""
        return frozenset(d.values[d.outputs[k]].storage for k in self.held)


def first_places(d: D_graph) -> dict[int, int]:
    """Value -> its first position among the outputs."""
    return {v: k for k, v in reversed(list(enumerate(d.outputs)))}


def assigned(d: D_graph) -> frozenset[int]:
    """Positions after the module's own outputs: buffers that forward assigns. The module holds these."""
    return frozenset(range(len(d.outputs) - len(d.structure.assigned), len(d.outputs)))


def differentiable(d: D_graph) -> tuple[int, ...]:
    """Positions of outputs that require grad, each value once."""
    return tuple(sorted(k for v, k in first_places(d).items() if d.values[v].requires_grad))


def trainable(d: D_graph) -> tuple[int, ...]:
    """Those of ``differentiable`` from which a backward can run."""
    return tuple(k for k in differentiable(d) if d.outputs[k] not in d.spoilt)


def upstream(d: D_graph, ends: set[int]) -> set[int]:
    """The values that require grad and from which ``ends`` are computed."""
    values: set[int] = set()
    wanted = set(ends)
    for node in reversed(d.nodes):
        if not wanted.isdisjoint(node.outputs):
            read = {v for v in node.reads() if d.values[v].requires_grad}
            values |= read
            wanted |= read
    return values


def supposed(d: D_graph) -> Usage:
    """The usage that a plan assumes before the first step.

    A scalar among the outputs is taken to be the loss; outputs that it is computed from get no gradient from outside.
    All other outputs that require grad get one. The caller holds the outputs that get a gradient. It, or the module,
    may hold those that do not require grad: a captured graph returns what forward assigns to attributes, such as a
    table that is made once.
    """
    carried = trainable(d)
    scalars = {d.outputs[k] for k in carried if not d.values[d.outputs[k]].shape}
    inner = upstream(d, scalars) - scalars
    roots = tuple(k for k in carried if d.outputs[k] not in inner)
    constant = (k for v, k in first_places(d).items() if not d.values[v].requires_grad)
    return Usage(roots, assigned(d).union(roots, constant), frozenset(roots))


def all_used(d: D_graph) -> Usage:
    """The usage in which every output that can get a gradient gets one, and all are held until the backward ends."""
    every = trainable(d)
    return Usage(every, frozenset(range(len(d.outputs))), frozenset(every), frozenset())


def turned_strides(value: Value) -> tuple[int, ...] | None:
    """The strides of the gradient of ``value`` if the loss reads a view whose second dimension comes last.

    Such views are ``y.transpose(1, 2)``, ``y.permute(0, 2, 3, 1)``, and ``y.t()`` of a matrix. None if these strides
    are contiguous, too. One layout stands for all that are not contiguous: an operation that needs a contiguous
    gradient copies any of them.
    """
    shape = value.shape
    if len(shape) < 2:
        return None
    second = min(1, len(shape) - 2)
    last = torch.empty((*shape[:second], *shape[second + 1 :], shape[second]), device="meta")
    return unless_contiguous(last.movedim(-1, second))
