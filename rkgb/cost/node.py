"""The cost of one S node, measured alone on given values."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rkgb.blocks.classes import nodes_key
from rkgb.cost.alone import NodeRun, gradients_watched, on_zeros
from rkgb.cost.clock import Clock, modelled_times
from rkgb.cost.costs import Cost, InputGradient, Times
from rkgb.cost.layouts import Outgoing, differentiated, is_dense, outgoing
from rkgb.cost.memory import measure_memory, storage_bytes
from rkgb.cost.piece import BackwardMemory, backward_memory, feed, ignore
from rkgb.cost.usage import differentiable
from rkgb.device import kind_of
from rkgb.graphs import S_graph
from rkgb.storages import memory_of, storage_key
from rkgb.trace.preserved import preserved

TimesOf = Callable[[NodeRun, tuple[int, int]], Times]
"""The times of a node, from a run of it and what one forward and its backward were seen to take."""


def times_by(costs: str, model: torch.nn.Module, touched: int = 0) -> TimesOf:
    """How nodes of ``model`` are timed: "measured" by a clock, "flops" by counted operations.

    ``touched``: bytes that are used between a forward and a run again: see ``rkgb.cost.measure.beside_measured``.
    A node that takes long is not run again only for its time, after its memory was measured.
    """
    if costs == "flops":
        return lambda run, _: roofline_times(run)
    clock = Clock.of(model, touched)
    return lambda run, seen: Times(*seen) if sum(seen) >= kind_of(run.device).long else clock.times(run)


def roofline_times(run: NodeRun) -> Times:
    """Times by the roofline of the device, from counted operations and the bytes of all values and saved tensors."""
    values, node = run.d.values, run.node
    touched = sum(values[v].bytes for v in (*node.reads, *node.makes)) + sum(node.saved.private)
    dtype = next((values[v].dtype for v in (*node.makes, *node.reads)), torch.float32)
    convolution = any("conv" in op.name for op in run.ops)
    return Times(*modelled_times(run, touched, kind_of(run.device).roofline(run.device, dtype, convolution).time))


def measure_node(run: NodeRun, held: tuple[int, ...], times: Times | None, times_of: TimesOf) -> tuple[Cost, Outgoing]:
    """The cost of the node, and the strides of the gradients that its backward made.

    ``held``: positions in ``makes`` of results that the node's backward saves and the caller holds. ``times``: if
    they are known; otherwise ``times_of`` says them.
    """
    values = run.values
    with preserved(torch.nn.Module(), [values[v] for v in run.node.reads if v in run.d.sources and _written(run, v)]):
        first_use(run)
        if not run.fed:
            forward_peak = measure_memory(run.forward, run.device)[1]
            times = times or times_of(run, (0, 0))
            return Cost(times.forward, forward_peak, warm_time=times.warm, launches=times.launches), {}
        alone = dataclasses.replace(backward_memory(run, held=held), inputs=())
        holding, inputs, views, strides = _holding_gradients(run, held)
        types = [run.d.values[run.node.makes[k]].dtype for k in run.fed]
        together = holding.peak if len(set(types)) > 1 else alone.peak
        if len(types) > 1 and len(set(types)) == 1:
            together = backward_memory(run, held=held, together=True).peak
        times = times or times_of(run, holding.times)  # last: the runs above have warmed up the kernels
    peaks = alone.peak, holding.peak, together, alone.incoming
    given = run.fed, inputs, views
    cost = Cost(times.forward, alone.forward_peak, times.backward, *peaks, *given, times.warm, times.launches)
    return cost, strides


def first_use(run: NodeRun) -> None:
    """Run the node, forward and backward, where kernels allocate workspaces at their first use."""
    kind = kind_of(run.device)
    if kind.keeps_workspaces:
        kind.first_use(run.forward, run.device)
        if run.fed:
            feed(ignore, run, run.forward()).backward()


def warm(s: S_graph, model: torch.nn.Module, inputs: list[torch.Tensor]) -> None:
    """Run each distinct node once on zeros, forward and backward, in the threads in which a plan that was loaded runs
    it, so that its kernels allocate their workspaces first.

    Nothing runs on devices whose kernels keep no workspaces. The memory needed is that of one node.
    """
    if not kind_of(s.device).keeps_workspaces:
        return
    seen: set[Hashable] = set()
    with preserved(model, inputs, s.d.structure.written), torch.enable_grad():
        for node, fed in zip(s.nodes, differentiated(s, [s.d.outputs[k] for k in differentiable(s.d)]), strict=True):
            key = nodes_key(s.d, [node]), fed
            if key in seen:
                continue
            seen.add(key)
            run = NodeRun(s.d, node, on_zeros(s, node, model, inputs), fed, (None,) * len(fed))
            with gradients_watched(model, s.d, node), contextlib.suppress(Exception):
                first_use(run)  # an operation may refuse zeros; the first step is then its first use


def _written(run: NodeRun, v: int) -> bool:
    return any(run.d.values[v].storage in run.d.facts[op].writes for op in run.node.ops)


@dataclass(frozen=True, slots=True)
class _Form:
    """How one gradient lies in memory. ``memory``: None of a sparse one, which has two, of ``size`` bytes together.
    ``tensor``: the identity of the gradient, which ``mark`` keeps from being given to another one. ``copied``: a copy
    becomes ``.grad``.

    It holds the memory and not the gradient: autograd copies a gradient that somebody else holds.
    """

    memory: torch.UntypedStorage | None
    is_view: bool
    size: int
    tensor: int
    mark: object
    copied: bool = False

    @classmethod
    def of(cls, g: torch.Tensor, parameter: torch.Tensor | None) -> _Form:
        """The form of the gradient ``g`` of a ``parameter``, or of another input."""
        if g.layout != torch.strided:
            return cls(None, False, storage_bytes(g), g._cdata, _mark(g))
        copied = parameter is not None and not _becomes_grad(g, parameter)
        size = g.numel() * g.element_size()
        return cls(memory_of(g), g._is_view(), size, g._cdata, _mark(g), copied)


def _mark(g: torch.Tensor) -> object:
    """Keeps torch from giving the identity ``g._cdata`` to another tensor, and does not hold ``g``."""
    return torch._C._WeakTensorRef(g)  # type: ignore[attr-defined]


def _becomes_grad(g: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether autograd takes ``g`` itself as ``.grad``, as it lies (``obeys_layout_contract`` in torch's source)."""
    if not is_dense(parameter.shape, parameter.stride()):
        return g.is_contiguous()
    dimensions = zip(g.shape, g.stride(), parameter.stride(), strict=True)
    return all(stride == own if size != 1 else stride != 0 for size, stride, own in dimensions)


