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
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from rkgb.capture import drop_saved
from rkgb.guards import GuardFailed
from rkgb.program import in_mode, memory_of, source_values
from rkgb.randomness import drawing_again, random_state
from rockmate.compiled import NodeCode, Program
from rockmate.errors import BudgetWarning, GoneError
from rockmate.parts import left_out, staying_after, steps_between
from rockmate.slots import Slot, changed, form_of, unpack, version_of
from rockmate.surroundings import running_in, runs_plainly
from rockmate.undo import Before
from solvers.schedule import Del, Run

_FORGET = drop_saved()


class CallState:
    """All that one call keeps. Owned by the slots and hooks in its graph, so it goes when the graph goes."""

    def __init__(self, program: Program, model: torch.nn.Module, inputs: list[torch.Tensor]) -> None:
        self.program = program
        d = program.s.d
        self.sources = source_values(d.sources, model, inputs)
        self.versions = {v: version_of(t) for v, t in self.sources.items()}
        self.aliases: dict[int, torch.Tensor] = {}  # results in memory of a source, detached
        self.live: list[Any] = [None] * len(program.owner)  # each datum's value, or number if private -> tensor
        self.made_at: dict[int, int] = {}  # value -> version when it was made; values of one datum may count apart
        # In the forward phase: address of a live storage -> its datum, -1 for a source; and of each datum its address.
        self.known = {memory_of(t)._cdata: -1 for t in self.sources.values()}
        self.address: dict[int, int] = {}
        self.random: dict[int, list[torch.Tensor]] = {}
        self.slots: list[weakref.ref[Slot]] = []
        self.readers: dict[int, list[weakref.ref[Slot]]] = {}  # datum -> the slots that stand for it
        self.pending: list[tuple[Slot, torch.Tensor, int]] = []
        self.stage = {node: k for k, node in enumerate(program.stages)}
        self.running = -1  # the node whose operations run
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
                    with nothing if dead else contextlib.nullcontext() if native else hooks:
                        for i in range(start, stop):
                            self.run_first(i, env)
        except GuardFailed:
            self.before.restore()
            raise
        for datum in p.given:
            self.give(datum)
        outputs = [env[v] for v in p.s.d.outputs]
        if p.exceeding:
            self.watch_outputs(outputs)
        return outputs

    def run_first(self, i: int, env: dict[int, torch.Tensor]) -> None:
        p, code = self.program, self.program.nodes[i]
        if i == p.undo.last + 1:
            self.before = None
        self.running = i
        if code.random:
            self.random[i] = [random_state(x) for x in code.random]
        for op in code.ops:
            op.run(env)
        self.note_results(code, env)
        if self.pending:
            self.settle(code)
        if i in self.stage:
            self.hook(i, [env[v] for v in p.s.nodes[i].makes])
        for v in code.gone:
            env.pop(v, None)
        for datum in code.dropped:
            self.known.pop(self.address.get(datum, 0), None)

    def note_results(self, code: NodeCode, env: dict[int, torch.Tensor]) -> None:
        """Know results by their memory, and keep those that the schedule keeps."""
        kept = self.program.kept
        for v, datum in code.made:
            address = self.address[datum] = env[v].untyped_storage()._cdata
            self.known[address] = datum
        for v, datum in (*code.made, *code.joins):
            if datum in kept:
                self.keep(v, datum, env[v])
        for v in code.aliases:
            self.aliases[v] = self.apart(v, env[v])
            self.versions[v] = version_of(env[v])

    def keep(self, v: int, datum: int, t: torch.Tensor) -> None:
        held = self.live[datum] = self.live[datum] or {}
        held[v] = self.apart(v, t)
        self.made_at[v] = t._version

    def apart(self, v: int, t: torch.Tensor) -> torch.Tensor:
        """The value without its graph, for second runs to read."""
        t = t.detach()
        return t.requires_grad_(True) if self.program.s.d.values[v].requires_grad else t

    def pack(self, t: torch.Tensor) -> Slot:
        """Autograd wants to keep ``t``: note which datum it is."""
        slot = Slot(self, self.running)
        address = memory_of(t)._cdata
        datum = self.known.get(address)
        if datum is None:  # of the node that runs now: settled when it is done
            self.pending.append((slot, t, address))
        elif datum < 0:
            slot.held, slot.version = t.detach() if t.grad_fn is not None else t, t._version
        else:
            slot.form = form_of(t)
            self.stand_for(slot, datum)
        self.slots.append(weakref.ref(slot))
        return slot

    def stand_for(self, slot: Slot, datum: int) -> None:
        slot.data = datum
        self.readers.setdefault(datum, []).append(weakref.ref(slot))

    def settle(self, code: NodeCode) -> None:
        """The node is done: what autograd saved of it is a result, or private to its backward."""
        private: dict[int, torch.Tensor] = {}
        for slot, t, address in self.pending:
            datum = self.known.get(address)
            if datum is not None:
                slot.form = form_of(t)
                self.stand_for(slot, datum)
            elif code.private is not None:
                slot.index, slot.version = len(private), t._version
                private[slot.index] = t.detach()
                self.stand_for(slot, code.private)
            else:
                slot.held, slot.version = t.detach(), t._version
        self.pending.clear()
        if code.private in self.program.kept:
            self.live[code.private] = private

    def drop(self, datum: int) -> None:
        self.live[datum] = None
        if self.skipped and datum not in self.program.kept:  # made for a part of the graph that is left out
            for slot in self.standing_for(datum):
                slot.store = None

    def give(self, datum: int) -> None:
        """Leave ``datum`` to its slots: a result goes with the last of them, each private tensor with its own."""
        held = self.live[datum]
        if held is not None:
            self.live[datum] = None
            for slot in self.standing_for(datum):
                slot.store = held if slot.index < 0 else {slot.index: held[slot.index]}

    def standing_for(self, datum: int) -> list[Slot]:
        """The slots of ``datum`` that autograd still holds."""
        return [slot for ref in self.readers.get(datum, ()) if (slot := ref()) is not None]

    # ------------------------------------------------------------------------------------- backward

    def hook(self, i: int, results: list[torch.Tensor]) -> None:
        def before(_: Any) -> None:
            self.reach(i, self.stage[i])

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
        foreseen = k == self.at and i in self.stage
        self.skipped = self.skipped or not foreseen or left_out(self.slots, i)
        steps = self.program.before[k] if foreseen else steps_between(self.program, self.at, k, i)
        staying = self.staying(i)
        with self.running_again(), _FORGET:
            for step in steps:
                if isinstance(step, Run):
                    with contextlib.suppress(GoneError):  # it comes when a backward reads it, if one does
                        self.run_again(step.node)
                    if not (self.retained or self.skipped) and (k, step.node) in self.program.final:
                        self.random.pop(step.node, None)
                elif step.data in staying:
                    continue
                elif isinstance(step, Del):
                    self.drop(step.data)
                elif not self.retained:
                    self.give(step.data)
        self.at = k + 1

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
            self.aliases.clear()
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
        """Recompute node i from live data: its results and what its backward reads. In its mode, within ``_FORGET``."""
        code = self.program.nodes[i]
        if code.random and i not in self.random:
            raise self.gone(i)
        env: dict[int, torch.Tensor] = {}
        for v in code.reads:  # its results do not depend on statistics
            env[v] = self.sources[v].clone() if v in code.statistics else self.value(v)
        with drawing_again(code.random, self.random[i]) if code.random else contextlib.nullcontext():
            if code.private is None:
                for op in code.again:
                    op.run(env)
            else:
                private = self.run_for_private(code, env)
        for datum in code.remakes:
            self.live[datum] = {}
        for v, datum in code.remade:
            self.keep(v, datum, env[v])
        if code.private is not None:
            self.live[code.private] = private

    def run_for_private(self, code: NodeCode, env: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Run the node's operations again; what autograd would save and only their backward reads."""
        known = {memory_of(env[v])._cdata for v in code.reads}
        known.update(t.untyped_storage()._cdata for t in (self.sources[v] for v in code.statistics))
        packed: list[tuple[torch.Tensor, int]] = []

        def pack(t: torch.Tensor) -> None:
            address = memory_of(t)._cdata
            if address not in known:
                packed.append((t.detach(), address))

        with saved_tensors_hooks(pack, unpack):
            for op in code.again:
                op.run(env)
        own = {env[v].untyped_storage()._cdata for v, _ in code.made}
        return dict(enumerate(t for t, address in packed if address not in own))

    def value(self, v: int) -> torch.Tensor:
        """The tensor of value v, from a source, an alias, or live data."""
        given = self.sources.get(v)
        if given is None:
            given = self.aliases.get(v)
        if given is not None:
            if version_of(given) != self.versions[v]:
                raise changed(self.program.s.d.names[v], given, self.versions[v])
            return given
        datum = self.program.data_of[v]
        self.need(datum)
        tensor: torch.Tensor = self.live[datum][v]
        self.check_unchanged(v, tensor)
        return tensor

    def check_unchanged(self, v: int, tensor: torch.Tensor) -> None:
        if tensor._version != self.made_at[v]:
            raise changed(self.program.s.d.names[v], tensor, self.made_at[v])

    def gone(self, i: int) -> GoneError:
        return GoneError(
            f"{self.program.s.nodes[i].name} must run again for this backward, which the plan did not foresee (a "
            "second backward, or one of a part of the graph). Call forward again before it."
        )

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
        with running_in(self.program.mode), _FORGET:  # whatever surrounds the reader: autocast, another backward, none
            for i in sorted(missing):
                self.run_again(i)


def _graph_is_retained() -> bool:
    """Whether the backward that runs was called with retain_graph=True (or create_graph=True)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
