"""D: the data-flow graph. One run of B shows what each operation reads, shares, changes and saves.

An operator's schema does not say everything: dropout returns its input if p is 0, batch norm changes its statistics.
So storages, version counters, contents of buffers and generator states are compared before and after each operation.
The writes that a schema declares count, too: an observer of quantization may write the value that was there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from rkgb.Btools import PRIMITIVES
from rkgb.errors import UnsupportedError
from rkgb.graphs import B_graph, D_graph, Facts, Node, Ref, Value
from rkgb.probe.contexts import context_tensors, next_number
from rkgb.probe.decompose import parts
from rkgb.probe.names import with_display_names
from rkgb.probe.operations import announced_writes, check_results, is_python
from rkgb.probe.tracked import Generators, Storages, ends
from rkgb.program import computed, in_mode, same, source_values
from rkgb.randomness import draws_unseen, node_generators, own_generators, watched_devices
from rkgb.sample import Sample, call_of
from rkgb.storages import counter_of, memory_of, storage_key, version_of
from rkgb.trace.guards import Guard, is_guard
from rkgb.trace.meta import node_on, run_on_meta, stood_for
from rkgb.trace.preserved import drop_saved, preserved
from rkgb.trace.quick import QuickRules

_DRAW_BY_VALUES = frozenset("poisson binomial rrelu rrelu_ rrelu_with_noise rrelu_with_noise_".split())

_SHAPE_QUESTIONS = frozenset({"size", "device", "dtype", "dim", "numel", "len", "sym_size", "stride"})


def B_to_D(b: B_graph, model: torch.nn.Module, sample: Sample, sample_kwargs: dict[str, Any] | None = None) -> D_graph:
    """Run ``b`` once on the sample, with no tensors saved, and record values, storages and facts of nodes.

    Peak memory is that of inference. Raises ``TraceError`` for an operation that returns no tensor, and
    ``UnsupportedError`` for sparse and nested tensors.
    """
    return probe(b, model, call_of(sample, sample_kwargs).tensors).graph


class Probed(NamedTuple):
    """The result of a run: D, the outputs, and whether torch itself read numbers from tensors (D guards these)."""

    graph: D_graph
    outputs: list[torch.Tensor]
    numbers_read: bool


def probe(b: B_graph, model: torch.nn.Module, inputs: list[torch.Tensor]) -> Probed:
    """Run ``b`` on ``inputs``, and record what each node does. Buffers, inputs and random state are restored."""
    run, outputs = _run(b, model, inputs, None)
    d = with_display_names(_without_dead(run.graph()))
    d.verify()
    return Probed(d, outputs, run.numbers_read)


def probe_again(
    b: B_graph,
    model: torch.nn.Module,
    inputs: list[torch.Tensor],
    device: torch.device | None = None,
    numbers: Sequence[int] = (),
) -> D_graph:
    """D of ``b``, whose nodes are named elsewhere. ``device``: all is on the meta device, which stands for this one.
    ``numbers``: the whole numbers among the arguments, if ``b`` is of any size.
    """
    return _without_dead(_run(b, model, inputs, device, numbers)[0].graph())


def _run(
    b: B_graph,
    model: torch.nn.Module,
    inputs: list[torch.Tensor],
    device: torch.device | None,
    numbers: Sequence[int] = (),
) -> tuple[_Probe, list[torch.Tensor]]:
    with preserved(model, inputs, b.structure.written), torch.enable_grad(), drop_saved():
        own = own_generators(model.modules())
        folded = {v: torch.tensor(numbers[s.key]) for v, s in b.sources.items() if s.kind == "number"}
        b = dataclasses.replace(b, sources={v: s for v, s in b.sources.items() if v not in folded}) if folded else b
        run = _Probe(b, source_values(b.sources, model, inputs), own, device)
        run.folded.update(folded)
        packed = run.packed  # hooks live as long as the graph, and must not hold the run
        for mode, nodes in itertools.groupby(enumerate(b.nodes), lambda x: x[1].mode):
            with in_mode(mode), saved_tensors_hooks(packed.append, _refuse):
                for index, node in nodes:
                    run.node(index, node)
        run.refuse_lost_gradients()
        return run, [run.env[v].detach() for v in b.outputs]


def _counts(t: torch.Tensor) -> bool:
    """Whether ``t`` has a version counter that a tensor without memory can have, too."""
    return t.layout == torch.strided and not t.is_inference()


class _Probe:
    """The run of ``b``: its live tensors and folded numbers, and the record of values and nodes."""

    def __init__(
        self,
        b: B_graph,
        sources: dict[int, torch.Tensor],
        own: Sequence[torch.Generator],
        device: torch.device | None,
    ) -> None:
        """``device``: what the meta device stands for."""
        self.b, self.device, self.rules = b, device, QuickRules()
        self.names = list(b.names)
        self.env: dict[int, torch.Tensor] = {}
        self.folded: dict[int, Any] = {}
        self.values: dict[int, Value] = {}
        self.storages = Storages()
        self.generators = Generators(() if device else watched_devices(sources.values()), own)
        self.ends = ends(b)
        self.numbers_read = False
        self.packed: list[torch.Tensor] = []  # by the node that runs; held so that addresses tell them apart
        self.savers: dict[int, list[tuple[int, torch.Tensor, int]]] = defaultdict(list)  # of each storage: see _spoil
        self.severed: set[int] = set()  # values that have a gradient, and hand it on to none
        self.nodes: list[Node] = []
        self.facts: list[Facts] = []
        for v, tensor in sources.items():
            self._define(v, tensor, None)

    def _define(self, v: int, t: torch.Tensor, owner: int | None) -> None:
        self.env[v] = t
        s = self.storages.add(v, t, owner)
        size = t.numel() * t.element_size()
        stride = tuple(t.stride()) if t.layout == torch.strided else ()
        self.values[v] = Value(tuple(t.shape), stride, t.dtype, self._device_of(t), self._gets_gradients(v), s, size)

    def _gets_gradients(self, v: int) -> bool:
        """Whether gradients of ``v`` go on to what it is computed from.

        A view that is taken under ``no_grad`` of what requires a gradient says that it does, too, and is a leaf.
        """
        return self.env[v].requires_grad and v not in self.severed

    def _sever(self, node: Node, results: Sequence[torch.Tensor]) -> None:
        """Note which of the ``results`` of ``node`` hand on no gradient, though they have one."""
        reads = node.reads()
        lost = any(v in self.severed for v in reads) and not any(self._gets_gradients(v) for v in reads)
        for v, t in zip(node.outputs, results, strict=True):
            if t.requires_grad and (lost or (t.grad_fn is None and t._is_view())):
                self.severed.add(v)

    def refuse_lost_gradients(self) -> None:
        """Raise ``UnsupportedError`` where an output gets a gradient that goes on to none of the sources."""
        lost = next((self.names[v] for v in self.b.outputs if v in self.severed), None)
        if lost is not None:
            raise UnsupportedError(
                f"forward returns {lost}, which is computed from a view taken under torch.no_grad(): autograd computes "
                "a gradient for the view, which no plan of a graph has. Take the view's detach() there"
            )

    def node(self, index: int, node: Node) -> None:
        reads = node.reads()
        if self._is_number(node, reads):
            self._fold(node)
        elif node.name in PRIMITIVES and node.name != "data":  # torch itself read a number from a tensor
            self._fold(node)
            self.numbers_read = True
            guard = Guard(node.op, node.name, self.folded[node.outputs[0]], node.line)
            self._run(self._with_numbers(dataclasses.replace(node, op=guard, name="guard", outputs=())))
        else:
            node = self._with_numbers(node)
            for part in parts(node, self.env.__getitem__, self._new_value, self._device_of):
                self._run(part)
                self.ends[index] += [v for v in part.outputs if v >= len(self.b.names)]
        for v in self.ends[index]:
            if v in self.env:
                self.storages.remove(v, self.env.pop(v), self.values[v].storage)

    def _new_value(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def _is_number(self, node: Node, reads: tuple[int, ...]) -> bool:
        """Whether the node computes a number from sizes. A node that makes a tensor of sizes (arange) does not."""
        if node.name in _SHAPE_QUESTIONS:
            return True
        if not reads or not all(v in self.folded for v in reads):
            return False
        if is_guard(node):
            return True
        return node.name in PRIMITIVES or any(isinstance(self.folded[v], torch.Tensor) for v in reads)

    def _fold(self, node: Node) -> None:
        with torch.no_grad():
            results = computed(node, lambda v: self.folded[v] if v in self.folded else self.env[v])
        self.folded.update(zip(node.outputs, results, strict=True))

    def _with_numbers(self, node: Node) -> Node:
        """``node`` with the numbers that are known in place of the values that have them."""
        if not any(v in self.folded for v in node.reads()):
            return node
        return node.with_values(lambda v: self.folded[v] if v in self.folded else Ref(v))

    def _run(self, node: Node) -> None:
        reads = node.reads()
        drawn = self.generators.before(node)
        versions = {v: version_of(self.env[v]) for v in reads}
        contents = {v: self.env[v].detach().clone() for v in reads if self._changes_unseen(node, v)}
        self.packed.clear()
        first = next_number()
        if self.device is None:
            results = computed(node, self.env.__getitem__)
        else:
            runs = run_on_meta(node, self.device)
            with self.rules:
                results = computed(runs, self.env.__getitem__)
        check_results(node, results)
        unseen = self.device is None and draws_unseen(node, [self.env[v] for v in reads])
        moved = self.generators.moved(drawn)
        if not moved and node.name in _DRAW_BY_VALUES:  # it may not have drawn for these
            moved = tuple(node_generators(node)) or (self.env[reads[0]].device,)
        if self.rules.drawn:
            moved = tuple(node_generators(node)) or tuple(dict.fromkeys(map(self._device_of, results)))
        counted = {v for v in reads if version_of(self.env[v]) != versions[v]}
        changed = announced_writes(node) | counted
        changed |= {v for v, content in contents.items() if not same(content, self.env[v])}
        self._sever(node, results)
        for v, t in zip(node.outputs, results, strict=True):
            self._define(v, t, len(self.nodes))
        saved = self.storages.saved([memory_of(t) for t in self.packed])
        counters = [(self.storages.live.get(storage_key(t)), self._counter(t)) for t in self.packed if _counts(t)]
        self.packed.clear()
        here = {t.device for t in results}
        kept = [memory_of(t) for t in context_tensors(results, first) if t.device in here]
        writes = tuple(dict.fromkeys(self.values[v].storage for v in reads if v in changed))
        for v in (v for s in writes for v in self.storages.holders[s]):  # a write may bring gradients to memory
            self.values[v] = dataclasses.replace(self.values[v], requires_grad=self._gets_gradients(v))
        self._spoil(counted)
        for storage, counter in counters:
            if storage is not None:
                self.savers[storage].append((len(self.nodes), counter, counter._version))
        self.nodes.append(node if self.device is None else node_on(node, self.device))
        self.facts.append(Facts(writes, moved, saved, unseen, self.storages.saved(kept)))

    def _counter(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor with the version counter of ``t``, and no memory."""
        return t if t.is_meta else counter_of(t)

    def _spoil(self, counted: set[int]) -> None:
        """The values ``counted`` were changed in place: autograd refuses the backwards that have saved these tensors,
        as their counters tell. Others in the same memory may have counters of their own (``.data``, ``unsafe_chunk``).
        """
        for storage in {self.values[v].storage for v in counted}:
            for k, counter, version in self.savers[storage]:
                if counter._version != version:
                    self.facts[k] = dataclasses.replace(self.facts[k], spoilt=True)

    def _changes_unseen(self, node: Node, v: int) -> bool:
        """Whether the node may change ``v`` without the version counter showing it."""
        if self.env[v].is_meta or self.env[v].layout != torch.strided:
            return False
        is_buffer = v in self.b.sources and self.b.sources[v].kind == "buffer"
        return is_buffer or self.env[v].is_inference() or is_python(node)  # Python may write into .data

    def _device_of(self, t: torch.Tensor) -> torch.device:
        return t.device if self.device is None else stood_for(t.device, self.device)

    def graph(self) -> D_graph:
        b = self.b
        values = {v: self.values[v] for v in sorted(self.values)}
        return D_graph(
            tuple(self.names),
            b.sources,
            tuple(self.nodes),
            b.outputs,
            b.structure,
            values,
            tuple(self.storages.all),
            tuple(self.facts),
            made_by=(*b.made_by, "probe"),
        )


