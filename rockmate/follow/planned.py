"""Decides what is held of a followed forward as its plan says, as long as it does what the plan is for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import gt
from typing import Any

import torch

from rkgb.storages import alias_of
from rockmate.calls.surroundings import ANOTHER, RETAINED, graph_is_retained, warn_unplanned
from rockmate.follow.observed import Seen, pack_of, sizes_of
from rockmate.follow.policy import Policy
from rockmate.follow.problem import FollowedProblem
from rockmate.follow.record import Datum, Slot, form_of_op, needed_for
from rockmate.follow.tape import Tape
from solvers import Bwd, Del, Loss, Run, Schedule, Step


@dataclass
class Again:
    """A node that runs again: its ``ops``, the data that it ``makes``, and those that are ``gone`` after it."""

    ops: tuple[int, ...]
    makes: frozenset[int]
    gone: list[int]


@dataclass
class Stage:
    """What happens before one moment of the backward. ``runs``: the nodes that run again. ``drops``: data that go
    before. ``last``: data that go at that moment, by the slot that reads them last.
    """

    drops: list[int] = field(default_factory=list)
    runs: list[Again] = field(default_factory=list)
    last: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class FollowedProgram:
    """A schedule, by what a followed forward shows. ``seen``: of the step that was observed. ``held``: data that are
    held from the forward on; ``kept``: those of them that only data need which no backward reads. ``early``: data that
    are held within the forward, since it may go on in another way, and with which data they go. ``within``: those
    that backwards within the forward read, each with the number of the last of their reads. ``stages`` in the order of
    the backward; ``stage_of``: by slot.
    """

    seen: Seen
    held: frozenset[int]
    kept: frozenset[int]
    early: dict[int, int]
    within: dict[int, int]
    stages: list[Stage]
    stage_of: dict[int, int]

    def holds(self, tape: Tape, number: int) -> bool:
        """Whether the datum is to be held, as far as the forward has come."""
        return number in self.held or self.within.get(number, -1) >= tape.asks

    def exceeds(self, tape: Tape, index: int) -> bool:
        """Whether operation ``index`` has made more than was planned for; less does no harm."""
        return any(map(gt, sizes_of(tape, tape.ops[index]), self.seen.sizes[index]))


def program_of(found: FollowedProblem, schedule: Schedule, seen: Seen) -> FollowedProgram:
    """``schedule`` of ``found.problem``, for what was ``seen``."""
    at = schedule.index(Loss())
    gone = {step.data for step in schedule[:at] if isinstance(step, Del)}
    live = {d for d in range(len(found.problem.data)) if d not in gone}
    slots_of: dict[int, list[int]] = {}
    for slot, node in found.step_of.items():
        slots_of.setdefault(node, []).append(slot)
    reads = [_reads(found, step, slots_of, seen) for step in schedule[at + 1 :]]
    behind = _let_go(found, schedule[at + 1 :], reads)
    planned = frozenset(found.datum_of[d] for d in live & frozenset[int]().union(*reads)) - {-1}
    held = planned | found.kept
    stages, backwards = _stages(found, behind, live, held), [step.node for step in behind if isinstance(step, Bwd)]
    stage_of = {slot: k for k, node in enumerate(backwards) for slot in slots_of[node]}
    _hand_over(stages, stage_of, seen)
    within = {number: k for k, number in enumerate(seen.within)}
    early = {number: last for number, last in found.early.items() if number not in held}
    return FollowedProgram(seen, held, found.kept - planned, early, within, stages, stage_of)


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


def _stages(found: FollowedProblem, behind: Schedule, live: set[int], held: frozenset[int]) -> list[Stage]:
    """Of each moment of the backward, and what is left behind the last one. ``live``: data of the problem that are
    there behind the forward.
    """
    stages = [Stage()]
    for step in behind:
        drops, runs = stages[-1].drops, stages[-1].runs
        if isinstance(step, Run):
            makes = {d: found.datum_of[d] for d in found.problem.nodes[step.node].makes}
            others = [n for d, n in makes.items() if d in live and n not in held]  # that the caller holds
            runs.append(Again(found.ops_of[step.node], frozenset(makes.values()), others))
            live.update(makes)
        elif isinstance(step, Del):
            live.discard(step.data)
            (runs[-1].gone if runs else drops).append(found.datum_of[step.data])
        elif isinstance(step, Bwd):
            stages.append(Stage())
    return stages


def _hand_over(stages: list[Stage], stage_of: dict[int, int], seen: Seen) -> None:
    """What a stage drops first goes with the last slot of the stage before that reads it: autograd frees it then. What
    no slot of that stage reads goes with its last one: others hold it, who may free it before the next stage. But none
    goes with a slot that may be read again.
    """
    last: dict[tuple[int, int | None], int] = {}
    for slot, k in stage_of.items():  # in the order of their reads
        last[k, seen.packs[slot][1]] = last[k, None] = slot
    for k, (stage, following) in enumerate(itertools.pairwise(stages)):
        for number in following.drops if (k, None) in last else ():
            slot = last.get((k, number), last[k, None])
            if slot not in seen.retained:
                stage.last.setdefault(slot, []).append(number)


@dataclass(eq=False)
class Planned(Policy):
    """Follows ``program``; not ``exactly``: at other sizes. ``otherwise``: called where the forward does something
    else, with the number of operations that were the same, and the slot that is another one; returns what decides from
    then on. ``among``: how many ways of computing it is one of, another of which may take over.
    """

    program: FollowedProgram
    otherwise: Callable[[Tape, int, Slot | None], Policy]
    exactly: bool = True
    among: int = 1
    next_stage = 0
    keeps_all = False  # nothing goes any more: the graph is retained
    keeps_pinned = False  # the backward leaves out parts, which another one may read

    def take_over(self, tape: Tape) -> bool:
        """Hold what this plan holds and nothing else, where another policy has decided so far. False if some of that
        is neither there nor can be made.
        """
        held = frozenset(datum.number for datum in tape.data if self.program.holds(tape, datum.number))
        if not tape.reruns.can_make(held):
            return False
        others = [datum for datum in tape.data if datum.number not in held | self.program.early.keys()]
        for datum in others:  # first: what is made again needs the room
            if not datum.pinned:
                datum.base = None
        for datum in tape.data:
            if datum.number in held and datum.base is None:
                tape.hold(datum, held)
        for datum in others:
            datum.base = None
        return True

    def after(self, tape: Tape, index: int, results: Sequence[Any]) -> None:
        program, op, forms = self.program, tape.ops[index], self.program.seen.forms
        same = index < len(forms) and forms[index] == form_of_op(op)
        if not same or (self.exactly and program.exceeds(tape, index)):
            self._leave(tape, index).after(tape, index, results)
            return
        for position, number in op.makes:
            if number in program.early or program.holds(tape, number):
                tape.data[number].base = alias_of(results[position])
            elif self.among > 1:  # another way may hold it, as it lives
                tape.data[number].count_writes(results[position])

    def packed(self, tape: Tape, slot: Slot, t: torch.Tensor) -> None:
        packs, number = self.program.seen.packs, slot.number
        if number >= len(packs) or packs[number] != pack_of(tape, slot):
            self._leave(tape, len(tape.ops), slot).packed(tape, slot, t)

    def over(self, tape: Tape) -> None:
        if len(tape.ops) != len(self.program.seen.forms) or tape.slots != len(self.program.seen.packs):
            self._leave(tape, len(tape.ops))
        else:
            for number in self.program.early:
                tape.data[number].base = None

    def _leave(self, tape: Tape, index: int, slot: Slot | None = None) -> Policy:
        policy = self.otherwise(tape, index, slot)
        tape.policy = tape.policy.followed_by(policy)
        return policy

    def asked(self, tape: Tape, slot: Slot) -> None:
        """As in ``Policy``: take the steps of the schedule that come before this read."""
        if tape.open:
            return
        if not self.keeps_all and slot.number not in self.program.seen.retained and graph_is_retained():
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
            for datum in (tape.data[number] for index in again.ops for number in tape.ops[index].reads):
                if datum.base is None and datum.number not in again.makes:
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
        if tape.open and not datum.slots:
            ends = self.program.seen.discarded.get(datum.number, len(tape.ops))
            for number, last in self.program.early.items():
                if last == datum.number and ends < len(tape.ops):  # for good
                    tape.data[number].base = None
        elif self.program.kept and not datum.slots:
            needed = needed_for(tape.ops, tape.data, (d.number for d in tape.data if d.slots))
            for number in self.program.kept.difference(d.number for d in needed):
                tape.data[number].base = None

    def keeps(self, tape: Tape, datum: Datum) -> bool:
        return datum.number in self.program.early or self.program.holds(tape, datum.number)
