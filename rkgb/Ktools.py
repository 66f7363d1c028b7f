"""K: forward and backward computations with their costs, and the data that live between them.

The backwards run in one order, the reverse of the forwards. Gradient memory therefore does not depend on which
activations are kept, and is computed here once (see ``rkgb/gradients.py``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from rkgb.blocks.simplify import statistics_of
from rkgb.cost.layouts import differentiated
from rkgb.cost.measure import Cost, measure_nodes
from rkgb.cost.usage import Usage, differentiable, supposed
from rkgb.gradients import GradientBuffers
from rkgb.graphs import S_graph
from rkgb.listing import header
from rkgb.notebook import Displayed
from rkgb.probe.contexts import context_storages
from rkgb.randomness import drawn_by, state_bytes
from rkgb.sample import Sample, call_of


@dataclass(frozen=True, slots=True)
class K_data:
    """Memory that a node makes and that can be freed on its own.

    It is a result (``storage`` is set), or the saved tensors that only the node's own backward reads. ``owner``: the
    node.
    """

    name: str
    bytes: int
    owner: int
    storage: int | None


@dataclass(frozen=True, slots=True)
class K_backward:
    """The backward of a node: the data that it reads, its time (ns), and gradient memory (bytes).

    ``before`` and ``after``: all gradients when it starts and ends. ``peak``: the most that gradients and its own
    temporary memory take while it runs, less the node's private saved tensors that are freed by then. ``extra``: bytes
    above ``peak`` if the gradients of the outputs are not contiguous, where that is not known (``Usage.turned``).
    ``launch``: nanoseconds of the host, where the device runs behind it.
    """

    reads: tuple[int, ...]
    time: int
    before: int
    peak: int
    after: int
    extra: int = 0
    launch: int = 0


@dataclass(frozen=True, slots=True)
class K_node:
    """The forward of an S node, and its backward if gradients reach it. Node i of K is node i of S.

    ``reads``, ``makes``: data. ``time``: of the forward, ns; ``warm``: right after the runs that made what it reads.
    ``peak``: the most bytes that a forward allocates, its results and what a second run copies included. ``rerun``:
    whether it may be recomputed. ``random_bytes``: of the generators' states that a second run puts back.
    ``launch``: as for a backward.
    """

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    time: int
    peak: int
    backward: K_backward | None
    rerun: bool
    random_bytes: int
    warm: int
    launch: int = 0


@dataclass(frozen=True, repr=False)
class K_graph(Displayed):
    """Forward and backward computations of a whole S graph.

    Invariants: node i belongs to S node i; data are made by their owner and read later only; the gradient bytes after
    a backward are those before the next.

    ``outputs``: data that the module returns. ``held``: data that live until the backward ends: outputs that the caller
    holds, and what an ``autograd.Function`` keeps as attributes. ``returned``: data that live until the loss is
    computed: the other outputs, and what autograd saves for outputs without gradient. ``output_bytes``: the gradients
    of the roots of ``usage``, which come from the caller. ``missing``: sources without ``.grad``; their gradients stay.
    ``idle``: nodes that lead only to outputs without gradient.
    """

    s: S_graph
    nodes: tuple[K_node, ...]
    data: tuple[K_data, ...]
    outputs: tuple[int, ...]
    output_bytes: int
    held: tuple[int, ...]
    returned: tuple[int, ...]
    usage: Usage
    missing: frozenset[int]
    idle: frozenset[int] = frozenset()
    made_by: tuple[str, ...] = field(default=(), compare=False)

    def is_dead_end(self, i: int) -> bool:
        """Whether node i has no backward though autograd would save tensors for one: what it leads to is detached."""
        return self.s.nodes[i].requires_grad and self.nodes[i].backward is None and i not in self.idle

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients of ``missing``, which the backward leaves. Sparse ones are smaller than what they are of."""
        left = next((n.backward.after for n in self.nodes if n.backward), 0)
        return min(left, sum(self.s.d.values[v].bytes for v in self.missing))

    def verify(self) -> None:
        """Assert the invariants."""
        assert len(self.nodes) == len(self.s.nodes)
        for i, node in enumerate(self.nodes):
            assert all(self.data[d].owner == i for d in node.makes)
            assert all(self.data[d].owner < i for d in node.reads)
            if node.backward:
                assert all(self.data[d].owner <= i for d in node.backward.reads)
        chain = [n.backward for n in reversed(self.nodes) if n.backward]
        assert all(a.after == b.before for a, b in itertools.pairwise(chain))
        places = range(len(self.s.d.outputs))
        assert all(k in places for k in (*self.usage.roots, *self.usage.held))

    def __str__(self) -> str:
        lines = [header("K", self.made_by)]
        for node in self.nodes:
            made = ", ".join(f"{self.data[d].name}:{self.data[d].bytes}" for d in node.makes)
            lines.append(f"fwd {node.name}({', '.join(self.data[d].name for d in node.reads)}) -> {made or '()'}")
        lines.append("loss")
        for node in reversed(self.nodes):
            if node.backward:
                lines.append(f"bwd {node.name}({', '.join(self.data[d].name for d in node.backward.reads)})")
        return "\n".join(lines)


