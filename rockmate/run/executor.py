"""Run a model under a schedule, with autograd's own graph.

The forward phase runs every operation once, in order, with gradients on: autograd records exactly the
graph that eager mode records. Only what it would *save* is taken from it (``saved_tensors_hooks``):
the graph holds slots, and each slot names a datum that is live in the call's state or not. Dropping a
tensor is forgetting a datum; recomputing it is running its node again and filling the slots anew.
A hook in front of a backward carries out the schedule's steps for it, where something runs again. Gradients, hooks,
accumulation into ``.grad``, ``retain_graph`` and double backward are therefore autograd's own.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from rkgb.program import in_mode
from rkgb.randomness import drawing_again, random_state
from rkgb.storages import storage_key
from rkgb.trace.capture import drop_saved
from rkgb.trace.guards import GuardFailed
from rockmate.calls.surroundings import running_in, runs_plainly
from rockmate.errors import BudgetWarning, GoneError
from rockmate.run.compiled import NodeCode, Program
from rockmate.run.parts import left_out, staying_after, steps_between
from rockmate.run.slots import Finder, Slot, changed, unpack, version_of
from rockmate.run.undo import Before
from solvers.schedule import Del, Run

_FORGET = drop_saved()
_NOTHING = contextlib.nullcontext()


class CallState:
    """All that one call keeps. Owned by the slots and hooks in its graph, so it goes when the graph goes."""

    def __init__(self, program: Program, sources: dict[int, torch.Tensor]) -> None:
        """``sources``: the tensors that the program starts from, as ``source_values`` looks them up."""
        self.program = program
        self.sources = sources
        self.given = dict(self.sources)  # and results in memory of a source, detached
        self.versions = {v: version_of(t) for v, t in self.given.items()}
        self.live: list[Any] = [None] * len(program.owner)  # each datum's value, or number if private -> tensor
        self.made_at: dict[int, int] = {}  # value -> version when it was made; values of one datum may count apart
        self.random: dict[int, list[torch.Tensor]] = {}
        self.slots: list[weakref.ref[Slot]] = []
        self.readers: defaultdict[int, list[weakref.ref[Slot]]] = defaultdict(list)  # datum -> what stands for it
        self.packed: list[tuple[Slot, torch.Tensor]] = []  # of the node whose operations run
        self.running = -1  # that node
        self.at = 0  # the next stage
        self.before: Before | None = None  # until the last guard has passed
        self.task = -1  # the backward that was here last, while it runs
        self.thread = 0  # where
        self.plainly = False  # it runs under what the forward ran under, but for the grad mode
        self.retained = False  # the graph stays: what the forward kept, stays
        self.skipped = False  # a part of the graph was left out: what it needs, stays
        self.spent = False  # no slot is left: only autograd's own error can come
        self.unreached: set[int] = set()  # nodes of outputs, where the budget needs a backward to come to them
        self.warned = False
        self.arrived: Callable[[], None] | None = None  # is told that the first backward is here, before anything runs

    # -------------------------------------------------------------------------------------- forward

    def forward(self) -> list[torch.Tensor]:
        """The program's outputs, in autograd's graph.

        Raises ``GuardFailed``, with generators, buffers and inputs as they were, where the program is not for these
        values.
        """
        p = self.program
        env = dict(self.sources)
        hooks, nothing = saved_tensors_hooks(self.pack, unpack), drop_saved()
        p.check_held(self.sources)
        self.before = Before(p.undo, self.sources)
        try:
            with in_mode(p.mode):
                for native, dead, start, stop in p.segments:
                    with nothing if dead else _NOTHING if native else hooks:
                        self.run_first(start, stop, env)
        except GuardFailed:
            self.before.restore()
            raise
        finally:
            self.packed.clear()
        for datum in p.given:
            self.give(datum)
        outputs = [env[v] for v in p.s.d.outputs]
        if p.exceeding:
            self.watch_outputs(outputs)
        return outputs

    def run_first(self, start: int, stop: int, env: dict[int, torch.Tensor]) -> None:
        """Run nodes for the first time, ``stop`` excluded."""
        packed, guarded = self.packed, self.program.undo.last + 1
        for i, function, code, noted in self.program.first[start:stop]:
            if i == guarded:
                self.before = None
            self.running = i
            if code.random:
                self.random[i] = [random_state(x) for x in code.random]
            function(env)
            if packed:
                self.settle(code, env)
            if noted:
                self.note(i, code, env)
            for v in code.gone:
                env.pop(v, None)

    def note(self, i: int, code: NodeCode, env: dict[int, torch.Tensor]) -> None:
        """Hold what stays of node i's results, and stop its backward where there are steps to take before it."""
        for v, datum in code.keeps:
            if self.live[datum] is None:
                self.live[datum] = {}
            t = self.live[datum][v] = env[v].detach().requires_grad_(v in self.program.differentiable)
            self.made_at[v] = t._version
        for v in code.aliases:
            self.given[v] = env[v].detach().requires_grad_(v in self.program.differentiable)
            self.versions[v] = version_of(env[v])
        if i in self.program.stage_of:
            self.hook(i, [env[v] for v in self.program.s.nodes[i].makes])

    def pack(self, t: torch.Tensor) -> Slot:
        """Autograd wants to keep ``t``: what it is, is settled when the node is done."""
        slot = Slot(self, self.running, t._version)
        self.packed.append((slot, t))
        return slot

    def settle(self, code: NodeCode, env: dict[int, torch.Tensor]) -> None:
        """The node is done: what autograd saved of it is what it reads, a result, or private to its backward.

        At each position that is what it was in the last call, which is verified, and searched for where it is not.
        """
        places, slots, readers = self.program.places[self.running], self.slots, self.readers
        private: dict[int, torch.Tensor] = {}
        finder: Finder | None = None
        for k, (slot, t) in enumerate(self.packed):
            place = places.get(k)
            if place is None or not (t is env.get(place.value) if place.exact else place.holds(t, env)):
                finder = finder or Finder(code.known, code.elsewhere, env)
                place = places[k] = finder.place_of(t)
            ref = weakref.ref(slot)
            slots.append(ref)
            data = place.data
            if data < 0:
                slot.held = t if place.value >= 0 and t.grad_fn is None else t.detach()
                continue
            slot.place, slot.data = place, data
            readers[data].append(ref)
            if place.value < 0:
                slot.index, slot.version = len(private), t._version
                private[slot.index] = t.detach()
        self.packed.clear()
        if code.private in self.program.kept:
            self.live[code.private] = private

    def drop(self, datum: int) -> None:
        self.live[datum] = None
        if self.skipped and datum not in self.program.kept:  # made for a part of the graph that is left out
            for ref in self.readers[datum]:
                slot = ref()
                if slot is not None:
                    slot.store = None

    def give(self, datum: int) -> None:
        """Leave ``datum`` to its slots: a result goes with the last of them, each private tensor with its own."""
        held = self.live[datum]
        if held is not None:
            self.live[datum] = None
            for ref in self.readers[datum]:
                slot = ref()
                if slot is not None:
                    slot.store = held if slot.index < 0 else {slot.index: held[slot.index]}

    # ------------------------------------------------------------------------------------- backward

    def hook(self, i: int, results: list[torch.Tensor]) -> None:
        def before(_: Any) -> None:
            self.reach(i, self.program.stage_of[i])

        for function in dict.fromkeys(t.grad_fn for t in results):
            if function is not None:
                function.register_prehook(before)

    def watch_outputs(self, outputs: list[torch.Tensor]) -> None:
        """A backward that leaves some of them out may exceed the budget."""

        def reached(node: int, _: Any) -> None:
            self.enter()
            self.unreached.discard(node)

        for node, k in self.program.ends.items():
            function = outputs[k].grad_fn
            if function is not None:
                self.unreached.add(node)
                function.register_prehook(partial(reached, node))

    def enter(self) -> None:
        """A backward is here, perhaps a new one."""
        task = torch._C._current_graph_task_id()
        if task != self.task:
            if self.task >= 0:  # an error ended that one, or this one runs inside it
                self.end()
            self.task, self.thread = task, 0
            if self.arrived is not None:
                arrived, self.arrived = self.arrived, None
                arrived()
            torch.autograd.Variable._execution_engine.queue_callback(self.over)

    def reach(self, i: int, k: int) -> None:
        """The backward of node i is next: take the schedule's steps up to stage k."""
        self.enter()
        if k < self.at or self.spent:
            return
        if not self.retained and _graph_is_retained():
            self.retained = True
            self.leave_schedule("backward was called with retain_graph=True (or create_graph=True)")
        foreseen = k == self.at and i in self.program.stage_of
        self.skipped = self.skipped or not foreseen or left_out(self.slots, i)
        steps = self.program.before[k] if foreseen else steps_between(self.program, self.at, k, i)
        staying = self.staying(i)
        with self.running_again():
            for step in steps:
                if isinstance(step, Run):
                    self.run_step(step.node, k)
                elif step.data in staying:
                    continue
                elif isinstance(step, Del):
                    self.drop(step.data)
                elif not self.retained:
                    self.give(step.data)
        self.at = k + 1

    def run_step(self, i: int, k: int) -> None:
        """Run node i again in stage k; where that cannot be done, the error comes when a backward reads it."""
        try:
            self.run_again(i)
        except GoneError:
            return
        if i in self.random and not (self.retained or self.skipped) and (k, i) in self.program.final:
            del self.random[i]

    def staying(self, i: int) -> Collection[int]:
        """What the forward kept and must not go when node i is reached."""
        if self.retained:
            return self.program.kept
        return staying_after(self.program, i, self.slots) if self.skipped else ()

    def leave_schedule(self, why: str) -> None:
        """Say once that the budget is not promised for this call."""
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"{why}: results are right, but what is kept or computed again for it may exceed the memory budget",
                BudgetWarning,
                stacklevel=2,
            )

    def over(self) -> None:
        if self.unreached and not self.program.exceeding.isdisjoint((frozenset(), frozenset(self.unreached))):
            self.leave_schedule("a backward left outputs out, and what the forward kept for them stayed")
        self.end()

    def end(self) -> None:
        """A backward is over: if the graph is spent nothing is needed, else all that the forward kept."""
        self.task = -1
        self.at = 0
        self.spent = all(ref() is None for ref in self.slots)
        for datum in range(len(self.live)):
            if self.spent or datum not in self.program.kept:
                self.live[datum] = None
        if self.spent:
            self.given.clear()
            self.sources.clear()
            self.random.clear()
        else:
            self.take_back()

    def take_back(self) -> None:
        """Data that runs read or make are the state's again, as when the forward phase ended."""
        for slot in (ref() for ref in self.slots):
            if slot is not None and slot.store is not None and slot.data not in self.program.given:
                if slot.data in self.program.kept:
                    self.live[slot.data] = {**(self.live[slot.data] or {}), **slot.store}
                slot.store = None

    def running_again(self) -> contextlib.AbstractContextManager[None]:
        """Nodes run as in the forward, whatever a backward runs under; that is asked once for each backward."""
        thread = threading.get_ident()
        if self.thread != thread:
            self.thread, self.plainly = thread, runs_plainly(self.program.mode)
        return torch.set_grad_enabled(self.program.mode.grad) if self.plainly else running_in(self.program.mode)

    def run_again(self, i: int) -> None:
        """Recompute node i from live data: its results and what its backward reads. In its mode, without hooks."""
        code = self.program.nodes[i]
        env = self.read(code)
        if not code.random:
            private = self.run_in(env, i, code)
        elif i in self.random:
            with drawing_again(code.random, self.random[i]):
                private = self.run_in(env, i, code)
        else:
            raise self.gone(i)
        for datum in code.remakes:
            self.live[datum] = {}
        differentiable = self.program.differentiable
        for v, datum in code.remade:
            t = self.live[datum][v] = env[v].detach()
            if v in differentiable:
                t.requires_grad_()
            self.made_at[v] = t._version
        if code.private is not None:
            self.live[code.private] = private

    def read(self, code: NodeCode) -> dict[int, torch.Tensor]:
        """What a second run of the node reads, unchanged since it was made."""
        env: dict[int, torch.Tensor] = {}
        for v, datum in code.inputs:
            if datum < 0:
                t, then = self.given[v], self.versions[v]
                if then < 0:  # of inference mode: its changes are not counted
                    env[v] = t
                    continue
            else:
                if self.live[datum] is None:
                    self.need(datum)
                t, then = self.live[datum][v], self.made_at[v]
            if t._version != then:
                raise changed(self.program.s.d.names[v], t, then)
            env[v] = t
        for v in code.statistics:  # its results do not depend on them
            env[v] = self.sources[v].clone()
        return env

    def run_in(self, env: dict[int, torch.Tensor], i: int, code: NodeCode) -> dict[int, torch.Tensor] | None:
        """Run the node's operations in ``env``; what autograd would save and only their backward reads, if needed."""
        run = self.program.again[i]
        if code.private is None:
            with _FORGET if code.hides and code.recorded else _NOTHING:
                run(env)
            return None
        known = {storage_key(env[v]) for v in code.reads}
        known.update(storage_key(self.sources[v]) for v in code.statistics)
        packed: list[torch.Tensor] = []
        try:
            with saved_tensors_hooks(packed.append, unpack):
                run(env)
            known.update(storage_key(env[v]) for v, _ in code.made)
            return dict(enumerate([t.detach() for t in packed if storage_key(t) not in known]))
        finally:
            packed.clear()  # autograd's graph holds the hook, and the list the graph

    def changed(self, v: int, tensor: torch.Tensor) -> RuntimeError:
        return changed(self.program.s.d.names[v], tensor, self.made_at[v])

    def gone(self, i: int) -> GoneError:
        return GoneError(
            f"{self.program.s.nodes[i].label} must run again for this backward, which the plan did not foresee (a "
            "second backward, or one of a part of the graph). Call forward again before it."
        )

    def made_for(self, slot: Slot) -> dict[int, torch.Tensor]:
        """The datum of ``slot``, which is not live: by the steps of a stage that was left out, or outside of any."""
        self.catch_up(slot.node)
        if slot.store is None:
            self.need(slot.data)
        made: dict[int, torch.Tensor] = slot.store or self.live[slot.data]
        return made

    def catch_up(self, i: int) -> None:
        """Node i reads what a stage makes whose own backward is left out: take the steps up to that stage."""
        if torch._C._current_graph_task_id() >= 0:
            k = sum(node >= i for node in self.program.stages) - 1
            if k >= 0:
                self.reach(i, k)

    def need(self, datum: int) -> None:
        """Make ``datum`` live, outside the schedule if it is not (second backwards, backwards of a part)."""
        if self.live[datum] is not None:
            return
        missing: set[int] = set()
        left = [datum]
        while left:
            owner = self.program.owner[left.pop()]
            if owner in missing:
                continue
            missing.add(owner)
            if not self.program.nodes[owner].rerun or (self.program.s.nodes[owner].random and owner not in self.random):
                raise self.gone(owner)
            left += [d for d in self.program.read_by(owner) if self.live[d] is None]
        self.leave_schedule("a backward of a part of the graph, or a second one, computes again what the plan dropped")
        with running_in(self.program.mode):  # whatever surrounds the reader: autocast, another backward, none
            for i in sorted(missing):
                self.run_again(i)


def _graph_is_retained() -> bool:
    """Whether the backward that runs was called with retain_graph=True (or create_graph=True)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
