"""What one S node costs: time and memory of its forward and backward, measured on the sample's real values.

Equal nodes are measured once, each alone (``rkgb/cost/alone.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from rkgb.blocks.classes import nodes_key
from rkgb.cost.alone import NodeRun, feed, gradients_watched
from rkgb.cost.layouts import Outgoing, differentiated, gradient_layouts
from rkgb.cost.memory import measure_after, measure_memory, storage_bytes
from rkgb.cost.stand_ins import runs
from rkgb.cost.usage import Usage, supposed, turned_strides
from rkgb.cost.warm import warm
from rkgb.device import kind_of
from rkgb.errors import TraceError
from rkgb.graphs import S_graph, S_node
from rkgb.program import run_node, source_values
from rkgb.storages import memory_of, storage_key
from rkgb.trace.capture import drop_saved, preserved
from rkgb.trace.guards import is_guard


@dataclass(frozen=True, slots=True)
class InputGradient:
    """The gradient that a backward gives to one input: ``bytes`` of new memory, or the memory of another gradient.

    A parameter's becomes its ``.grad`` as it is, a view of larger memory keeping all of that, unless it lies otherwise
    than the parameter; then ``.grad`` is a copy.

    ``shares``: ("result", k) for the incoming gradient of the k-th result, ("input", k) for that of an
    earlier input, None for new memory.
    """

    bytes: int
    shares: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of one S node; times in nanoseconds, memory in bytes.

    ``forward_peak``: the most a run allocates, results and saved tensors included. ``backward_peak``: the
    most that the backward adds to what is there when it begins, ``incoming`` bytes of result gradients included; what
    the forward saved of its own goes meanwhile, operation by operation. ``held_peak``: the same if something else holds
    the result gradients to the end; ``together_peak``: if they are one memory, which goes with the last of them.
    ``results``: positions (in ``makes``) whose gradients go in. ``inputs``: for each position in ``reads``
    the gradient that comes out, or None. ``views``: positions in ``reads``, parameters among them, whose
    gradient comes out as a view of other memory, which autograd never adds to in place.
    """

    forward_time: int
    forward_peak: int
    backward_time: int = 0
    backward_peak: int = 0
    held_peak: int = 0
    together_peak: int = 0
    incoming: int = 0
    results: tuple[int, ...] = ()
    inputs: tuple[InputGradient | None, ...] = ()
    views: frozenset[int] = frozenset()


class Kept:
    """Costs that outlive the process: here none do."""

    def get(self, usage: Usage, given: frozenset[int]) -> list[Cost] | None:
        """The costs of all nodes for this ``usage``, where sources ``given`` have a ``.grad``; None if not kept."""
        return None

    def put(self, usage: Usage, given: frozenset[int], costs: list[Cost]) -> None:
        """Keep what was measured."""
        return


class Known:
    """Costs that were measured, by what decides them: the node, its gradients, how they lie, what is held.

    ``given``: sources that had a ``.grad`` when the first of them was measured, and count as having one ever after.
    ``stand_ins``: whether results of equal nodes may stand for each other. ``of``: costs of all nodes of the graph, for
    each usage that was asked for. ``like``: costs that need no measuring, as they are those of a graph of other sizes.
    ``kept``: those of an earlier process. ``own``: whether any costs are of this graph, and not ``like`` another's.
    ``measurings``: how often nodes were measured.
    """

    def __init__(self, like: Callable[[Usage], list[Cost] | None] = lambda _: None, kept: Kept | None = None) -> None:
        self.kept = kept or Kept()
        self.own = False
        self.measurings = 0
        self.given: frozenset[int] | None = None
        self.stand_ins = True
        self.costs: dict[tuple[Hashable, ...], Cost] = {}
        self.outgoing: dict[Hashable, Outgoing] = {}
        self.of: dict[Usage, list[Cost]] = {}
        self.like = like

    def times(self, key: tuple[Hashable, ...]) -> tuple[int, int] | None:
        """Forward and backward time of the node of ``key``, if it was measured with gradients that lie otherwise."""
        found = next((c for other, c in self.costs.items() if other[:2] == key[:2]), None)
        return None if found is None else (found.forward_time, found.backward_time)


def check_costs(costs: str, error: type[ValueError] = ValueError) -> None:
    """Raise ``error`` if there are no such costs."""
    if costs not in ("measured", "flops"):
        raise error(f'costs={costs!r}: choose "measured" (time every operation) or "flops" (same on every run)')