def _refuse(_: None) -> torch.Tensor:
    raise RuntimeError("backward ran inside forward")


def _without_dead(d: D_graph) -> D_graph:
    """Remove the nodes that neither make a needed value, nor change a buffer or an input, nor draw random numbers.

    Guards are not removed.
    """
    needed = set(d.outputs)
    written: set[int] = {d.values[v].storage for v in d.outputs} | {
        s for s, storage in enumerate(d.storages) if storage.owner is None
    }
    keep = []
    for k in reversed(range(len(d.nodes))):
        node, facts = d.nodes[k], d.facts[k]
        effective = is_guard(node) or facts.random or written & set(facts.writes)
        if effective or needed & set(node.outputs):
            keep.append(k)
            needed.update(node.reads())
            written.update(d.values[v].storage for v in (*node.reads(), *node.outputs))
    keep.reverse()
    number = {old: new for new, old in enumerate(keep)}
    storages = tuple(
        dataclasses.replace(s, owner=number.get(s.owner)) if s.owner is not None else s for s in d.storages
    )
    made = {v for k in keep for v in d.nodes[k].outputs}
    values = {v: d.values[v] for v in d.values if v in d.sources or v in made}
    return dataclasses.replace(
        d,
        nodes=tuple(d.nodes[k] for k in keep),
        facts=tuple(d.facts[k] for k in keep),
        storages=storages,
        values=values,
    )
