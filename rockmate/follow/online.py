"""Decides what is held of a forward that no plan is known for, as it takes place.

All that autograd saves is held until a limit is reached. Then the data go that cost least time per byte to make again,
whose makers are known. Calls of one step that are decided so share one limit: what one needs, others let go.
Source: Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021), without staleness: in a backward the order of
reads is known.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from rockmate.calls.look import Look, others_data
from rockmate.calls.surroundings import RETAINED, graph_is_retained, warn_unplanned
from rockmate.calls.whole_steps import Turn
from rockmate.follow.policy import Policy
from rockmate.follow.record import Datum, Slot, needed_for
from rockmate.follow.tape import Tape

SLACK = 16
"""When a limit is reached, this part of it is let go at once."""


class Online(Policy):
    """``limit``: bytes that may live, or a ``share`` of what autograd would keep. ``left``: it takes over from a plan,
    which may have let go what others cannot be made again without. ``kept``: bytes that are held, whatever the limit
    is, of those that can go: without any, each read of a backward may run nearly all of the forward again. ``turns`` of
    the other calls of the step, whose bytes count, and ``own``, that of this one.
    """

    def __init__(
        self,
        limit: int | None,
        share: float = 1.0,
        left: bool = False,
        kept: int = 0,
        turns: Sequence[Turn] = (),
        own: Turn | None = None,
    ) -> None:
        self.limit, self.share, self.left, self.kept, self.turns, self.own = limit, share, left, kept, turns, own
        self.saved = 0  # bytes of data that autograd would keep
        self.held = 0  # bytes of data that are held, at most
        self.floor = 0  # bytes that live and cannot go
        self.warned = False  # that a step may exceed the budget

    def after(self, tape: Tape, index: int, results: Sequence[Any]) -> None:
        op = tape.ops[index]
        if op.reruns:
            for number in op.reads:
                datum = tape.data[number]
                if datum.pinned and datum.base is None:  # reruns could not do without
                    tape.hold(datum)
        self._make_room(tape)

    def packed(self, tape: Tape, slot: Slot, t: torch.Tensor) -> None:
        datum = slot.datum
        if datum is not None and datum.base is None:
            self.saved += datum.size if datum.slots == 1 else 0
            self.held += datum.size
            datum.base = t.detach()

    def asked(self, tape: Tape, slot: Slot) -> None:
        beside = self._beside()
        tape.reruns.limit = None if self.limit is None else self._most(tape.ledger.live + beside) - beside
        if self.left and not self.warned and not tape.open and graph_is_retained():
            self.warned = True
            warn_unplanned(RETAINED)

    def answered(self, tape: Tape, slot: Slot) -> None:
        datum = slot.datum
        if datum is not None and datum.slots == 1 and self._may_go(tape, datum) and not graph_is_retained():
            datum.base = None  # autograd alone has it from now on
        self._make_room(tape)

    def let_go(self, tape: Tape, datum: Datum) -> None:
        if not datum.slots and self._may_go(tape, datum):
            datum.base = None

    def _may_go(self, tape: Tape, datum: Datum) -> bool:
        """Whether the datum can be made again, or in the backward, nothing that is missing is made from it."""
        if not datum.pinned and (not self.left or _again(tape, datum) is not None):
            return True
        if tape.open:
            return False
        missing = (d.number for d in tape.data if d.slots and d.base is None)
        return datum not in needed_for(tape.ops, tape.data, missing)

    def _make_room(self, tape: Tape) -> None:
        if self.limit is None and self.share >= 1:
            return
        live = tape.ledger.live + self._beside()
        most = self._most(live)
        if self.limit is None:
            if self.held > most:
                self.held = sum(d.size for d in tape.data if d.base is not None)
            live = self.held
        if live > most:
            tapes = [tape, *self._others()]
            going = [
                (cost, k, d.number) for k, t in enumerate(tapes) for d in t.data if (cost := _rate(t, d)) is not None
            ]
            room = sum(tapes[k].data[number].size for _, k, number in going)
            if self.limit is not None:
                self.floor = live - room
                most = self._most(live)
            if live > most:
                self.held -= evict(tapes, going, max(live - most, min(live - most + most // SLACK, room - self.kept)))

    def _most(self, live: int) -> int:
        """Bytes of ``live`` that may be: the limit, or what is ``kept`` beside what cannot go, where that is more."""
        if self.limit is None:
            return int(self.share * self.saved)
        self.floor = min(self.floor, live)
        return self.floor + self.kept if self.kept and self.floor > self.limit else self.limit

    def _beside(self) -> int:
        """Bytes that the other calls of the step hold."""
        return sum(turn.holds for turn in self.turns if turn is not self.own)

    def _others(self) -> list[Tape]:
        """Those of other calls of which data can go: that are decided so, too, and not looked at."""
        looked = self.own, getattr(Look.current, "turn", None)
        tapes = (turn.tape for turn in self.turns if turn not in looked)
        return [t for t in tapes if t is not None and isinstance(t.policy, Online) and t.policy.limit is not None]


def evict(tapes: Sequence[Tape], going: list[tuple[float, int, int]], wanted: int) -> int:
    """Let data go until ``wanted`` bytes are free, or nothing is left that can; how many are. ``going``: these data, by
    ``_rate``, tape and number; the first of the ``tapes`` may be observed.
    """
    heap, freed = going, 0
    heapq.heapify(heap)
    while heap and freed < wanted:
        cost, k, number = heapq.heappop(heap)
        datum = tapes[k].data[number]
        now = _rate(tapes[k], datum)  # what it is made from may have gone
        if now is not None and now > cost:
            heapq.heappush(heap, (now, k, number))
        elif now is not None:
            with others_data() if k else nullcontext():
                datum.base = None
            freed += datum.size
    return freed


def _rate(tape: Tape, datum: Datum) -> float | None:
    """Nanoseconds a byte; None for data that cannot go, or whose memory somebody else holds."""
    if datum.pinned or not datum.slots or not tape.ledger.is_held_here_alone(datum):
        return None
    again = _again(tape, datum)
    return None if again is None else (1 + again) / datum.size


def _again(tape: Tape, datum: Datum) -> int | None:
    """Nanoseconds that it takes to make ``datum`` if it is not held; None if that cannot be done."""
    total = 0
    for other in needed_for(tape.ops, tape.data, [datum.number], lambda d: d is not datum and d.base is not None):
        if other.pinned:
            return None
        total += sum(tape.ops[index].nanoseconds for index in other.makers)
    return total
