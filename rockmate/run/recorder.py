"""The forward phase of one call: operations run once, in order, and autograd gets slots for what it would save."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from rkgb.program import in_mode
from rkgb.randomness import random_state
from rkgb.trace.preserved import drop_saved
from rockmate.run.program import NodeCode
from rockmate.run.slots import Finder, Slot, version_of
from rockmate.run.store import Store

_NOTHING = contextlib.nullcontext()


class Recorder:
    """Runs the forward phase and fills ``store``. Autograd's graph holds ``pack``, so nothing stays in the recorder.

    ``unpack``: makes of a slot what autograd saved. ``stop_before``: called with a node and its results where the
    schedule has steps before the node's backward. ``env``: values by number, while something in the forward phase reads
    them. ``packed``: what autograd saves of the node whose operations run, ``running``.
    """

    def __init__(
        self,
        store: Store,
        unpack: Callable[[Slot], torch.Tensor],
        stop_before: Callable[[int, list[torch.Tensor]], None],
    ) -> None:
        self.program, self.store, self.unpack, self.stop_before = store.program, store, unpack, stop_before
        self.env = dict(store.sources)
        self.packed: list[tuple[Slot, torch.Tensor]] = []
        self.running = -1

    def outputs(self) -> list[torch.Tensor]:
        """Run everything; the program's outputs, in autograd's graph."""
        p = self.program
        hooks, nothing = saved_tensors_hooks(self.pack, self.unpack), drop_saved()
        try:
            with in_mode(p.mode):
                for native, no_backward, start, stop in p.segments:
                    with nothing if no_backward else _NOTHING if native else hooks:
                        self.run(start, stop)
            for datum in p.handed_over:
                self.store.hand_over(datum)
            return [self.env[v] for v in p.s.d.outputs]
        finally:
            self.packed.clear()
            self.env.clear()

    def run(self, start: int, stop: int) -> None:
        """Run nodes, ``stop`` excluded."""
        env, packed = self.env, self.packed
        for i, function, code, keeps in self.program.forward[start:stop]:
            self.running = i
            if code.random:
                self.store.random[i] = [random_state(x) for x in code.random]
            function(env)
            if packed:
                self.settle(code)
            if keeps:
                self.keep(i, code)
            for v in code.first.dead_values:
                env.pop(v, None)

    def keep(self, i: int, code: NodeCode) -> None:
        """Hold what stays of node i's results, and stop its backward where there are steps to take before it."""
        env, store, differentiable = self.env, self.store, self.program.differentiable
        for v, datum in code.first.keeps:
            held = store.live[datum]
            if held is None:
                held = store.live[datum] = {}
            t = held[v] = env[v].detach().requires_grad_(v in differentiable)
            store.made_at[v] = t._version
        for v in code.first.aliases:
            store.given[v] = env[v].detach().requires_grad_(v in differentiable)
            store.versions[v] = version_of(env[v])
        if i in self.program.stage_of:
            self.stop_before(i, [env[v] for v in self.program.s.nodes[i].makes])

    def pack(self, t: torch.Tensor) -> Slot:
        """Autograd wants to save ``t``. Which tensor that is, ``settle`` finds when the node is done."""
        slot = Slot(self.running, t._version)
        self.packed.append((slot, t))
        return slot

    def settle(self, code: NodeCode) -> None:
        """The node is done: what autograd saved of it is what it reads, a result, or private to its backward.

        At each position that is what it was in the last call, which is verified, and searched for where it is not.
        """
        env, store, places = self.env, self.store, self.program.places[self.running]
        slots, readers = store.slots, store.readers
        private: dict[int, torch.Tensor] = {}
        finder: Finder | None = None
        for k, (slot, t) in enumerate(self.packed):
            place = places.get(k)
            if place is None or not (t is env.get(place.value) if place.exact else place.holds(t, env)):
                finder = finder or Finder(code.first.known, code.first.private, env)
                place = places[k] = finder.place_of(t)
            ref: Any = weakref.ref(slot)
            slots.append(ref)
            data = place.data
            if data < 0 or t._version != slot.version:  # the node itself has changed it: autograd's error comes
                slot.held = t if place.value >= 0 and t.grad_fn is None else t.detach()
                continue
            slot.place, slot.data = place, data
            readers[data].append(ref)
            if place.value < 0:
                slot.index, slot.version = len(private), t._version
                private[slot.index] = t.detach()
        self.packed.clear()
        if code.private in self.program.kept:
            store.live[code.private] = private
