"""Which outputs of a graph the step has let go, while it is observed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from rockmate.calls.member import Member
from rockmate.run.store import Store

_OF_PYTHON = 1
"""Uses of a memory, beside its tensors, once Python has seen it."""


class Outputs:
    """The outputs of one call of a graph, by their data in its problem, without holding them."""

    def __init__(self, member: Member, store: Store | None, result: Any) -> None:
        """``result``: what the call returned. ``store``: of the call; None if it ran as it was captured."""
        self.store = None if store is None else weakref.ref(store)
        k, tensors = member.planner.graphs.K, [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        d, held = k.s.d, {k.data[x].storage: x for x in k.held}
        self.memory: dict[int, StorageWeakRef] = {}
        if len(tensors) == len(d.outputs) - len(d.structure.assigned):
            for v, t in zip(d.outputs, tensors, strict=False):
                if d.values[v].storage in held and type(t) is torch.Tensor and t.layout == torch.strided:
                    self.memory[held[d.values[v].storage]] = StorageWeakRef(t.untyped_storage())

    def let_go(self) -> frozenset[int]:
        """Those that now nobody holds but perhaps the executor, for runs in the backward."""
        store = None if self.store is None else self.store()
        return frozenset(x for x, memory in self.memory.items() if _holders(memory) <= _held(store, x))


def _held(store: Store | None, x: int) -> int:
    """How many tensors of these data the executor has."""
    return 0 if store is None else len(store.live[x] or ())


def _holders(memory: StorageWeakRef) -> int:
    """How many tensors there are in ``memory``."""
    return 0 if memory.expired() else torch._C._storage_Use_Count(memory.cdata) - _OF_PYTHON
