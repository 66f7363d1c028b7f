"""The cost of one S node, measured alone on given values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rkgb.cost.alone import NodeRun
from rkgb.cost.clock import Clock
from rkgb.cost.costs import Cost, InputGradient
from rkgb.cost.counted import modelled_times
from rkgb.cost.memory import measure_memory
from rkgb.cost.piece import Gradients, backward_memory, feed
from rkgb.device import kind_of
from rkgb.storages import memory_of, storage_key
from rkgb.trace.capture import preserved

Times = Callable[[NodeRun, tuple[int, int]], tuple[int, int]]
"""Nanoseconds of a node's forward and backward, from a run of the node and what one run was seen to take."""


def times_by(costs: str, model: torch.nn.Module, repeat: int = 5) -> Times:
    """How nodes of ``model`` are timed: "measured" by a clock, "flops" by counted operations.

    A node that takes long is not run again only for its time, after its memory was measured.
    """
    if costs == "flops":
        return lambda run, _: roofline_times(run)
    clock = Clock.of(model, repeat)
    return lambda run, seen: seen if sum(seen) >= kind_of(run.device).long else clock.times(run)


def roofline_times(run: NodeRun) -> tuple[int, int]:
    """Times by the roofline of the device, from counted operations and the bytes of all values and saved tensors."""
    values, node = run.d.values, run.node
    touched = sum(values[v].bytes for v in (*node.reads, *node.makes)) + sum(node.saved.private)
    dtype = next((values[v].dtype for v in (*node.makes, *node.reads)), torch.float32)
    convolution = any("conv" in op.name for op in run.ops)
    return modelled_times(run, touched, kind_of(run.device).roofline(run.device, dtype, convolution).time)


def measure_node(run: NodeRun, held: tuple[int, ...], times: tuple[int, int] | None, times_of: Times) -> Cost:
    """The cost of the node.

    ``held``: positions in ``makes`` of results that the node's backward saves and the caller holds. ``times``: of
    forward and backward, if they are known; otherwise ``times_of`` says them.
    """
    values = run.values
    with preserved(torch.nn.Module(), [values[v] for v in run.node.reads if v in run.d.sources and _written(run, v)]):
        kind_of(run.device).first_use(run.forward, run.device)
        results, forward_peak, _ = measure_memory(run.forward, run.device)
        del results
        if not run.fed:
            return Cost((times or times_of(run, (0, 0)))[0], forward_peak)
        inputs, views = _input_gradients(run)
        alone = backward_memory(run, held=held)
        incoming, backward_peak = alone.incoming, alone.peak
        del alone
        gradients: list[Any] = []
        holding = backward_memory(run, gradients.append, held)
        held_peak, seen = holding.peak, holding.times
        del holding
        types = [run.d.values[run.node.makes[k]].dtype for k in run.fed]
        together = held_peak if len(set(types)) > 1 else backward_peak
        if len(types) > 1 and len(set(types)) == 1:
            together = backward_memory(run, held=held, together=True).peak
        times = times or times_of(run, seen)  # last: the runs above have warmed up the kernels
    peaks = backward_peak, held_peak, together
    return Cost(times[0], forward_peak, times[1], *peaks, incoming, run.fed, inputs, views)


def _written(run: NodeRun, v: int) -> bool:
    return any(run.d.values[v].storage in run.d.facts[op].writes for op in run.node.ops)


@dataclass(frozen=True, slots=True)
class _Form:
    """How one gradient lies in memory. ``as_it_is``: whether it becomes ``.grad`` itself, or a copy of ``size`` bytes.

    It holds the memory and not the gradient: autograd copies a gradient that somebody else holds.
    """

    memory: torch.UntypedStorage
    is_view: bool
    as_it_is: bool
    size: int

    @classmethod
    def of(cls, g: torch.Tensor, parameter: torch.Tensor | None) -> _Form:
        """The form of the gradient ``g`` of a ``parameter``, or of another input."""
        as_it_is = parameter is None or g.stride() == parameter.stride()
        return cls(memory_of(g), g._is_view(), as_it_is, g.numel() * g.element_size())


def _input_gradients(run: NodeRun) -> tuple[tuple[InputGradient | None, ...], frozenset[int]]:
    """The gradient of each input, and the positions of those that are views.

    All gradients are held until the end, so that equal addresses mean shared memory.
    """
    collected: list[Gradients] = []
    incoming: list[Any] = []
    of_leaves: dict[int, _Form] = {}
    hooks = [leaf.register_hook(partial(_note, of_leaves, v, leaf)) for v, leaf in run.leaves.items()]
    results = run.forward(collected.append)
    feed(incoming.append, run, results).backward()
    for hook in hooks:
        hook.remove()
    places: dict[int, tuple[str, int]] = {storage_key(g): ("result", k) for k, g in enumerate(incoming[0])}
    of_inputs = dict(zip(run.tapped, collected[0], strict=True)) if collected else {}
    forms = {v: _Form.of(g, None) for v, g in of_inputs.items() if g is not None} | of_leaves
    gradients: dict[int, InputGradient] = {}
    for v, form in forms.items():
        if form.as_it_is:
            gradients[v] = InputGradient(form.memory.nbytes(), places.get(form.memory._cdata))
            places.setdefault(form.memory._cdata, ("input", run.node.reads.index(v)))
        else:
            gradients[v] = InputGradient(form.size, None)
    views = frozenset(run.node.reads.index(v) for v, form in forms.items() if form.is_view)
    return tuple(gradients.get(v) for v in run.node.reads), views


def _note(forms: dict[int, _Form], v: int, leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        forms[v] = _Form.of(gradient, leaf)
