"""The bytes of gradients at each moment of the backward phase, by the rules of autograd's engine.

Source of the rules: ``torch/csrc/autograd/input_buffer.cpp`` and ``functions/accumulate_grad.h``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch

from rkgb.cost.measure import Cost
from rkgb.cost.usage import Usage
from rkgb.graphs import D_graph, S_graph


def _written_views(s: S_graph) -> set[int]:
    """Results that are views of memory into which their own node writes after it took them, or through them.

    Autograd rebuilds the history of such a view at its first use. The backward of that history makes a gradient as
    large as the whole memory, as soon as the view's own gradient is there.
    """
    d, views = s.d, set()
    for node in s.nodes:
        written = {x: op for op in node.ops for x in d.facts[op].writes}  # by which operation last
        makers = {v: op for op in node.ops for v in d.nodes[op].outputs}
        for v in node.makes if written else ():
            x = d.values[v].storage
            taken = _taken(d, makers, v)
            if taken is not None and d.storages[x].owner != taken and written.get(x, -1) >= makers[v]:
                views.add(v)
    return views


def _taken(d: D_graph, makers: dict[int, int], v: int) -> int | None:
    """The operation that first made the tensor ``v``, which operations in place give back as another value."""
    x = d.values[v].storage
    while v in makers and x in d.facts[makers[v]].writes:
        v = next((u for u in d.nodes[makers[v]].reads() if d.values[u].storage == x), -1)
    return makers.get(v)


def _is_composite(op: Any) -> bool:
    """Whether an operator is made of others, each with a backward of its own."""
    if not isinstance(op, torch._ops.OpOverload):
        return True
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def _arrives_in_parts(s: S_graph, i: int) -> bool:
    """Whether the backward of node i is several of autograd's functions, so that nobody knows which gradient of an
    input comes first. The gradients that one function makes come in the order of its inputs.
    """
    return len(s.nodes[i].ops) > 1 or any(_is_composite(s.d.nodes[op].op) for op in s.nodes[i].ops)


class GradientBuffers:
    """For each value whose backward has not run yet, the memory that holds its gradient so far.

    A second contribution is added in place if the first is no view and nothing else refers to its memory; otherwise the
    sum takes new memory. The contributions to a parameter are added up, then go to ``.grad``, whose memory stays if the
    parameter had none before: their own, or a copy of a tensor that is another value's gradient, too.
    """

    def __init__(self, s: S_graph, costs: Sequence[Cost], usage: Usage, missing: frozenset[int]) -> None:
        self.s, self.costs, self.missing = s, costs, missing
        self.size: dict[int, int] = {}  # memory -> bytes
        self.holds: dict[int, int] = {}  # value -> memory
        self.tensor: dict[int, object] = {}  # value -> what tells its tensor from others in the same memory
        self.holders: dict[int, int] = {}  # memory -> how many values it holds
        self.live = 0  # bytes of all memory that holds something
        self.uses: dict[int, int] = {}  # source -> backwards still to contribute
        self.views: dict[int, int] = {}  # values whose gradient so far is a view, and bytes that it has if expanded
        self.viewed: dict[int, int] = {}  # the same of gradients that the node makes, by positions in what it reads
        for k, expanded in sorted(usage.viewed, reverse=True):  # with what is expanded least at last
            value = s.d.values[s.d.outputs[k]]
            self.views[s.d.outputs[k]] = value.bytes // math.prod(value.shape[dim] for dim in expanded)
        self.written = _written_views(s)
        for i, cost in enumerate(costs):
            for v in s.nodes[i].reads if cost.results else ():
                if v in s.d.sources and s.d.values[v].requires_grad:
                    self.uses[v] = self.uses.get(v, 0) + 1
        for v in usage.root_values(s.d):
            self._hold(v, self._new(s.d.values[v].bytes))

    def _new(self, size: int) -> int:
        self.size[len(self.size)] = size
        return len(self.size) - 1

    def _hold(self, v: int, memory: int, tensor: object = None) -> None:
        self._release(v)
        self.holds[v], self.tensor[v] = memory, tensor or object()
        self.holders[memory] = self.holders.get(memory, 0) + 1
        self.live += self.size[memory] if self.holders[memory] == 1 else 0

    def _release(self, v: int) -> int | None:
        memory = self.holds.pop(v, None)
        self.tensor.pop(v, None)
        if memory is not None:
            self.holders[memory] -= 1
            self.live -= 0 if self.holders[memory] else self.size[memory]
        return memory

    def _with(self, others: set[int]) -> int:
        """Bytes of all memory that holds something, and of ``others``."""
        return self.live + sum(self.size[m] for m in others if not self.holders.get(m))

    def _added(self, cost: Cost, incoming: list[int | None]) -> int:
        """Bytes that the backward adds. The memory of incoming gradients is freed with the last of them."""
        known = [m for m in incoming if m is not None]
        different = len(set(known))
        if any(self.holders.get(m) for m in known):
            return cost.held_peak
        if different == len(known):
            return cost.backward_peak
        if different > 1 or len(known) < len(incoming):
            return cost.held_peak
        # It may be less than was released where the peak was measured, as views overlap.
        return max(cost.together_peak, cost.held_peak - self.size[known[0]])

    def backward(self, i: int) -> tuple[int, int, int]:
        """Bytes of gradients before, at the worst moment of, and after the backward of node i."""
        s, node, cost = self.s, self.s.nodes[i], self.costs[i]
        before = self.live
        came = [self.tensor.get(node.makes[k]) for k in cost.results]
        self._note_views(node.reads, cost, [self.views.pop(node.makes[k], None) for k in cost.results])
        incoming = [self._release(node.makes[k]) for k in cost.results]
        # Gradients that were measured with, and never come, since their readers have none for what they read.
        absent = sum(s.d.values[node.makes[k]].bytes for k, m in zip(cost.results, incoming, strict=True) if m is None)
        peak = before + self._added(cost, incoming) - max(0, cost.incoming - absent)
        arrived: dict[int, int] = {}  # position in reads -> memory
        tensors: dict[int, object] = {}  # position in reads -> what tells the tensor from others
        for position, gradient in sorted(enumerate(cost.inputs), key=lambda item: node.reads[item[0]] in self.uses):
            if gradient is None:  # parameters come last, as they were measured
                continue
            kind, k = gradient.shares or ("", 0)
            shared = incoming[k] if kind == "result" else arrived[k] if kind == "input" else None
            arrived[position] = self._new(gradient.bytes) if shared is None else shared
            known = came[k] if kind == "result" else tensors.get(k)
            tensors[position] = known if gradient.alias and known else object()
        order = [position for position in arrived if node.reads[position] not in self.uses]
        added = any(node.reads[position] in self.holds for position in order)
        if added and len(order) > 1 and _arrives_in_parts(s, i):
            trial = copy.copy(self)
            for name in ("size", "holds", "holders", "views", "tensor"):
                setattr(trial, name, getattr(self, name).copy())
            peak = max(peak, trial._arrive(i, arrived, tensors, order[::-1]))
        peak = max(peak, self._arrive(i, arrived, tensors, order))
        peak = max(peak, self._parameters(node.reads, cost, arrived, tensors))
        after = self.live
        return before, max(peak, before, after), after

    def _note_views(self, reads: Sequence[int], cost: Cost, came: Sequence[int | None]) -> None:
        """Which gradients of what the node ``reads`` are views: those that were measured so, and incoming ones that are
        views and are handed on. ``came``: of each incoming one the same as in ``views``, None if it is no view.
        """
        self.viewed = {position: self.s.d.values[reads[position]].bytes for position in cost.views}
        for position, gradient in enumerate(cost.inputs):
            if gradient is not None and gradient.alias and gradient.shares is not None:
                kind, k = gradient.shares
                size = came[k] if kind == "result" else self.viewed.get(k)
                if size is not None:
                    self.viewed.setdefault(position, size)

    def _arrive(self, i: int, arrived: dict[int, int], tensors: dict[int, object], order: Sequence[int]) -> int:
        """Add what ``arrived``, in the ``order`` of positions. Returns the peak of all gradients (bytes)."""
        peak, node, waiting = 0, self.s.nodes[i], dict(arrived)
        for position in order:
            v, memory = node.reads[position], waiting.pop(position)
            first = self.holds.get(v)
            if first is None:
                if v in self.written:
                    memory = self._new(self.s.d.storages[self.s.d.values[v].storage].bytes)
                self._hold(v, memory, tensors[position] if v not in self.written else None)
                if position in self.viewed:
                    self.views[v] = self.viewed[position]
                continue
            others, size = {*waiting.values(), memory}, self.s.d.values[v].bytes
            expanded = self.views.pop(v, None)
            if self.holders[first] > 1 or first in others or expanded == size:
                self._hold(v, self._new(size))
                expanded = 0
            # What is expanded counts as if it had its memory, which the sum takes.
            peak = max(peak, self._with(others | {first}) + (expanded or 0))
        return peak

    def _parameters(
        self, reads: tuple[int, ...], cost: Cost, arrived: dict[int, int], tensors: dict[int, object]
    ) -> int:
        """Add the contributions to parameters, which are all there at first. Returns the peak of all gradients (bytes)
        meanwhile.
        """
        peak, waiting = 0, {p: memory for p, memory in arrived.items() if reads[p] in self.uses}
        for position, v in enumerate(reads):
            if v not in self.uses:
                continue
            self.uses[v] -= 1
            size = self.s.d.values[v].bytes
            gradient = cost.inputs[position]
            if v not in self.holds:
                if gradient is None or (gradient.copied and not self.uses[v]):
                    self._hold(v, self._new(size))
                else:
                    self._hold(v, arrived[position], tensors[position])
                if position in self.viewed:
                    self.views[v] = self.viewed[position]
            elif v in self.views or self.holders[self.holds[v]] > 1:
                others = {memory for p, memory in waiting.items() if p != position}
                peak = max(peak, self._with(others) + 2 * size)
                self._hold(v, self._new(size))
                self.views.pop(v, None)
            elif position in arrived and gradient is not None and gradient.sparse:
                second, first = self.size[arrived[position]], self.size[self.holds[v]]
                peak = max(peak, self.live + first + 2 * second)
                self._hold(v, self._new(first + second))
            if not self.uses[v] and v not in self.missing:
                self._release(v)
            elif not self.uses[v] and [*self.tensor.values()].count(self.tensor[v]) > 1:
                self._hold(v, self._new(size))
        return peak