def S_to_K(
    s: S_graph,
    model: torch.nn.Module,
    sample: Sample,
    costs: Sequence[Cost] | None = None,
    usage: Usage | None = None,
    missing: frozenset[int] | None = None,
) -> K_graph:
    """Forward and backward computations of ``s``, with their costs.

    ``costs``: one for each node, for this ``usage`` of the outputs; by default measured on ``sample``. ``usage``: by
    default what ``supposed`` says. ``missing``: sources without ``.grad``; by default those that have none now.
    """
    usage = usage or supposed(s.d)
    if costs is None:
        costs = measure_nodes(s, model, call_of(sample).tensors, usage=usage)
    missing = _without_grad(s, model) if missing is None else missing
    idle = _idle(s, usage)
    memory = _Memory(_data(s, costs, idle))
    buffers = GradientBuffers(s, costs, usage, missing)
    backwards: dict[int, K_backward] = {}
    for i, cost in reversed([*enumerate(costs)]):
        if cost.results:
            before, peak, after = buffers.backward(i)
            times = {"time": cost.backward_time, "launch": cost.launches[1]}
            backwards[i] = K_backward(memory.saved_by(s, i), before=before, peak=peak, after=after, **times)
    held, returned = _until_when(s, usage, idle, memory)
    k = K_graph(
        s,
        tuple(_node(s, i, cost, memory, backwards.get(i)) for i, cost in enumerate(costs)),
        memory.data,
        memory.outputs(s),
        sum(s.d.values[v].bytes for v in usage.root_values(s.d)),
        held,
        returned,
        usage,
        missing,
        idle,
        (*s.made_by, "S_to_K"),
    )
    k.verify()
    return k


class _Memory:
    """The data, and which of them is a storage, by the storage, or what only a node's backward reads, by the node."""

    def __init__(self, data: Iterable[K_data]) -> None:
        self.data = tuple(data)
        self.of_storage = {x.storage: k for k, x in enumerate(self.data) if x.storage is not None}
        self.private = {x.owner: k for k, x in enumerate(self.data) if x.storage is None}

    def of(self, storages: Iterable[int]) -> tuple[int, ...]:
        """The data of ``storages``, each once; sources' memory is no data."""
        return tuple(self.of_storage[x] for x in dict.fromkeys(storages) if x in self.of_storage)

    def private_to(self, i: int) -> tuple[int, ...]:
        return (self.private[i],) if i in self.private else ()

    def saved_by(self, s: S_graph, i: int) -> tuple[int, ...]:
        """What the backward of node i reads."""
        return (*self.of(s.nodes[i].saved.storages), *self.private_to(i))

    def outputs(self, s: S_graph) -> tuple[int, ...]:
        return self.of(s.d.values[v].storage for v in s.d.outputs)


def _data(s: S_graph, costs: Sequence[Cost], idle: frozenset[int]) -> Iterator[K_data]:
    """The data in the order in which nodes make them."""
    for i, node in enumerate(s.nodes):
        for storage in node.storages:
            yield K_data(s.d.storage_names[storage], s.d.storages[storage].bytes, i, storage)
        if node.saved.private and (costs[i].results or i in idle):
            yield K_data(f"{node.label}.saved", sum(node.saved.private), i, None)


def _node(s: S_graph, i: int, cost: Cost, memory: _Memory, backward: K_backward | None) -> K_node:
    """Node i. A second run keeps the generators' present states meanwhile, and works on copies of statistics."""
    node = s.nodes[i]
    reads = memory.of(s.d.values[v].storage for v in node.reads)
    makes = (*memory.of(node.storages), *memory.private_to(i))
    random_bytes = state_bytes(drawn_by(s, i))
    copies = 0 if node.fixed else sum(s.d.values[v].bytes for v in statistics_of(s.d, node))
    peak = max(cost.forward_peak, sum(memory.data[d].bytes for d in makes)) + random_bytes + copies
    time = cost.forward_time
    warm = time if cost.warm_time is None else min(time, cost.warm_time)
    return K_node(node.label, reads, makes, time, peak, backward, not node.fixed, random_bytes, warm, cost.launches[0])


def _until_when(
    s: S_graph, usage: Usage, idle: frozenset[int], memory: _Memory
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The data that stay until the backward ends, and of the others those that stay until the loss is computed."""
    outputs = memory.outputs(s)
    held = set(memory.of(usage.held_storages(s.d) | context_storages(s)))
    with_graph = [s.d.outputs[k] for k in differentiable(s.d) if k in usage.attached]
    for i, results in enumerate(differentiated(s, with_graph)):
        held.update(memory.saved_by(s, i) if i in idle and results else ())
    returned = dict.fromkeys((*outputs, *(d for i in sorted(idle) for d in memory.saved_by(s, i))))
    all_held = dict.fromkeys((*(d for d in outputs if d in held), *sorted(held)))
    return tuple(all_held), tuple(d for d in returned if d not in held)


def with_extra(k: K_graph, turned: K_graph) -> K_graph:
    """``k``, which is for contiguous gradients, with the bytes that non-contiguous ones (``turned``) take above it."""

    def of(a: K_backward | None, b: K_backward | None) -> K_backward | None:
        if a is None or b is None:
            return a
        before, after = max(a.before, b.before), max(a.after, b.after)
        peak = max(a.peak, before, after)
        return dataclasses.replace(a, before=before, peak=peak, after=after, extra=max(0, b.peak - peak))

    both = zip(k.nodes, turned.nodes, strict=True)
    nodes = tuple(dataclasses.replace(n, backward=of(n.backward, m.backward)) for n, m in both)
    return dataclasses.replace(k, nodes=nodes)


def _idle(s: S_graph, usage: Usage) -> frozenset[int]:
    """Nodes that lead only to outputs without gradient: autograd saves tensors for backwards that never run."""
    every = differentiated(s, [s.d.outputs[k] for k in differentiable(s.d)])
    fed = differentiated(s, usage.root_values(s.d))
    both = enumerate(zip(every, fed, strict=True))
    return frozenset(i for i, (possible, wanted) in both if possible and not wanted)


def _without_grad(s: S_graph, model: torch.nn.Module) -> frozenset[int]:
    with_grad = {name for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    return frozenset(v for v, x in s.d.sources.items() if s.d.values[v].requires_grad and x.key not in with_grad)
