"""The strides of the gradients that each backward gets; they decide which of them it copies.

Strides are followed from the outputs through all backwards. They do not depend on values, so each distinct node runs
once, on zeros. They seldom depend on the device, so a large node runs on the meta device, which computes nothing. Its
measurement then shows the strides that it really gives (``rkgb/cost/measure.py``), and where they differ, all is
followed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence

import torch

from rkgb.cost.alone import NodeRun, gradients_watched, is_parameter
from rkgb.cost.memory import refuse_within_measurements
from rkgb.cost.piece import Gradients, Layouts, feed, ignore
from rkgb.graphs import S_graph, S_node, Value
from rkgb.probe.numbers import strides_as
from rkgb.program import source_values
from rkgb.trace.capture import preserved

_LARGE = 2**24  # bytes

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
    with preserved(model, inputs, s.d.structure.written), torch.enable_grad():
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


def layouts_at_other_sizes(
    old: S_graph, new: S_graph, fed: list[tuple[int, ...]], layouts: list[Layouts]
) -> list[Layouts] | None:
    """``layouts`` of the gradients of ``old`` for ``new``, which has the same skeleton: dimensions keep their order.

    None if that does not say all, as a gradient has gaps, or repeats numbers.
    """
    found: list[Layouts] = []
    for node, results, strides in zip(old.nodes, fed, layouts, strict=True):
        of_node: list[tuple[int, ...] | None] = []
        for k, stride in zip(results, strides, strict=True):
            shapes = (graph.d.values[node.makes[k]].shape for graph in (old, new))
            now = None if stride is None else strides_as(next(shapes), stride, next(shapes))
            if stride is not None and now is None:
                return None
            of_node.append(None if now is None else tuple(now))
        found.append(tuple(of_node))
    return found


def _outgoing(
    s: S_graph, node: S_node, model: torch.nn.Module, inputs: list[torch.Tensor], fed: tuple[int, ...], layouts: Layouts
) -> Outgoing:
    """The strides of the gradients that the node's backward computes for its inputs."""
    strided = {v: x for v in node.reads if _is_strided(x := s.d.values[v])}
    if _is_large(s, node) and strided.keys() == set(node.reads):
        empty = {v: torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta") for v, x in strided.items()}
        with contextlib.suppress(Exception):  # what operations say of the meta device
            return _of_run(NodeRun(s.d, node, empty, fed, layouts))
    refuse_within_measurements()
    own = {v: s.d.sources[v] for v in node.reads if is_parameter(s.d, v) or v not in strided}
    values = source_values(own, model, inputs)
    for v in node.reads:
        if v not in values:
            x = s.d.values[v]
            values[v] = torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=x.device).zero_()
    run = NodeRun(s.d, node, values, fed, layouts)
    try:
        return _of_run(run)
    except Exception:  # noqa: BLE001 - an operation may refuse zeros: its gradients are taken to be contiguous
        return {node.reads.index(v): None for v in run.tapped}


def _is_large(s: S_graph, node: S_node) -> bool:
    """Whether a run on the meta device, where many operations are Python, is sure to take less time."""
    touched = sum(s.d.values[v].bytes for v in (*node.reads, *node.makes))
    return touched >= _LARGE and all(isinstance(s.d.nodes[k].op, torch._ops.OpOverload) for k in node.ops)


def _of_run(run: NodeRun) -> Outgoing:
    came: list[Gradients] = []
    feed(ignore, run, run.forward(came.append)).backward()
    return outgoing(run, came[0] if came else ())


def outgoing(run: NodeRun, gradients: Gradients) -> Outgoing:
    """The strides of the ``gradients`` of what ``run`` taps; none came where these are no inputs that require grad."""
    reads = run.node.reads
    came = zip(run.tapped, gradients, strict=False)
    return {reads.index(v): unless_contiguous(g) for v, g in came if g is not None}


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
