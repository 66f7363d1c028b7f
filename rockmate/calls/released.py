"""What a step that is observed does with the outputs of a graph: lets them go, and computes with them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from rockmate.calls.member import Member
from rockmate.calls.observe import sequence_number
from rockmate.run.store import Store

_OF_PYTHON = 1
"""Uses of a memory, beside its tensors, once Python has seen it."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """Of an output. ``place``: where it lies; ``bytes``: that it takes; ``size``: bytes of its numbers. ``shared``:
    others than the hook that it is given to hold it, as a sum hands one gradient to all that it adds. Where torch does
    not tell, they may.
    """

    place: int
    bytes: int
    size: int
    shared: bool

    @classmethod
    def of(cls, t: torch.Tensor) -> Gradient:
        """Of ``t``, within a hook that it is given to."""
        uses = getattr(t, "_use_count", None)
        shared = uses is None or uses() > _OF_A_HOOK
        size = t.numel() * t.element_size()
        if t.layout != torch.strided or not torch._C._has_storage(t):  # sparse, or of several backwards at once (vmap)
            return cls(-id(t), size, size, shared)
        # Its storage is not asked: what Python has seen of it, autograd no longer adds to in place.
        extent = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        return cls(t.data_ptr(), extent * t.element_size(), size, shared)


def bytes_that_came(here: Collection[Gradient], handed: Collection[list[Gradient]]) -> tuple[int, int]:
    """Bytes of the gradients that are there when the backward comes to a graph, and of those of them that others read.

    ``here``: those that its first node gets. ``handed``: to each of its outputs. Several for one are summed.
    """
    sums = [max(x.size for x in several) for several in handed if len(several) > 1]
    alone = {x.place: x for one in handed if len(one) == 1 for x in one}
    for x in here:
        if x.size not in sums:
            alone.setdefault(x.place, x)
    return sum(sums) + sum(x.bytes for x in alone.values()), sum(x.bytes for x in alone.values() if x.shared)


_OF_A_HOOK = 2
"""Uses of a gradient within a hook: by autograd, which hands it over, and by Python."""


class Spared:
    """Outputs of one call that its step is planned to let go before the backward comes, and the graph not to need."""

    def __init__(self, member: Member, k: int, gone: Collection[int], store: Store, result: Any) -> None:
        """``k``: the choice that ran; ``gone``: outputs, by their data. ``store``, ``result``: see ``Outputs``."""
        self.store = weakref.ref(store)
        tensors = tensors_of(member, result) if gone else ()
        place = {x: n for n, x in enumerate(member.output_data)}
        spared = [x for x in gone if member.spare(k, (x,))] if tensors else []
        self.memory = {x: StorageWeakRef(tensors[place[x]].untyped_storage()) for x in spared}

    def let_go(self) -> bool:
        """Whether nobody holds them now."""
        store = self.store()
        return all(_holders(memory) <= _held(store, x) for x, memory in self.memory.items())


def tensors_of(member: Member, result: Any) -> list[torch.Tensor]:
    """The outputs in what a call returned; none where they are not what the graph says."""
    d = member.planner.graphs.D
    tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    return tensors if len(tensors) == len(d.outputs) - len(d.structure.assigned) else []


class Outputs:
    """The outputs of one call of a graph, without holding them.

    ``memory``: of each, by its data in the graph's problem. ``edges``: their places in autograd's graph, and which
    outputs these are, by position. ``end``: of what is made there from now on, the least number. ``roots``: outputs
    that code behind the graph computes with, on the way to the loss; at first all, since nothing is known. ``came``:
    of each root, the gradients that such code has handed over.
    """

    def __init__(self, member: Member, store: Store, result: Any) -> None:
        """``result``: what the call returned. ``store``: of the call."""
        self.store = weakref.ref(store)
        self.memory: dict[int, StorageWeakRef] = {}
        self.edges: dict[tuple[int, int], int] = {}
        self.end = sequence_number()
        self.roots = frozenset(member.planner.graphs.K.usage.roots)
        self.came: dict[int, list[Gradient]] = {}
        for n, (x, t) in enumerate(zip(member.output_data, tensors_of(member, result), strict=False)):
            if t.grad_fn is not None:
                self.edges[t.grad_fn._sequence_nr(), t.output_nr] = n
            if x is not None and type(t) is torch.Tensor and t.layout == torch.strided:
                self.memory[x] = StorageWeakRef(t.untyped_storage())

    def note(self, n: int, k: int, gradients: Sequence[torch.Tensor | None], _: Any) -> None:
        """A node hands over ``gradients``, of which number ``k`` is for output ``n``."""
        gradient = gradients[k]
        if gradient is not None:
            self.came.setdefault(n, []).append(Gradient.of(gradient))

    def let_go(self) -> frozenset[int]:
        """Those that now nobody holds but perhaps the executor, for runs in the backward."""
        store = self.store()
        return frozenset(x for x, memory in self.memory.items() if _holders(memory) <= _held(store, x))


def find_roots(calls: Sequence[Outputs], ends: Sequence[Any]) -> bool:
    """A backward from ``ends`` begins: find the roots of each of the ``calls`` of one step. Whether it has one, or no
    call has outputs in autograd's graph.
    """
    of = {edge: (call, n) for call in calls for edge, n in call.edges.items()}
    found: dict[Outputs, set[int]] = {call: set() for call in calls if call.edges}
    starts = [(e.grad_fn, e.output_nr) if isinstance(e, torch.Tensor) else (e.node, e.output_nr) for e in ends]
    left: list[tuple[Any, int, tuple[Any, int]]] = [(None, -1, edge) for edge in starts]
    known: set[Any] = set()
    while left:
        reader, k, (function, place) = left.pop()
        if function is None:
            continue
        call, n = of.get((function._sequence_nr(), place), (None, -1))
        if call is not None and (reader is None or reader._sequence_nr() >= call.end):
            found[call].add(n)
            if reader is not None:
                reader.register_hook(partial(call.note, n, k))
        if function not in known:
            known.add(function)
            left += [(function, i, edge) for i, edge in enumerate(function.next_functions)]
    for call, roots in found.items():
        call.roots = frozenset(roots)
    return not found or any(found.values())


def _held(store: Store | None, x: int) -> int:
    """How many tensors of these data the executor has."""
    return 0 if store is None else len(store.live[x] or ())


def _holders(memory: StorageWeakRef) -> int:
    """How many tensors there are in ``memory``."""
    return 0 if memory.expired() else torch._C._storage_Use_Count(memory.cdata) - _OF_PYTHON
