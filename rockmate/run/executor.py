"""Run a model under a schedule, with autograd's own graph.

The forward phase runs every operation once, in order, with gradients on: autograd records exactly the graph that eager
mode records. Only what it would *save* is taken from it (``saved_tensors_hooks``): the graph holds slots, and each slot
names a datum that is live in the call's store or not. Dropping a tensor is forgetting a datum; recomputing it is
running its node again and filling the slots anew. A hook before a backward takes the schedule's steps for it.
Gradients, hooks, accumulation into ``.grad``, ``retain_graph`` and double backward are therefore autograd's own.

A call has three parts: ``recorder`` runs the forward phase, ``store`` holds tensors and recomputes them, ``backward``
takes the schedule's steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rkgb.program import in_mode
from rockmate.run.backward import Backward
from rockmate.run.functions import Whole
from rockmate.run.program import Program
from rockmate.run.recorder import Recorder
from rockmate.run.slots import Slot, changed
from rockmate.run.store import Store
from rockmate.run.watch import TimedBackward, Watch, WatchedBackward, WatchedRecorder


class CallState:
    """One call. The hooks in its autograd graph own it, so it goes when the graph goes."""

    def __init__(
        self, program: Program, sources: dict[int, torch.Tensor], timed: Callable[[int, int], None] | None = None
    ) -> None:
        """``sources``: the tensors that the program starts from, as ``source_values`` looks them up. ``timed``: see
        ``TimedBackward``.
        """
        self.program = program
        self.store = Store(program, sources)
        self.watched = Watch.current is not None
        if self.watched:
            self.backward: Backward = WatchedBackward(self.store)
        elif timed is not None:
            self.backward = TimedBackward(self.store, timed)
        else:
            self.backward = Backward(self.store)

    def forward(self) -> list[torch.Tensor]:
        """The program's outputs, in autograd's graph."""
        whole = None if self.watched else self.program.whole
        if whole is None:
            recorder = WatchedRecorder if self.watched else Recorder
            outputs = recorder(self.store, self.unpack, self.backward.stop_before).outputs()
        else:
            outputs = self._run(whole)
        if self.program.exceeding:
            self.backward.watch_outputs(outputs)
        return outputs

    def _run(self, whole: Whole) -> list[torch.Tensor]:
        """The outputs, where nothing is to be held: autograd keeps what it saves."""
        try:
            with in_mode(self.program.mode):
                return whole(self.store.sources)
        finally:
            self.store.clear()

    def unpack(self, slot: Slot) -> torch.Tensor:
        """The tensor that autograd saved; computed again if the schedule has dropped it."""
        if slot.data < 0:
            assert slot.held is not None
            return _unchanged(slot.held, slot.version)
        held = slot.datum or self.store.live[slot.data]
        if held is None:
            held = self._made_for(slot)
        if slot.index >= 0:
            return _unchanged(held[slot.index], slot.version)
        for v, value in held.items():
            if value._version != self.store.made_at[v]:
                raise changed(self.program.s.d.names[v], value, self.store.made_at[v])
        return slot.place.tensor_in(held)

    def _made_for(self, slot: Slot) -> dict[int, torch.Tensor]:
        """The datum of ``slot``, which is not live: by the steps of a stage that was left out, or outside of any."""
        self.backward.catch_up(slot.node)
        if slot.datum is None:
            self.store.need(slot.data)
        return slot.datum or self.store.live[slot.data]  # type: ignore[return-value] # it is live now


def _unchanged(t: torch.Tensor, then: int) -> torch.Tensor:
    """``t``, unless it was changed in place since version ``then``."""
    if t._version != then:
        raise changed(f"a tensor of shape {list(t.shape)}", t, then)
    return t
