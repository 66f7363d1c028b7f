"""What the run of a probe keeps account of: storages, states of generators, and the ends of values."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Sequence

import torch

from rkgb.graphs import B_graph, Node, Saved, Storage
from rkgb.probe.operations import is_python
from rkgb.randomness import RandomSource, node_generators, random_bytes
from rkgb.storages import memory_of, storage_key


class Storages:
    """The storages that the run has allocated or read; live ones are found by address."""

    def __init__(self) -> None:
        self.all: list[Storage] = []
        self.live: dict[int, int] = {}  # address -> index
        self.holders: dict[int, set[int]] = {}  # index -> live values in the storage

    def add(self, v: int, t: torch.Tensor, owner: int | None) -> int:
        """The storage of value ``v``; a new one is ``owner``'s, or of source ``v`` if that is None."""
        memory = memory_of(t)
        if memory._cdata not in self.live:
            self.live[memory._cdata] = len(self.all)
            self.all.append(Storage(memory.nbytes(), owner))
        s = self.live[memory._cdata]
        if owner is None:
            self.all[s] = dataclasses.replace(self.all[s], source=v)
        self.holders.setdefault(s, set()).add(v)
        return s

    def remove(self, v: int, t: torch.Tensor, s: int) -> None:
        """Forget value ``v``, the tensor ``t`` in storage ``s``."""
        self.holders[s].discard(v)
        if not self.holders[s]:
            del self.live[storage_key(t)]

    def saved(self, memory: list[torch.UntypedStorage]) -> Saved:
        """``memory``, as storages of the graph and bytes of others."""
        if not memory:
            return _NOTHING
        known = tuple(dict.fromkeys(self.live[x._cdata] for x in memory if x._cdata in self.live))
        return Saved(known, tuple({x._cdata: x.nbytes() for x in memory if x._cdata not in self.live}.values()))


_NOTHING = Saved((), ())


class Generators:
    """The states of the generators that operations may draw from, as bytes, which are compared fast."""

    def __init__(self, devices: tuple[torch.device, ...], own: Sequence[torch.Generator]) -> None:
        self.devices, self.own = devices, own
        self.states: dict[RandomSource, bytes] = {}

    def before(self, node: Node) -> Collection[RandomSource]:
        """What ``node`` may draw from, whose states are known from now on."""
        held = self.own if is_python(node) else node_generators(node)
        drawn: dict[RandomSource, None] = dict.fromkeys((*self.devices, *held))
        for x in drawn:
            if x not in self.states:
                self.states[x] = random_bytes(x)
        return drawn

    def moved(self, drawn: Collection[RandomSource]) -> tuple[RandomSource, ...]:
        """Those of ``drawn`` whose state is another one now."""
        if not drawn:
            return ()
        now = [(x, random_bytes(x)) for x in drawn]
        moved = tuple(x for x, state in now if self.states[x] != state)
        self.states.update(now)
        return moved


def ends(b: B_graph) -> dict[int, list[int]]:
    """The values that are freed after each node of B, because no later node reads them."""
    last = {v: k for k, n in enumerate(b.nodes) for v in (*n.outputs, *n.reads())}
    last.update(dict.fromkeys(b.outputs, len(b.nodes)))
    at: dict[int, list[int]] = defaultdict(list)
    for v, k in last.items():
        if v not in b.sources:
            at[k].append(v)
    return at
