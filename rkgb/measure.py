"""What one S node costs: time and memory of its forward and backward, measured on the sample's real values.

Equal nodes are measured once. The node runs alone under autograd between two small functions: a tap
before it, which collects the gradients of its inputs, and a feed behind it, which makes the gradients
of its results inside the backward, so that autograd is their only owner, as in a whole step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from rkgb.Atools import nodes_key
from rkgb.capture import drop_saved, preserved
from rkgb.graphs import D_graph, S_graph, S_node
from rkgb.memory import measure_memory
from rkgb.program import memory_of, run_node, source_value


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
    most that the backward's gradients take, ``incoming`` bytes of result gradients included.
    ``results``: positions (in ``makes``) whose gradients go in. ``inputs``: for each position in ``reads``
    the gradient that comes out, or None. ``views``: positions in ``reads``, parameters among them, whose
    gradient comes out as a view of other memory, which autograd never adds to in place.
    """

    forward_time: int
    forward_peak: int
    backward_time: int = 0
    backward_peak: int = 0
    incoming: int = 0
    results: tuple[int, ...] = ()
    inputs: tuple[InputGradient | None, ...] = ()
    views: frozenset[int] = frozenset()


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
    def forward(ctx: Any, note: Callable[[Any], None], *ys: torch.Tensor) -> torch.Tensor:
        ctx.note, ctx.like = note, [(y.shape, y.dtype, y.device) for y in ys]
        return torch.empty((), device=ys[0].device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        grads = tuple(torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
        ctx.note(grads)
        return (None, *grads)


class NodeRun:
    """One S node, ready to run alone on given values of what it reads."""

    def __init__(self, d: D_graph, node: S_node, values: dict[int, torch.Tensor], fed: tuple[int, ...]) -> None:
        self.d, self.node, self.fed = d, node, fed
        self.ops = [d.nodes[op] for op in node.ops]
        self.inputs = [v for v in node.reads if not _is_parameter(d, v)]
        self.tapped = [v for v in self.inputs if d.values[v].requires_grad]
        self.values = values
        self.leaves = {v: _leaf(values[v]) for v in node.reads if _is_parameter(d, v)}
        self.without_grad = [leaf for leaf in self.leaves.values() if leaf.grad is None]
        self.device = next((d.values[v].device for v in (*node.makes, *node.reads)), torch.device("cpu"))
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, collect: Callable[[Any], None] = lambda _: None) -> list[torch.Tensor]:
        """The results (``makes``) of one run under autograd."""
        for leaf in self.without_grad:
            leaf.grad = None
        env = {v: self.values[v].detach() for v in self.inputs} | self.leaves
        if self.tapped:
            env |= zip(self.tapped, _Tap.apply(collect, self.anchor, *[env[v] for v in self.tapped]), strict=True)
        for op in self.ops:
            env.update(zip(op.outputs, run_node(op, env.__getitem__), strict=True))
        return [env[v] for v in self.node.makes]

    def ends(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        return [results[k] for k in self.fed]


def _is_parameter(d: D_graph, v: int) -> bool:
    """Sources that require grad end in autograd's accumulation into ``.grad``."""
    return v in d.sources and d.values[v].requires_grad


def _leaf(t: torch.Tensor) -> torch.Tensor:
    """The same memory with a ``.grad`` of its own, present if the original's is."""
    leaf = t.detach().requires_grad_(t.requires_grad)
    if t.requires_grad and t.is_leaf and t.grad is not None:
        leaf.grad = torch.zeros_like(t.grad)
    return leaf


def measure_nodes(
    s: S_graph,
    model: torch.nn.Module,
    inputs: list[torch.Tensor],
    costs: str = "measured",
    repeat: int = 5,
    report: Callable[[float], None] = lambda _: None,
) -> list[Cost]:
    """The cost of every node. Runs S once, freeing by liveness; each distinct node is measured when it is met.

    ``costs="flops"``: times come from counted operations and bytes instead of a clock, the same on every run.
    ``report`` is told which part of the nodes is done.
    """
    d = s.d
    fed = differentiated(s)
    known: dict[Hashable, Cost] = {}
    found: list[Cost] = []
    last = {v: i for i, n in enumerate(s.nodes) for v in n.reads}
    env: dict[int, torch.Tensor] = {}
    with preserved(model, inputs), torch.enable_grad():
        for v, source in d.sources.items():
            env[v] = source_value(source, model, inputs)
        for i, node in enumerate(s.nodes):
            has_grad = tuple(env[v].is_leaf and env[v].grad is not None for v in node.reads)
            key = (nodes_key(d, [node]), fed[i], has_grad)
            if key not in known:
                known[key] = _measure(NodeRun(d, node, env, fed[i]), costs, repeat)
            found.append(known[key])
            with drop_saved():
                for op in (d.nodes[k] for k in node.ops):
                    env.update(zip(op.outputs, run_node(op, env.__getitem__), strict=True))
            kept = set(node.makes)
            for v in [v for op in node.ops for v in d.nodes[op].outputs if v not in kept]:
                del env[v]
            for v in [v for v in (*node.reads, *node.makes) if last.get(v, i) <= i and v not in d.sources]:
                env.pop(v, None)
            report((i + 1) / len(s.nodes))
    return found


def differentiated(s: S_graph) -> list[tuple[int, ...]]:
    """For each node the positions in ``makes`` that receive a gradient when every output of the model does."""
    wanted = {v for v in s.d.outputs if s.d.values[v].requires_grad}
    found: list[tuple[int, ...]] = []
    for node in reversed(s.nodes):
        results = tuple(k for k, v in enumerate(node.makes) if v in wanted and s.d.values[v].requires_grad)
        found.append(results)
        if results:
            wanted.update(v for v in node.reads if s.d.values[v].requires_grad)
    return found[::-1]


def _measure(run: NodeRun, costs: str, repeat: int) -> Cost:
    values = run.values
    with preserved(torch.nn.Module(), [values[v] for v in run.node.reads if v in run.d.sources and _written(run, v)]):
        run.forward()  # first use of a kernel
        results, forward_peak, _ = measure_memory(run.forward, run.device)
        del results
        times = _counted(run) if costs == "flops" else _times(run, repeat)
        if not run.fed:
            return Cost(times[0], forward_peak)
        inputs, views = _gradient_sources(run)
        incoming, backward_peak = _backward_memory(run)
    return Cost(times[0], forward_peak, times[1], backward_peak, incoming, run.fed, inputs, views)


def _written(run: NodeRun, v: int) -> bool:
    return any(run.d.values[v].storage in run.d.facts[op].writes for op in run.node.ops)


def _gradient_sources(run: NodeRun) -> tuple[tuple[InputGradient | None, ...], frozenset[int]]:
    """The input gradients, and which are views; everything is held meanwhile, so that addresses tell."""
    came: list[Any] = []
    fed: list[Any] = []
    views: set[int] = set()
    to_leaves: dict[int, tuple[torch.UntypedStorage, bool, bool, int]] = {}
    watches = [leaf.register_hook(partial(_note, to_leaves, run, v)) for v, leaf in run.leaves.items()]
    results = run.forward(came.append)
    _Feed.apply(fed.append, *run.ends(results)).backward()
    for watch in watches:
        watch.remove()
    places: dict[int, tuple[str, int]] = {}
    for k, g in enumerate(fed[0]):
        places[g.untyped_storage()._cdata] = ("result", k)
    found: dict[int, InputGradient | None] = {}
    arrived = dict(zip(run.tapped, came[0], strict=True)) if came else {}
    seen = {v: _form_of(g, None) for v, g in arrived.items() if g is not None}
    for v, (memory, is_view, taken, size) in (seen | to_leaves).items():
        position = run.node.reads.index(v)
        if is_view:
            views.add(position)
        found[v] = InputGradient(memory.nbytes(), places.get(memory._cdata)) if taken else InputGradient(size, None)
        if taken:
            places.setdefault(memory._cdata, ("input", position))
    return tuple(found.get(v) for v in run.node.reads), frozenset(views)


def _form_of(g: torch.Tensor, leaf: torch.Tensor | None) -> tuple[torch.UntypedStorage, bool, bool, int]:
    """(memory, whether a view, whether it is kept as it is, bytes) of a gradient. A parameter's is copied if it lies
    otherwise than the parameter."""
    taken = leaf is None or g.stride() == leaf.stride()
    return memory_of(g), g._is_view(), taken, g.numel() * g.element_size()


def _note(found: dict[int, Any], run: NodeRun, v: int, gradient: torch.Tensor) -> None:
    """Holds the memory, not the gradient: autograd copies what somebody else holds."""
    found[v] = _form_of(gradient, run.leaves[v])


def _backward_memory(run: NodeRun) -> tuple[int, int]:
    held: list[Any] = []
    results = run.forward(held.append)
    sizes: list[int] = []
    end = _Feed.apply(lambda grads: sizes.extend(g.untyped_storage().nbytes() for g in grads), *run.ends(results))
    _, peak, _ = measure_memory(end.backward, run.device)
    return sum(sizes), peak


def _times(run: NodeRun, repeat: int) -> tuple[int, int]:
    """Medians of forward and backward time in ns."""
    forward, backward = [], []
    grads = [torch.ones_like(r) for r in run.ends(run.forward())]
    for _ in range(repeat):
        start = _clock(run.device)
        results = run.forward()
        middle = _clock(run.device)
        if grads:
            torch.autograd.backward(run.ends(results), grads)
        end = _clock(run.device)
        forward.append(middle - start)
        backward.append(end - middle)
    return int(median(forward)), int(median(backward))


# A nanosecond moves so many bytes, or computes so many of the operations that the flop counter counts
# (matrix products, convolutions, attention): the ratio of a current accelerator. Only the ratio matters.
_BYTES_PER_NS, _FLOPS_PER_NS = 2_000, 200_000


def _counted(run: NodeRun) -> tuple[int, int]:
    """Forward and backward time in ns by a roofline model: counted operations against bytes touched."""
    values, node = run.d.values, run.node
    touched = sum(values[v].bytes for v in (*node.reads, *node.makes)) + sum(node.saved.private)

    def roofline(flops: int, size: int) -> int:
        return 1 + max(size // _BYTES_PER_NS, flops // _FLOPS_PER_NS)

    with FlopCounterMode(display=False) as counter:
        results = run.forward()
    forward = roofline(counter.get_total_flops(), touched)
    if not run.fed:
        return forward, 0
    ends = run.ends(results)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(ends, [torch.ones_like(r) for r in ends])
    return forward, roofline(counter.get_total_flops(), 2 * touched)


def _clock(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()
