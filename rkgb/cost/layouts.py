"""How gradients lie in memory when they reach a backward, which decides what it copies.

Followed through the backwards in their order. Strides do not depend on values: each distinct node runs once on zeros.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from rkgb.cost.alone import NodeRun, gradients_watched, is_parameter
from rkgb.cost.gradients import Layouts, feed, ignore
from rkgb.graphs import S_graph, S_node, Value
from rkgb.program import source_values
from rkgb.trace.capture import preserved

Outgoing = dict[int, tuple[int, ...] | None]
"""Position in ``reads`` -> strides of its gradient (None: contiguous); absent where there is none."""


def differentiated(s: S_graph, roots: Sequence[int]) -> list[tuple[int, ...]]:
    """For each node the positions in ``makes`` that receive a gradient when the values ``roots`` do."""
    wanted = set(roots)
    found: list[tuple[int, ...]] = []
    for node in reversed(s.nodes):
        results = tuple(k for k, v in enumerate(node.makes) if v in wanted and s.d.values[v].requires_grad)
        found.append(results)
        if results:
            wanted.update(v for v in node.reads if s.d.values[v].requires_grad)
    return found[::-1]


def gradient_layouts(
    s: S_graph,
    model: torch.nn.Module,
    inputs: list[torch.Tensor],
    fed: list[tuple[int, ...]],
    keys: list[Hashable],
    given: Mapping[int, tuple[int, ...] | None],
    known: dict[Hashable, Outgoing],
) -> list[Layouts]:
    """For each node the strides of the gradients that its backward gets, one for each position in ``fed``.

    ``keys``: equal for equal nodes. ``given``: strides of the gradients of roots, None for contiguous. ``known``: what
    nodes make of the strides that they get, which is added to.
    """
    strides = dict(given)
    found: list[Layouts] = []
    with preserved(model, [], s.d.structure.written), torch.enable_grad():
        for node, results, same in zip(reversed(s.nodes), reversed(fed), reversed(keys), strict=True):
            found.append(tuple(strides.pop(node.makes[k], None) for k in results))
            if not results:
                continue
            key = (same, results, found[-1])
            if key not in known:
                with gradients_watched(model, s.d, node):
                    known[key] = _outgoing(s, node, model, inputs, results, found[-1])
            for position, stride in known[key].items():
                v = node.reads[position]
                strides[v] = _of_sum(s.d.values[v].shape, strides[v], stride) if v in strides else stride
    return found[::-1]


def _outgoing(
    s: S_graph, node: S_node, model: torch.nn.Module, inputs: list[torch.Tensor], fed: tuple[int, ...], layouts: Layouts
) -> Outgoing:
    """The strides of the gradients that the node's backward gives to what it reads."""
    own = {v: s.d.sources[v] for v in node.reads if is_parameter(s.d, v) or not _is_strided(s.d.values[v])}
    given = source_values(own, model, inputs)
    values = {
        v: given[v] if v in given else torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=x.device).zero_()
        for v in node.reads
        for x in [s.d.values[v]]
    }
    came: list[tuple[torch.Tensor | None, ...]] = []
    run = NodeRun(s.d, node, values, fed, layouts)
    try:
        feed(ignore, run, run.forward(came.append)).backward()
    except Exception:  # noqa: BLE001 - an operation may refuse zeros: take its gradients for contiguous
        return {node.reads.index(v): None for v in run.tapped}
    gradients = zip(run.tapped, came[0] if came else (), strict=False)
    return {node.reads.index(v): unless_contiguous(g) for v, g in gradients if g is not None}


def _is_strided(value: Value) -> bool:
    """Sparse inputs have no strides; they stand for themselves."""
    return len(value.stride) == len(value.shape)


def _of_sum(shape: tuple[int, ...], a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The strides of the sum of two gradients."""
    if a == b and (a is None or 0 not in a):
        return a
    x, y = (
        torch.empty(shape, device="meta") if t is None else torch.empty_strided(shape, t, device="meta") for t in (a, b)
    )
    return unless_contiguous(x + y)


def unless_contiguous(t: torch.Tensor) -> tuple[int, ...] | None:
    """Its strides, or None."""
    return None if t.is_contiguous() else tuple(t.stride())
