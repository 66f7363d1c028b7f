"""The tensors of one call: what stays from the forward, what was dropped, and how it is computed again."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterator

import torch

from rkgb.randomness import drawing_again
from rkgb.settings import settings
from rkgb.storages import storage_key
from rkgb.trace.preserved import drop_saved
from rockmate.calls.surroundings import ANOTHER, running_in, warn_unplanned
from rockmate.errors import GoneError
from rockmate.run.program import NodeCode, Program
from rockmate.run.slots import Slot, changed, version_of

_FORGET = drop_saved()
_NOTHING = contextlib.nullcontext()


class Store:
    """What one call holds of each datum, and the slots that autograd holds for it.

    ``sources``: the tensors that the program starts from. ``given``: these, and results in memory of one, detached
    where second runs read them: they may be given other memory before the backward. ``versions``: of these.
    ``live``: of each datum its values, or its private tensors by their numbers; None where it is dropped, though slots
    may still hold it. ``made_at``: the version of each value when it was made; values of one datum may count apart.
    ``random``: generator states before the first run of each node that may run again. ``slots``: all, in the order of
    the nodes; ``readers``: those of each datum. ``settings``: of torch, when the forward ran.
    """

    def __init__(self, program: Program, sources: dict[int, torch.Tensor]) -> None:
        self.program = program
        self.sources = sources
        self.given = dict(self._given(sources))
        self.versions = {v: version_of(t) for v, t in self.given.items()}
        self.live: list[dict[int, torch.Tensor] | None] = [None] * len(program.owner)
        self.made_at: dict[int, int] = {}
        self.random: dict[int, list[torch.Tensor]] = {}
        self.slots: list[weakref.ref[Slot]] = []
        self.readers: defaultdict[int, list[weakref.ref[Slot]]] = defaultdict(list)
        self.warned = False
        self.settings = settings()

    def _given(self, sources: dict[int, torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        read_again = self.program.read_again
        for v, t in sources.items():
            if not t.requires_grad:
                yield v, t.detach()
            else:
                yield v, t.detach().requires_grad_() if v in read_again else t

    # -------------------------------------------------------------------------- keep and drop

    def drop_from_slots(self, datum: int) -> None:
        """Forget ``datum`` where the forward did not keep it: it was made for a part of the graph that is left out."""
        if datum not in self.program.kept:
            for ref in self.readers[datum]:
                slot = ref()
                if slot is not None:
                    slot.datum = None

    def hand_over(self, datum: int) -> None:
        """Leave ``datum`` to its slots: a result goes with the last of them, each private tensor with its own."""
        held = self.live[datum]
        if held is not None:
            self.live[datum] = None
            for ref in self.readers[datum]:
                slot = ref()
                if slot is not None:
                    slot.datum = held if slot.index < 0 else {slot.index: held[slot.index]}

    @property
    def spent(self) -> bool:
        """Whether no slot is left: the graph was freed, and nothing is needed any more."""
        return all(ref() is None for ref in self.slots)

    def clear(self) -> None:
        self.live[:] = [None] * len(self.live)
        self.given.clear()
        self.sources.clear()
        self.random.clear()

    def as_after_forward(self) -> None:
        """Hold what the forward kept and nothing else, also what was handed over to slots meanwhile."""
        kept = self.program.kept
        for datum in range(len(self.live)):
            if datum not in kept:
                self.live[datum] = None
        for slot in (ref() for ref in self.slots):
            if slot is not None and slot.datum is not None and slot.data not in self.program.handed_over:
                if slot.data in kept:
                    self.live[slot.data] = {**(self.live[slot.data] or {}), **slot.datum}
                slot.datum = None

    # ---------------------------------------------------------------------------- second runs

    def run_again(self, i: int) -> None:
        """Recompute node i from live data: its results and what its backward reads. The caller sets the mode."""
        code = self.program.nodes[i]
        env = self._read(code)
        if not code.random:
            private = self._run(i, code, env)
        elif i in self.random:
            with drawing_again(code.random, self.random[i]):
                private = self._run(i, code, env)
        else:
            raise self._gone(i)
        again, differentiable = code.again, self.program.differentiable
        for datum in again.data:
            self.live[datum] = {}
        for v, datum in again.values:
            t = self.live[datum][v] = env[v].detach()  # type: ignore[index] # it was just made
            if v in differentiable:
                t.requires_grad_()
            self.made_at[v] = t._version
        if code.private is not None:
            self.live[code.private] = private

    def _read(self, code: NodeCode) -> dict[int, torch.Tensor]:
        """What a second run of the node reads, unchanged since it was made."""
        env: dict[int, torch.Tensor] = {}
        for v, datum in code.again.inputs:
            if datum < 0:
                t, then = self.given[v], self.versions[v]
                if then < 0:  # a tensor of inference mode does not count its changes
                    env[v] = t
                    continue
            else:
                held = self.live[datum]
                if held is None:
                    self.need(datum)
                    held = self.live[datum]
                t, then = held[v], self.made_at[v]  # type: ignore[index] # it is live now
            if t._version != then:
                raise changed(self.program.s.d.names[v], t, then)
            env[v] = t
        for v in code.again.statistics:  # the node's results do not depend on them
            env[v] = self.given[v].clone()
        return env

    def _run(self, i: int, code: NodeCode, env: dict[int, torch.Tensor]) -> dict[int, torch.Tensor] | None:
        """Run the node's operations in ``env``; the tensors that only their backward reads, if any are needed."""
        run = self.program.reruns[i]
        if code.private is None:
            with _FORGET if code.again.recorded and self.program.s.nodes[i].saved.private else _NOTHING:
                run(env)
            return None
        known = {storage_key(t) for t in env.values()}
        packed: list[torch.Tensor] = []
        try:
            with drop_saved(packed.append):  # results may outlive what is packed
                run(env)
            known.update(storage_key(env[v]) for v, _ in code.made)
            return dict(enumerate([t.detach() for t in packed if storage_key(t) not in known]))
        finally:
            packed.clear()  # autograd's graph holds the hook, and the list the graph

    def need(self, datum: int) -> None:
        """Make ``datum`` live outside of the schedule, for second backwards and backwards of a part of the graph."""
        if self.live[datum] is not None:
            return
        missing: set[int] = set()
        left = [datum]
        while left:
            owner = self.program.owner[left.pop()]
            if owner in missing:
                continue
            missing.add(owner)
            possible = self.program.nodes[owner].again.possible
            if not possible or (self.program.s.nodes[owner].random and owner not in self.random):
                raise self._gone(owner)
            left += [d for d in self.program.read_by(owner) if self.live[d] is None]
        self.warn_unplanned(ANOTHER)
        # Whatever surrounds the reader: autocast, another backward, none.
        with running_in(self.program.mode, self.settings):
            for i in sorted(missing):
                self.run_again(i)

    # -------------------------------------------------------------------------- what is said

    def warn_unplanned(self, why: str) -> None:
        """Say once that the budget is not promised for this call."""
        if not self.warned:
            self.warned = True
            warn_unplanned(why)

    def _gone(self, i: int) -> GoneError:
        return GoneError(
            f"{self.program.s.nodes[i].label} must run again for this backward, which the plan did not foresee (a "
            "second backward, or one of a part of the graph). Call forward again before it."
        )
