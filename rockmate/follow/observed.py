"""A followed step that is observed: what lives, what is allocated, and what the backward reads, at each moment."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from rkgb.device import kind_of
from rkgb.device.kind import Moment
from rkgb.trace.code import is_the_users
from rockmate.calls.look import FAILED, LET_GO, StepLook
from rockmate.calls.surroundings import graph_is_retained
from rockmate.follow.policy import Policy
from rockmate.follow.record import Datum, Op, OpForm, Slot, Use, form_of_op
from rockmate.follow.tape import Tape
from rockmate.planning.ways import Waits, waits_at

_NOTHING = "autograd saves nothing in them that a plan could let go, or hooks of saved tensors within forward keep it"


@dataclass(slots=True)
class Mark:
    """A moment. ``what``: "begin" of the forward; "op" before operation ``number``; "end" of the forward; "asked" and
    "answered" around reruns for slot ``number``; "gone" when ``number`` bytes of data went that nobody had in use;
    "over" when the backward is. ``live``: bytes of followed data. ``time``: nanoseconds. ``data``: that autograd has in
    use from "asked" on, and that it had in use and went where they are "gone". ``gathered``: the storages that come and
    go which are there. ``moment`` of the allocator, once the step is over.
    """

    what: str
    number: int
    live: int
    time: int
    data: frozenset[int] = frozenset()
    gathered: frozenset[int] = frozenset()
    moment: Moment = field(default=Moment(0, 0))


@dataclass
class Seen:
    """What was observed of one step.

    ``forms`` of operations, ``sizes`` of what they make, and ``places``: the user's source line of each. ``packs``: of
    each slot, after how many operations it came, and its datum. ``released``: the one of the ``marks`` by which nobody
    outside held a datum any more; those that were always held are not there. ``discarded``: data whose slots all went
    before the forward returned, in order, and the last operation before they did. ``within``: the data that backwards
    within the forward read, in order. ``freed``: data whose memory went between the forward's end and the first mark
    "asked". ``retained``: slots that were read by a backward within the step's own, as of a hook, which may read them
    again. ``use``: of what the forward returned.
    """

    forms: list[OpForm] = field(default_factory=list)
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    packs: list[tuple[int, int | None]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    released: dict[int, int] = field(default_factory=dict)
    discarded: dict[int, int] = field(default_factory=dict)
    within: list[int] = field(default_factory=list)
    freed: set[int] = field(default_factory=set)
    retained: set[int] = field(default_factory=set)
    use: Use | None = None

    def unread(self) -> set[int]:
        """Data of slots that no backward read, and some other one may."""
        asked = {mark.number for mark in self.marks if mark.what == "asked"}
        found = {number for k, (_, number) in enumerate(self.packs) if number is not None and k not in asked}
        return found - self.discarded.keys()


def loss_of(marks: Sequence[Mark], peak: int) -> int:
    """The room for the loss, where this is the ``peak`` of a step since its forward."""
    end = next(k for k, mark in enumerate(marks) if mark.what == "end")
    return max(0, peak - min(mark.live for mark in marks[end:-1][:2]))


class FollowedLook(StepLook):
    """A look at a followed step, to the end of the backward that reads its slots. ``then`` is called with the moments
    that were marked, the last of which is the end.
    """

    then: Callable[[list[Moment]], None] | None = None

    def abandon(self, why: str = "") -> None:
        """As in ``Look``; what was noted of a step that failed is not kept."""
        super().abandon(why)
        if why in FAILED:
            self.then = None

    def ended(self, moments: list[Moment], stays: bool) -> None:
        """As in ``StepLook``: what stays is no step's."""
        if stays:
            self.why_not = "backward kept its graph (retain_graph, create_graph)"
        elif self.then is not None:
            then, self.then = self.then, None  # which holds what was noted
            then(moments)