def _holding_gradients(
    run: NodeRun, held: tuple[int, ...]
) -> tuple[BackwardMemory, tuple[InputGradient | None, ...], frozenset[int], Outgoing]:
    """A backward whose incoming gradients are held; the gradient of each input, the positions of those that are views,
    and the strides of those that are passed on.

    Equal addresses mean shared memory, since all gradients are held until the end.
    """
    incoming: list[Any] = []
    of_leaves: dict[int, _Form] = {}
    hooks = [leaf.register_hook(partial(_note, of_leaves, v, leaf)) for v, leaf in run.leaves.items()]
    memory = backward_memory(run, incoming.append, held)
    for hook in hooks:
        hook.remove()
    places: dict[int, tuple[str, int]] = {storage_key(g): ("result", k) for k, g in enumerate(incoming[0])}
    of_inputs = dict(zip(run.tapped, memory.inputs, strict=False))  # no gradient came where there are none
    forms = {v: _Form.of(g, None) for v, g in of_inputs.items() if g is not None}
    forms |= {v: of_leaves[v] for v in run.leaves if v in of_leaves}  # in the order of ``reads``
    gradients: dict[int, InputGradient] = {}
    tensors = {g._cdata for g in incoming[0]}
    for v, form in forms.items():
        if form.memory is None:
            gradients[v] = InputGradient(form.size, None, sparse=True)
        else:
            alias, where = form.tensor in tensors, places.get(form.memory._cdata)
            gradients[v] = InputGradient(form.memory.nbytes(), where, alias, form.copied)
            tensors.add(form.tensor)
            places.setdefault(form.memory._cdata, ("input", run.node.reads.index(v)))
    views = frozenset(run.node.reads.index(v) for v, form in forms.items() if form.is_view)
    inputs = tuple(gradients.get(v) for v in run.node.reads)
    return dataclasses.replace(memory, inputs=()), inputs, views, outgoing(run, incoming[0], memory.inputs)


def _note(forms: dict[int, _Form], v: int, leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        forms[v] = _Form.of(gradient, leaf)