def measure_nodes(
    s: S_graph,
    model: torch.nn.Module,
    inputs: list[torch.Tensor],
    costs: str = "measured",
    usage: Usage | None = None,
    known: Known | None = None,
    repeat: int = 5,
    report: Callable[[float], None] = lambda _: None,
) -> list[Cost]:
    """The cost of every node. Each distinct node is measured when it is met; what it needs runs, freed by liveness.

    ``costs="flops"``: times come from counted operations and bytes instead of a clock, the same on every run.
    ``usage``: of the outputs, by default what is supposed; where it leaves open how gradients lie, they are contiguous.
    ``known``: what is measured already, which is added to. ``report`` is told which part of the nodes is done.
    """
    usage = usage or supposed(s.d)
    known = Known() if known is None else known
    if usage not in known.of:
        known.of[usage] = known.like(usage) or _own(s, model, inputs, costs, usage, known, repeat, report)
    return known.of[usage]


def _own(
    s: S_graph,
    model: torch.nn.Module,
    inputs: list[torch.Tensor],
    costs: str,
    usage: Usage,
    known: Known,
    repeat: int,
    report: Callable[[float], None],
) -> list[Cost]:
    """The costs of this very graph: kept by an earlier process, or else measured."""
    sources = source_values(s.d.sources, model, inputs)
    if known.given is None:
        known.given = frozenset(v for v, t in sources.items() if t.is_leaf and t.grad is not None)
    found = known.kept.get(usage, known.given)
    if found is None:
        found = _measured(s, model, inputs, sources, known.given, costs, usage, known, repeat, report)
        known.measurings += 1
        known.kept.put(usage, known.given, found)
    elif not known.own:
        warm(s, model, inputs)
    known.own = True
    return found


def _measured(
    s: S_graph,
    model: torch.nn.Module,
    inputs: list[torch.Tensor],
    sources: dict[int, torch.Tensor],
    given: frozenset[int],
    costs: str,
    usage: Usage,
    known: Known,
    repeat: int,
    report: Callable[[float], None],
) -> list[Cost]:
    fed = differentiated(s, usage.root_values(s.d))
    number: dict[Hashable, int] = {}
    same: list[Hashable] = [number.setdefault(nodes_key(s.d, [node]), len(number)) for node in s.nodes]
    turned = {v: turned_strides(s.d.values[v]) for v in (s.d.outputs[k] for k in usage.turned or ())}
    layouts = gradient_layouts(
        s, model, inputs, fed, same, dict.fromkeys(usage.root_values(s.d)) | turned, known.outgoing
    )
    caller = usage.held_storages(s.d)
    held = [_held_and_saved(s, node, caller) for node in s.nodes]
    keys = [(same[i], fed[i], tuple(v in given for v in n.reads), layouts[i], held[i]) for i, n in enumerate(s.nodes)]
    before = set(known.costs)

    def measure(stand_ins: bool) -> None:
        plan, others = runs(s, keys, stand_ins), _to_read(model)
        env = dict(sources)
        with preserved(model, inputs, s.d.structure.written), torch.enable_grad():
            for done, i in enumerate(sorted(plan.reads), 1):
                values = dict(zip(s.nodes[i].reads, (env[v] for v in plan.reads[i]), strict=True))
                if i in plan.measured and keys[i] not in known.costs:
                    run = NodeRun(s.d, s.nodes[i], values, fed[i], layouts[i], given, guarded=stand_ins)
                    with gradients_watched(model, s.d, s.nodes[i]):
                        known.costs[keys[i]] = _measure(run, held[i], known.times(keys[i]), costs, repeat, others)
                if i in plan.needed:
                    env.update(_results(s, i, values))
                for v in [v for v in (*plan.reads[i], *s.nodes[i].makes) if plan.last.get(v, i) <= i]:
                    if v not in sources:
                        env.pop(v, None)
                del values
                report(done / len(plan.reads))

    if not before.issuperset(keys) and known.stand_ins:
        try:
            measure(stand_ins=True)
        except Exception:  # noqa: BLE001 - operations may refuse the values that stand in, each in its own way
            known.stand_ins = False
            for key in known.costs.keys() - before:
                del known.costs[key]
    if not known.costs.keys() >= set(keys):
        measure(stand_ins=False)
    return [known.costs[key] for key in keys]


