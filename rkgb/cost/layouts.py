"""The strides of the gradients that each backward gets; they decide which of them it copies.

Strides are followed from the outputs through all backwards. They do not depend on values, so each distinct node runs
once, on zeros.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from rkgb.cost.alone import NodeRun, gradients_watched, is_parameter
from rkgb.cost.piece import Layouts, feed, ignore
from rkgb.graphs import S_graph, S_node, Value
from rkgb.program import source_values
from rkgb.trace.capture import preserved

Outgoing = dict[int, tuple[int, ...] | None]
"""Position in ``reads`` -> strides of its gradient (None: contiguous). Inputs without a gradient are absent."""


def differentiated(s: S_graph, roots: Sequence[int]) -> list[tuple[int, ...]]:
    """For each node, the positions in ``makes`` of the results that get gradients if the values ``roots`` do."""
    wanted = set(roots)
    of_nodes: list[tuple[int, ...]] = []
    for node in reversed(s.nodes):
        results = tuple(k for k, v in enumerate(node.makes) if v in wanted and s.d.values[v].requires_grad)
        of_nodes.append(results)
        if results:
            wanted.update(v for v in node.reads if s.d.values[v].requires_grad)
    return of_nodes[::-1]


def gradient_layouts(
    s: S_graph,
    model: torch.nn.Module,
    inputs: list[torch.Tensor],
    fed: list[tuple[int, ...]],
    keys: list[Hashable],
    roots: Mapping[int, tuple[int, ...] | None],
    known: dict[Hashable, Outgoing],
) -> list[Layouts]:
    """For each node, the strides of the gradients that its backward gets, one for each position in ``fed``.

    ``keys``: equal for equal nodes. ``roots``: strides of the gradients of the outputs, None for contiguous. ``known``:
    for nodes and incoming strides, the strides of the gradients that they compute; new ones are added.
    """
    strides = dict(roots)
    layouts: list[Layouts] = []
    with preserved(model, [], s.d.structure.written), torch.enable_grad():
        for node, results, same in zip(reversed(s.nodes), reversed(fed), reversed(keys), strict=True):
            layouts.append(tuple(strides.pop(node.makes[k], None) for k in results))
            if not results:
                continue
            key = (same, results, layouts[-1])
            if key not in known:
                with gradients_watched(model, s.d, node):
                    known[key] = _outgoing(s, node, model, inputs, results, layouts[-1])
            for position, stride in known[key].items():
                v = node.reads[position]
                strides[v] = _of_sum(s.d.values[v].shape, strides[v], stride) if v in strides else stride
    return layouts[::-1]


def _outgoing(
    s: S_graph, node: S_node, model: torch.nn.Module, inputs: list[torch.Tensor], fed: tuple[int, ...], layouts: Layouts
) -> Outgoing:
    """The strides of the gradients that the node's backward computes for its inputs."""
    own = {v: s.d.sources[v] for v in node.reads if is_parameter(s.d, v) or not _is_strided(s.d.values[v])}
    sources = source_values(own, model, inputs)
    values = {
        v: sources[v]
        if v in sources
        else torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=x.device).zero_()
        for v in node.reads
        for x in [s.d.values[v]]
    }
    came: list[tuple[torch.Tensor | None, ...]] = []
    run = NodeRun(s.d, node, values, fed, layouts)
    try:
        feed(ignore, run, run.forward(came.append)).backward()
    except Exception:  # noqa: BLE001 - an operation may refuse zeros: its gradients are taken to be contiguous
        return {node.reads.index(v): None for v in run.tapped}
    gradients = zip(run.tapped, came[0] if came else (), strict=False)
    return {node.reads.index(v): unless_contiguous(g) for v, g in gradients if g is not None}


def _is_strided(value: Value) -> bool:
    """Whether the value has strides. A sparse input has none, and is used itself instead of zeros."""
    return len(value.stride) == len(value.shape)


def _of_sum(shape: tuple[int, ...], a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The strides of the sum of two gradients of strides ``a`` and ``b``."""
    if a == b and (a is None or 0 not in a):
        return a
    x, y = (
        torch.empty(shape, device="meta") if t is None else torch.empty_strided(shape, t, device="meta") for t in (a, b)
    )
    return unless_contiguous(x + y)


def unless_contiguous(t: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of ``t``, or None if it is contiguous."""
    return None if t.is_contiguous() else tuple(t.stride())
