"""Decides what is held of a followed forward as its plan says, as long as it does what the plan is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.storages import alias_of, counter_of
from rockmate.calls.surroundings import ANOTHER, RETAINED, graph_is_retained, warn_unplanned
from rockmate.follow.observed import Seen, pack_of, sizes_of
from rockmate.follow.policy import Policy
from rockmate.follow.problem import FollowedProblem
from rockmate.follow.record import Datum, OpForm, Slot, form_of_op, needed_for
from rockmate.follow.tape import Tape
from solvers import Bwd, Del, Loss, Run, Schedule, Step


@dataclass(frozen=True)
class Again:
    """A node that runs again: its ``ops``, the data that it ``makes``, and those that are ``gone`` after it."""

    ops: tuple[int, ...]
    makes: frozenset[int]
    gone: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """What happens before one moment of the backward. ``runs``: the nodes that run again. ``drops``: data that go
    before. ``last``: data that go at that moment, by the slot that reads them last.
    """

    drops: tuple[int, ...]
    runs: tuple[Again, ...]
    last: dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class FollowedProgram:
    """A schedule, by what a followed forward shows. ``forms`` and ``sizes`` of operations, ``packs`` of slots: as in
    the step that was observed. ``held``: data that are held from the forward on; ``kept``: those of them that only
    ``unread`` data need, which no backward reads. ``within``: those that backwards within the forward read, each with
    the number of the last of their reads. ``stages`` in the order of the backward; ``stage_of``: by slot. ``retained``:
    see ``Seen``.
    """

    forms: list[OpForm]
    sizes: list[tuple[int, ...]]
    packs: list[tuple[int, int | None]]
    held: frozenset[int]
    kept: frozenset[int]
    unread: frozenset[int]
    within: dict[int, int]
    stages: tuple[Stage, ...]
    stage_of: dict[int, int]
    retained: frozenset[int]

    def holds(self, tape: Tape, number: int) -> bool:
        """Whether the datum is to be held, as far as the forward has come."""
        return number in self.held or self.within.get(number, -1) >= tape.asks

    def is_for(self, tape: Tape, index: int) -> bool:
        """Whether no operation up to ``index`` has made more than was planned for; less does no harm."""
        ops = zip(tape.ops[: index + 1], self.sizes, strict=False)
        return not any(
            a > b for op, planned in ops if planned for a, b in zip(sizes_of(tape, op), planned, strict=True)
        )

    @property
    def reruns(self) -> int:
        """How many nodes run again."""
        return sum(len(stage.runs) for stage in self.stages)


def program_of(found: FollowedProblem, schedule: Schedule, seen: Seen) -> FollowedProgram:
    """``schedule`` of ``found.problem``, for what was ``seen``."""
    live: set[int] = set()
    at = schedule.index(Loss())
    for step in schedule[:at]:
        if isinstance(step, Run):
            live.update(found.problem.nodes[step.node].makes)
        elif isinstance(step, Del):
            live.discard(step.data)
    slots_of: dict[int, list[int]] = {}
    for slot, node in found.step_of.items():
        slots_of.setdefault(node, []).append(slot)
    reads = [_reads(found, step, slots_of, seen) for step in schedule[at + 1 :]]
    behind = _let_go(found, schedule[at + 1 :], reads)
    wanted = frozenset[int]().union(*reads)
    planned = frozenset(found.datum_of[d] for d in live & wanted) - {-1}
    held, kept, unread = planned | found.kept, found.kept - planned, frozenset(seen.unread())
    stages, stage_of = _stages(found, behind, slots_of, seen, live, held)
    within = {number: k for k, number in enumerate(seen.within)}
    retained = frozenset(seen.retained)
    return FollowedProgram(seen.forms, seen.sizes, seen.packs, held, kept, unread, within, stages, stage_of, retained)


def _reads(found: FollowedProblem, step: Step, slots_of: dict[int, list[int]], seen: Seen) -> frozenset[int]:
    """The data that what runs again reads, or slots do at a moment of the backward. Others are held by the caller."""
    if isinstance(step, Run):
        return frozenset(found.problem.nodes[step.node].reads)
    if not isinstance(step, Bwd) or (backward := found.problem.nodes[step.node].backward) is None:
        return frozenset()
    read = {seen.packs[slot][1] for slot in slots_of.get(step.node, ())}
    return frozenset(d for d in backward.reads if found.datum_of[d] in read)


def _let_go(found: FollowedProblem, behind: Schedule, reads: Sequence[frozenset[int]]) -> Schedule:
    """``behind``, in which data go when they were read last. Where the caller held them longer in the step that was
    observed, it may not do so in another one.
    """
    last: dict[int, int] = {}  # reads of data that are there
    gone: dict[int, list[Del]] = {}

    def let_go(data: int) -> bool:
        if data not in last or found.datum_of[data] in found.kept:
            return False
        gone.setdefault(last.pop(data), []).append(Del(data))
        return True

    left: list[tuple[int, Step]] = []
    for k, step in enumerate(behind):
        if not (isinstance(step, Del) and let_go(step.data)):
            left.append((k, step))
        last.update(dict.fromkeys(reads[k], k))
    for data in list(last):
        let_go(data)
    return tuple(x for k, step in left for x in (step, *gone.get(k, ())))


def _stages(
    found: FollowedProblem,
    behind: Schedule,
    slots_of: dict[int, list[int]],
    seen: Seen,
    live: set[int],
    held: frozenset[int],
) -> tuple[tuple[Stage, ...], dict[int, int]]:
    """``live``: data of the problem that are there behind the forward."""
    stages: list[Stage] = []
    stage_of: dict[int, int] = {}
    drops: list[int] = []
    runs: list[tuple[int, list[int]]] = []  # nodes, each with what is gone after it
    for step in behind:
        if isinstance(step, Run):
            makes = found.problem.nodes[step.node].makes
            others = [found.datum_of[d] for d in makes if d in live]  # that the caller holds
            runs.append((step.node, [n for n in others if n not in held]))
            live.update(makes)
        elif isinstance(step, Del):
            live.discard(step.data)
            (runs[-1][1] if runs else drops).append(found.datum_of[step.data])
        elif isinstance(step, Bwd):
            stage_of.update(dict.fromkeys(slots_of[step.node], len(stages)))
            stages.append(Stage(tuple(drops), tuple(_again(found, *run) for run in runs), {}))
            drops, runs = [], []
    _hand_over(stages, drops, slots_of, stage_of, seen)
    return tuple(stages), stage_of


def _again(found: FollowedProblem, node: int, gone: list[int]) -> Again:
    makes = frozenset(found.datum_of[d] for d in found.problem.nodes[node].makes)
    return Again(found.ops_of[node], makes, tuple(gone))


def _hand_over(
    stages: list[Stage], after: list[int], slots_of: dict[int, list[int]], stage_of: dict[int, int], seen: Seen
) -> None:
    """What a stage drops first goes with the last slot of the stage before that reads it: autograd frees it then. What
    no slot of that stage reads goes with its last one: others hold it, who may free it before the next stage. But none
    goes with a slot that may be read again.
    """
    last: dict[tuple[int, int | None], int] = {}
    order = _order(slots_of, stage_of)
    for slot, stage in stage_of.items():
        for key in ((stage, seen.packs[slot][1]), (stage, None)):
            last[key] = max(slot, last.get(key, slot), key=order)
    for k, drops in enumerate([*(stage.drops for stage in stages[1:]), tuple(after)]):
        for number in drops if (k, None) in last else ():
            slot = last.get((k, number), last[k, None])
            if slot not in seen.retained:
                stages[k].last[slot] = (*stages[k].last.get(slot, ()), number)


def _order(slots_of: dict[int, list[int]], stage_of: dict[int, int]) -> Callable[[int], int]:
    place = {slot: k for slots in slots_of.values() for k, slot in enumerate(slots)}
    return lambda slot: place[slot]


class Planned:
    """Follows ``program``; not ``exactly``: at other sizes. ``otherwise``: called where the forward does something
    else, with the number of operations that were the same, and the slot that is another one; returns what decides from
    then on. ``among``: how many ways of computing it is one of, another of which may take over.
    """

    def __init__(
        self,
        program: FollowedProgram,
        otherwise: Callable[[Tape, int, Slot | None], Policy],
        exactly: bool = True,
        among: int = 1,
    ) -> None:
        self.program, self.otherwise, self.exactly, self.among = program, otherwise, exactly, among
        self.next_stage = 0
        self.keeps_all = False  # nothing goes any more: the graph is retained
        self.keeps_pinned = False  # the backward leaves out parts, which another one may read

    def can_take_over(self, tape: Tape) -> bool:
        """Whether all that this plan holds is there, or can be made, where another one has decided so far."""
        return tape.reruns.can_make(self._held(tape))

    def _held(self, tape: Tape) -> frozenset[int]:
        return frozenset(datum.number for datum in tape.data if self.program.holds(tape, datum.number))

    def take_over(self, tape: Tape) -> Planned:
        """Hold what this plan holds and nothing else, where another policy has decided so far."""
        held = self._held(tape)
        others = [datum for datum in tape.data if datum.number not in held]
        for datum in others:  # first: what is made again needs the room
            if not datum.pinned:
                datum.base = None
        for datum in tape.data:
            if datum.number in held and datum.base is None:
                tape.hold(datum, held)
        for datum in others:
            datum.base = None
        return self

    def before(self, tape: Tape, index: int) -> None:
        """As in ``Policy``."""

    def after(self, tape: Tape, index: int, results: Sequence[Any]) -> None:
        """As in ``Policy``."""
        program, op = self.program, tape.ops[index]
        same = index < len(program.forms) and program.forms[index] == form_of_op(op)
        if not same or (self.exactly and self._is_larger(tape, index)):
            self._leave(tape, index).after(tape, index, results)
            return
        for position, number in op.makes:
            if program.holds(tape, number):
                tape.data[number].base = alias_of(results[position])
            elif self.among > 1 and not results[position].is_inference():
                tape.data[number].counter = counter_of(results[position])  # another way may hold it, as it lives

    def packed(self, tape: Tape, slot: Slot, t: torch.Tensor) -> None:
        """As in ``Policy``."""
        program, number = self.program, slot.number
        if number >= len(program.packs) or program.packs[number] != pack_of(tape, slot):
            self._leave(tape, len(tape.ops), slot).packed(tape, slot, t)

    def over(self, tape: Tape) -> None:
        """As in ``Policy``."""
        if len(tape.ops) != len(self.program.forms) or tape.slots != len(self.program.packs):
            self._leave(tape, len(tape.ops))

    def _is_larger(self, tape: Tape, index: int) -> bool:
        """Whether an operation makes more than was planned for; less does no harm."""
        planned, op = self.program.sizes[index], tape.ops[index]
        return bool(planned) and any(a > b for a, b in zip(sizes_of(tape, op), planned, strict=True))

    def _leave(self, tape: Tape, index: int, slot: Slot | None = None) -> Policy:
        policy = self.otherwise(tape, index, slot)
        tape.decide_by(policy)
        return policy

    def asked(self, tape: Tape, slot: Slot) -> None:
        """As in ``Policy``: take the steps of the schedule that come before this read."""
        if tape.open:
            return
        if not self.keeps_all and slot.number not in self.program.retained and graph_is_retained():
            self.keeps_all = True
            warn_unplanned(RETAINED)
        stage = self.program.stage_of.get(slot.number, -1)
        if 0 <= stage < self.next_stage - 1 and slot.datum is not None and slot.datum.base is None:
            warn_unplanned(ANOTHER)
        while self.next_stage <= stage:
            self.keeps_pinned |= self.next_stage < stage
            self._take(tape, self.program.stages[self.next_stage], is_read=self.next_stage == stage)
            self.next_stage += 1

    def _take(self, tape: Tape, stage: Stage, is_read: bool) -> None:
        """Come to ``stage``. Of a part that is left out, nothing runs again; what is missing later is made then."""
        if self.keeps_all:
            return
        for number in stage.drops:
            self._drop(tape, number)
        for again in stage.runs if is_read else ():
            for index in again.ops:
                for number in tape.ops[index].reads:
                    datum = tape.data[number]
                    if datum.base is None and number not in again.makes:
                        tape.reruns.make(datum)  # a part of the graph was left out
            tape.reruns.run(again.ops, again.makes)
            for number in again.gone:
                self._drop(tape, number)

    def _drop(self, tape: Tape, number: int) -> None:
        if number >= 0 and not (self.keeps_pinned and tape.data[number].pinned):
            tape.data[number].base = None

    def answered(self, tape: Tape, slot: Slot) -> None:
        """As in ``Policy``: what nothing reads later is autograd's alone."""
        stage = self.program.stage_of.get(slot.number, -1)
        if tape.open:
            assert slot.datum is not None
            if not self.program.holds(tape, slot.datum.number):
                slot.datum.base = None
        elif stage >= 0 and not self.keeps_all:
            for number in self.program.stages[stage].last.get(slot.number, ()):
                self._drop(tape, number)

    def let_go(self, tape: Tape, datum: Datum) -> None:
        """As in ``Policy``: with a part of the graph goes what only that part may still need."""
        program = self.program
        if program.kept and not (tape.open or datum.slots) and datum.number in program.unread:
            needed = needed_for(tape.ops, tape.data, (n for n in program.unread if tape.data[n].slots))
            for number in program.kept - needed:
                tape.data[number].base = None

    def keeps(self, tape: Tape, datum: Datum) -> bool:
        """As in ``Policy``."""
        return self.program.holds(tape, datum.number)

    def ended(self) -> None:
        """As in ``Policy``."""

    def followed_by(self, policy: Policy) -> Policy:
        """As in ``Policy``."""
        return policy