def _held_and_saved(s: S_graph, node: S_node, caller: frozenset[int]) -> tuple[int, ...]:
    """Positions in ``makes`` of what the ``caller`` holds and the node's own backward would let go."""
    storages = [s.d.values[v].storage for v in node.makes]
    return tuple(k for k, x in enumerate(storages) if x in caller and x in node.saved.storages)


def _results(s: S_graph, i: int, values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """What node ``i`` makes of ``values``; its guards need not hold, as generators may be elsewhere by now."""
    env = dict(values)
    with drop_saved():
        for op in (s.d.nodes[k] for k in s.nodes[i].ops if not is_guard(s.d.nodes[k])):
            env.update(zip(op.outputs, run_node(op, env.__getitem__), strict=True))
    for v in s.nodes[i].makes:
        if env[v].shape != s.d.values[v].shape:
            raise TraceError(f"{s.d.names[v]} has the shape {list(env[v].shape)}, not {list(s.d.values[v].shape)}")
    return {v: env[v] for v in s.nodes[i].makes}


def _measure(
    run: NodeRun,
    held: tuple[int, ...],
    times: tuple[int, int] | None,
    costs: str,
    repeat: int,
    others: Sequence[torch.Tensor],
) -> Cost:
    """``held``: see ``_held_and_saved``. ``times``: of forward and backward, if known."""
    values = run.values
    with preserved(torch.nn.Module(), [values[v] for v in run.node.reads if v in run.d.sources and _written(run, v)]):
        kind_of(run.device).first_use(run.forward, run.device)
        results, forward_peak, _ = measure_memory(run.forward, run.device)
        del results
        if not run.fed:
            return Cost((times or _time(run, costs, repeat, others))[0], forward_peak)
        inputs, views = _gradient_sources(run)
        incoming, backward_peak = _backward_memory(run, held, lambda grads: None)
        gradients: list[Any] = []
        held_peak = _backward_memory(run, held, gradients.append)[1]
        types = [run.d.values[run.node.makes[k]].dtype for k in run.fed]
        together = held_peak if len(set(types)) > 1 else backward_peak
        if len(types) > 1 and len(set(types)) == 1:
            together = _backward_memory(run, held, lambda _: None, together=True)[1]
        times = times or _time(run, costs, repeat, others)  # after runs that were no measurement of time
    peaks = backward_peak, held_peak, together
    return Cost(times[0], forward_peak, times[1], *peaks, incoming, run.fed, inputs, views)


def _time(run: NodeRun, costs: str, repeat: int, others: Sequence[torch.Tensor]) -> tuple[int, int]:
    return _counted(run) if costs == "flops" else _times(run, repeat, others)


def _written(run: NodeRun, v: int) -> bool:
    return any(run.d.values[v].storage in run.d.facts[op].writes for op in run.node.ops)


_ENOUGH = 50_000_000  # ns that need no more runs


def _to_read(model: torch.nn.Module) -> list[torch.Tensor]:
    """What to read before a timed run, on the device of the parameters."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return kind_of(device).to_read(device, model.parameters())


def _gradient_sources(run: NodeRun) -> tuple[tuple[InputGradient | None, ...], frozenset[int]]:
    """The input gradients, and which are views; everything is held meanwhile, so that addresses tell."""
    came: list[Any] = []
    fed: list[Any] = []
    views: set[int] = set()
    to_leaves: dict[int, _Form] = {}
    watches = [leaf.register_hook(partial(_note, to_leaves, run, v)) for v, leaf in run.leaves.items()]
    results = run.forward(came.append)
    feed(fed.append, run, results).backward()
    for watch in watches:
        watch.remove()
    places: dict[int, tuple[str, int]] = {}
    for k, g in enumerate(fed[0]):
        places[storage_key(g)] = ("result", k)
    found: dict[int, InputGradient | None] = {}
    arrived = dict(zip(run.tapped, came[0], strict=True)) if came else {}
    seen = {v: _form_of(g, None) for v, g in arrived.items() if g is not None}
    for v, (memory, is_view, kept, size) in (seen | to_leaves).items():
        position = run.node.reads.index(v)
        if is_view:
            views.add(position)
        shares = places.get(memory._cdata)
        found[v] = InputGradient(memory.nbytes(), shares) if kept else InputGradient(size, None)
        if kept:
            places.setdefault(memory._cdata, ("input", position))
    return tuple(found.get(v) for v in run.node.reads), frozenset(views)


def _form_of(g: torch.Tensor, leaf: torch.Tensor | None) -> _Form:
    """How a gradient lies. A parameter's is copied if it lies otherwise than the parameter."""
    kept = leaf is None or g.stride() == leaf.stride()
    return memory_of(g), g._is_view(), kept, g.numel() * g.element_size()


# Memory, whether a view, whether it is kept as it is, bytes.
_Form = tuple[torch.UntypedStorage, bool, bool, int]


def _note(found: dict[int, Any], run: NodeRun, v: int, gradient: torch.Tensor | None) -> None:
    """Holds the memory, not the gradient: autograd copies what somebody else holds."""
    if gradient is not None:
        found[v] = _form_of(gradient, run.leaves[v])


def _backward_memory(
    run: NodeRun, held: tuple[int, ...], hold: Callable[[Any], None], *, together: bool = False
) -> tuple[int, int]:
    """(bytes of the gradients that go in, the most that the backward adds to what is there when it begins).

    ``hold`` is given the gradients that go in. What the forward saved goes as the backward goes on, except ``held``.
    """
    outgoing: list[Any] = []
    results: list[torch.Tensor] = []
    sizes: list[int] = []

    def note(grads: tuple[torch.Tensor, ...]) -> None:
        sizes.extend(storage_bytes(g) for g in grads)
        hold(grads)

    def prepare() -> torch.Tensor:
        made = run.forward(outgoing.append)
        results.extend(made[k] for k in held)
        return feed(note, run, made, together=together)

    run.drop_gradients()  # here: the allocator warns of a block that goes in a session and came before it
    _, peak = measure_after(prepare, torch.Tensor.backward, run.device)
    return sum(sizes), peak


def _times(run: NodeRun, repeat: int, others: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Median times of forward and backward in ns, of ``repeat`` runs or fewer long ones; ``others`` are read before.

    A node that runs again finds what it reads in memory, not in the processor's cache, where a run just before would
    leave it; up to twice the time for a layer norm.
    """
    forward: list[int] = []
    backward: list[int] = []
    kind, launched = kind_of(run.device), 0
    grads = [_random(g) for g in run.gradients(run.forward())]
    while len(forward) < repeat and sum(forward) + sum(backward) < _ENOUGH:
        for t in others:
            t.sum()
        kind.hold(run.device, 2 * launched)
        began = time.perf_counter_ns()
        start = kind.mark(run.device)
        results = run.forward()
        middle = kind.mark(run.device)
        if grads:
            _backward(run.ends(results), grads)
        end = kind.mark(run.device)
        launched = time.perf_counter_ns() - began
        forward.append(kind.between(start, middle))
        backward.append(kind.between(middle, end))
    return int(median(forward)), int(median(backward))


def _random(gradient: torch.Tensor) -> torch.Tensor:
    """``gradient`` with random values: matrix products of ones take less power, and so less time, on a GPU."""
    if gradient.dtype.itemsize > 1:
        count = gradient.untyped_storage().nbytes() // gradient.element_size()
        gradient.as_strided((count,), (1,), 0).normal_(0, 0.1)
    return gradient


def _backward(ends: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
    """``torch.autograd.backward``, whose check of shapes would first import what torch knows of symbolic ones."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(tuple(ends), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _counted(run: NodeRun) -> tuple[int, int]:
    """Forward and backward time in ns by a roofline model: operations that the flop counter counts (matrix products,
    convolutions, attention) against bytes touched.
    """
    values, node = run.d.values, run.node
    touched = sum(values[v].bytes for v in (*node.reads, *node.makes)) + sum(node.saved.private)
    dtype = next((values[v].dtype for v in (*node.makes, *node.reads)), torch.float32)
    convolution = any("conv" in op.name for op in run.ops)
    roofline = kind_of(run.device).roofline(run.device, dtype, convolution)
    with FlopCounterMode(display=False) as counter:
        results = run.forward()
    forward = roofline.time(counter.get_total_flops(), touched)
    if not run.fed:
        return forward, 0
    ends = run.ends(results)
    with FlopCounterMode(display=False) as counter:
        _backward(ends, run.gradients(results))
    return forward, roofline.time(counter.get_total_flops(), 2 * touched)
