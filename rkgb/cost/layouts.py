"""The strides of the gradients that each backward gets; they decide which of them it copies.

Strides are followed from the outputs through all backwards. They do not depend on values, so each distinct node runs
once, on zeros. They seldom depend on the device, so a large node runs on the meta device, which computes nothing. Its
measurement then shows the strides that it really gives (``rkgb/cost/measure.py``), and where they differ, all is
followed again.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rkgb.cost.alone import NodeRun, gradients_watched, has_strides, on_zeros
from rkgb.cost.memory import refuse_within_measurements
from rkgb.cost.piece import Gradients, Layouts, feed
from rkgb.graphs import S_graph, S_node
from rkgb.storages import storage_key
from rkgb.trace.preserved import preserved

_LARGE = 2**24  # bytes


@dataclass(frozen=True, slots=True)
class Passed:
    """A gradient that a backward computes. ``strides``: None for those of a new tensor. ``is_view``, ``shares``: see
    ``Cost.views`` and ``InputGradient.shares``.
    """

    strides: tuple[int, ...] | None
    is_view: bool
    shares: tuple[str, int] | None


Outgoing = dict[int, Passed]
"""By the position in ``reads``. Inputs without a gradient are absent."""


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
    gradients = _Waiting(s, roots)
    layouts: list[Layouts] = []
    # Copies of inputs would be memory of the step that is planned again in its end.
    writes = any(s.d.storages[x].owner is None for facts in s.d.facts for x in facts.writes)
    with preserved(model, inputs if writes else [], s.d.structure.written), torch.enable_grad():
        for node, results, same in zip(reversed(s.nodes), reversed(fed), reversed(keys), strict=True):
            came = [gradients.taken(node.makes[k]) for k in results]
            layouts.append(tuple(strides for strides, _ in came))
            if not results:
                continue
            key = (same, results, layouts[-1])
            if key not in known:
                with gradients_watched(model, s.d, node):
                    known[key] = _outgoing(s, node, model, inputs, results, layouts[-1])
            gradients.arrive(node, known[key], [memory for _, memory in came])
    return layouts[::-1]


class _Waiting:
    """The gradients of values whose backward has not come yet: their strides, and the memory that they lie in."""

    def __init__(self, s: S_graph, roots: Mapping[int, tuple[int, ...] | None]) -> None:
        self.s, self.strides = s, dict(roots)
        self.memory: dict[int, object] = {v: object() for v in roots}
        self.views: set[int] = set()

    def taken(self, v: int) -> tuple[tuple[int, ...] | None, object]:
        """The gradient of ``v`` is handed to its backward."""
        self.views.discard(v)
        return self.strides.pop(v, None), self.memory.pop(v, object())

    def arrive(self, node: S_node, passed: Outgoing, came: list[object]) -> None:
        """Gradients that a backward has computed arrive, in order; those that it got lie in the memory ``came``."""
        memory: dict[int, object] = {}
        for k, gradient in passed.items():
            kind, place = gradient.shares or ("", 0)
            memory[k] = came[place] if kind == "result" else memory[place] if kind == "input" else object()
        for k, gradient in passed.items():
            v, mine = node.reads[k], memory.pop(k)
            if v not in self.strides:
                self.strides[v], self.memory[v] = gradient.strides, mine
                self.views.update([v] if gradient.is_view else ())
            elif not self._is_added_to(v, [mine, *memory.values()]):
                self.strides[v] = _of_sum(self.s.d.values[v].shape, self.strides[v], gradient.strides)
                self.memory[v] = object()
                self.views.discard(v)

    def _is_added_to(self, v: int, others: list[object]) -> bool:
        """Whether the gradient of ``v`` stays where it is, and another is added to it: see ``GradientBuffers``."""
        holders = [*self.memory.values(), *others].count(self.memory[v])
        return v not in self.views and holders == 1 and is_dense(self.s.d.values[v].shape, self.strides[v])


def layouts_at_other_sizes(
    old: S_graph, new: S_graph, fed: list[tuple[int, ...]], layouts: list[Layouts]
) -> list[Layouts] | None:
    """``layouts`` of the gradients of ``old`` for ``new``, which has the same skeleton: dimensions keep their order.

    None if that does not say all, as a gradient has gaps, or repeats numbers, or had a dimension of size 1.
    """
    found: list[Layouts] = []
    for node, results, strides in zip(old.nodes, fed, layouts, strict=True):
        of_node: list[tuple[int, ...] | None] = []
        for k, stride in zip(results, strides, strict=True):
            then, now = (graph.d.values[node.makes[k]].shape for graph in (old, new))
            grown = any(a == 1 != b for a, b in zip(then, now, strict=True))
            here = None if stride is None or grown else _strides_as(then, stride, now)
            if here is None and stride is not None:
                return None
            of_node.append(here)
        found.append(tuple(of_node))
    return found


def _strides_as(sizes: Sequence[int], strides: Sequence[int], now: Sequence[int]) -> tuple[int, ...] | None:
    """Strides without gaps for sizes ``now``, in the order of dimensions that ``strides`` have for ``sizes``.

    None if ``strides`` have gaps.
    """
    order = sorted(range(len(sizes)), key=lambda k: (strides[k], sizes[k]))
    before, after, result = 1, 1, [0] * len(sizes)
    for k in order:
        if strides[k] != before:
            return None
        result[k] = after
        before, after = before * sizes[k], after * now[k]
    return tuple(result)


def _outgoing(
    s: S_graph, node: S_node, model: torch.nn.Module, inputs: list[torch.Tensor], fed: tuple[int, ...], layouts: Layouts
) -> Outgoing:
    """The strides of the gradients that the node's backward computes for its inputs."""
    forms = {v: s.d.values[v] for v in node.reads}
    if _is_large(s, node) and all(map(has_strides, forms.values())):
        empty = {v: torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta") for v, x in forms.items()}
        with contextlib.suppress(Exception):  # what operations say of the meta device
            return _of_run(NodeRun(s.d, node, empty, fed, layouts))
    refuse_within_measurements()
    run = NodeRun(s.d, node, on_zeros(s, node, model, inputs), fed, layouts)
    try:
        return _of_run(run)
    except Exception:  # noqa: BLE001 - an operation may refuse zeros: its gradients are taken to be contiguous
        return {node.reads.index(v): Passed(None, False, None) for v in run.tapped}


def _is_large(s: S_graph, node: S_node) -> bool:
    """Whether a run on the meta device, where many operations are Python, is sure to take less time."""
    touched = sum(s.d.values[v].bytes for v in (*node.reads, *node.makes))
    return touched >= _LARGE and all(isinstance(s.d.nodes[k].op, torch._ops.OpOverload) for k in node.ops)


def _of_run(run: NodeRun) -> Outgoing:
    made: list[Gradients] = []
    came: list[Sequence[torch.Tensor]] = []
    feed(came.append, run, run.forward(made.append)).backward()
    return outgoing(run, came[0], made[0] if made else ())


def outgoing(run: NodeRun, came: Sequence[torch.Tensor], gradients: Gradients) -> Outgoing:
    """The ``gradients`` of what ``run`` taps, which its backward computed from those that ``came``, and that are still
    there; none where what it taps are no inputs that require grad.
    """
    places = {storage_key(g): ("result", k) for k, g in enumerate(came)}
    found: Outgoing = {}
    for v, g in zip(run.tapped, gradients, strict=False):
        if g is not None:
            k = run.node.reads.index(v)
            found[k] = Passed(unless_contiguous(g), g._is_view(), places.get(storage_key(g)))
            places.setdefault(storage_key(g), ("input", k))
    return found


def _of_sum(shape: tuple[int, ...], a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The strides of the sum, elsewhere, of two gradients of strides ``a`` and ``b``."""
    if a is b is None:
        return None
    x, y = (torch.empty_strided(shape, t or strides_of_new(shape), device="meta") for t in (a, b))
    return unless_contiguous(x + y)


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    """Whether a tensor has neither gaps nor numbers that several of its elements share."""
    expected = 1
    for stride, size in sorted(zip(strides or strides_of_new(shape), shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def unless_contiguous(t: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of ``t``, or None if they are those of a new tensor, as far as dimensions of size 1 go, too.

    Kernels that ask for channels last look at the strides of such dimensions.
    """
    strides = tuple(t.stride())
    return None if strides == strides_of_new(tuple(t.shape)) else strides


def strides_of_new(shape: tuple[int, ...]) -> tuple[int, ...]:
    behind = itertools.accumulate((max(1, size) for size in shape[:0:-1]), operator.mul, initial=1)
    return tuple(behind)[::-1] if shape else ()