class Observed(Policy):
    """Notes what happens while ``inner`` decides. ``missing``: bytes of the gradients that are not there."""

    def __init__(self, look: FollowedLook, inner: Policy, missing: dict[str, int]) -> None:
        self.inner, self.missing = inner, missing
        self.look: FollowedLook | None = look
        self.seen = Seen()
        self._outside: set[int] = set()  # data that somebody outside holds, too
        self._in_use: set[int] = set()  # data that autograd has got
        self._deaths = 0
        look.mark()  # levels are above this one: the numbers that the first operation is given are memory, too
        self.seen.marks.append(Mark("begin", 0, 0, time.perf_counter_ns()))

    def keeps(self, tape: Tape, datum: Datum) -> bool:
        return self.inner.keeps(tape, datum)

    def ended(self, tape: Tape) -> None:
        """As in ``Policy``: there is no backward to wait for, unless it runs."""
        self._mark_gone(tape)
        if self.look is not None:
            self.look.abandon(LET_GO if self.seen.packs else _NOTHING)

    def before(self, tape: Tape, index: int) -> None:
        self._mark(tape, "op", index)
        self.inner.before(tape, index)

    def after(self, tape: Tape, index: int, results: Sequence[Any]) -> None:
        op = tape.ops[index]
        self.seen.forms.append(form_of_op(op))
        self.seen.sizes.append(sizes_of(tape, op))
        self.seen.places.append(place_of_caller())
        self._outside.update(number for _, number in op.makes)
        self.inner.after(tape, index, results)

    def packed(self, tape: Tape, slot: Slot, t: torch.Tensor) -> None:
        self.seen.packs.append(pack_of(tape, slot))
        if slot.datum is not None:
            self.seen.discarded.pop(slot.datum.number, None)
        self.inner.packed(tape, slot, t)

    def over(self, tape: Tape) -> None:
        self._mark(tape, "end", len(tape.ops))
        self.inner.over(tape)

    def asked(self, tape: Tape, slot: Slot) -> None:
        if self.look is not None and not tape.open:
            self.look.reach()
            if graph_is_retained():
                self.seen.retained.add(slot.number)
        if slot.datum is not None and not tape.open:
            there = (key for key, outside in tape.gathered.items() if outside.is_there)
            self._mark(tape, "asked", slot.number, frozenset(there))
        self.inner.asked(tape, slot)

    def let_go(self, tape: Tape, datum: Datum) -> None:
        if tape.open and not datum.slots:
            self.seen.discarded[datum.number] = len(tape.ops) - 1
        self.inner.let_go(tape, datum)
        self._mark_gone(tape)

    def followed_by(self, policy: Policy) -> Policy:
        self.inner = policy
        return self

    def answered(self, tape: Tape, slot: Slot) -> None:
        assert slot.datum is not None
        self.inner.answered(tape, slot)
        if tape.open:
            self.seen.within.append(slot.datum.number)
            return
        self._in_use.add(slot.datum.number)
        if self.look is not None:
            self.seen.marks[-1].data = frozenset(self._in_use)
            self._mark(tape, "answered", slot.number)

    def waits(self, data: Sequence[Datum]) -> Waits:
        """What the step held while others of its calls ran, above what was there when its own forward returned and did
        not go before its backward.
        """
        end = next(k for k, mark in enumerate(self.seen.marks) if mark.what == "end")
        gaps = [found for found in (self.look.before_gaps if self.look is not None else ()) if found[0].moments > end]
        level, freed = self.seen.marks[end].moment.level, sum(data[n].size for n in self.seen.freed)
        forwards, backwards = ([gap.level - level for gap, of in gaps if of == x] for x in ("forward", "backward"))
        loss = min((loss_of(self.seen.marks, gap.peak) for gap, of in gaps if of == "backward"), default=0)
        in_forwards, in_backwards = waits_at(forwards, [(x, x) for x in backwards])
        return Waits(max(0, in_forwards + freed), max(0, in_backwards + freed), loss)

    def forget(self) -> None:
        """What was noted has been used: nothing of the call is kept but what tells it from others."""
        self.seen.marks.clear()
        self.look = None

    def _note(self, deaths: Sequence[int]) -> None:
        self._deaths += len(deaths)
        self._in_use.difference_update(deaths)

    def _mark_gone(self, tape: Tape) -> None:
        """Note this moment, if data have gone between two reads of the backward."""
        marks = self.seen.marks
        if self.look is None or self.look.in_gap or marks[-1].what not in ("answered", "gone"):
            return
        deaths = tape.ledger.deaths[self._deaths :]
        idle = sum(tape.data[n].size for n in deaths if n not in self._in_use and n not in self._outside)
        used = frozenset(self._in_use.intersection(deaths))
        if idle or used:
            self._note(deaths)
            self.look.mark()
            marks.append(Mark("gone", idle, tape.ledger.live, time.perf_counter_ns(), used))

    def _mark(self, tape: Tape, what: str, index: int, gathered: frozenset[int] = frozenset()) -> None:
        """Note this moment, and what has been let go since the one before."""
        at = len(self.seen.marks)
        deaths = tape.ledger.deaths[self._deaths :]
        if self.seen.marks and self.seen.marks[-1].what == "end":
            self.seen.freed.update(n for n in deaths if not tape.ledger.copies[n])
        self._note(deaths)
        released = self._outside - tape.held_outside(self._outside)
        self._outside -= released
        self.seen.released.update(dict.fromkeys(released, at))
        self._in_use = {n for n in self._in_use if not tape.ledger.is_held_here_alone(tape.data[n])}
        kind_of(tape.device).synchronize(tape.device)
        if self.look is None:
            return
        self.look.mark()
        mark = Mark(what, index, tape.ledger.live, time.perf_counter_ns(), gathered=gathered)
        self.seen.marks.append(mark)


def pack_of(tape: Tape, slot: Slot) -> tuple[int, int | None]:
    """What tells a slot from others: after how many operations it came, and what it refers to."""
    return len(tape.ops), None if slot.datum is None else slot.datum.number


def sizes_of(tape: Tape, op: Op) -> tuple[int, ...]:
    return tuple([tape.data[number].size for _, number in op.makes])


def place_of_caller() -> str:
    """The line of the user's code that calls, as "file.py:12"; empty if there is none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if _is_the_users(path):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_is_the_users = functools.cache(is_the_users)  # it is asked for each operation
