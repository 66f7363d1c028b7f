"""What the caller does with the outputs of a call, observed from its forward to the end of its backward.

Before the first step a plan assumes that a scalar beside other outputs is the loss, and that a loss takes three times
the bytes of its input. A step shows the truth: which outputs the backward starts from, how their gradients lie in
memory, which outputs the caller still holds when the backward begins, and what was allocated between the two phases.
The plan that is made when its backward is over is for the union of what was observed.

Hooks on the outputs notice at every call whether it differs from the calls so far. The next call is then observed
closely: see ``rockmate.calls.call_look``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rkgb.cost.usage import Usage, differentiable, turned_strides
from rkgb.device import kind_of
from rkgb.Ktools import K_graph
from rkgb.warn import warn
from rockmate.calls.look import Look
from rockmate.errors import BudgetWarning
from rockmate.planning.problem import Room, bytes_of_outputs, device_of_outputs, scaled, seen_room

if TYPE_CHECKING:
    from rockmate.planning.planner import Planner

_LOOKS = 8
"""Calls of one kind that are looked at closely, at most: a loop whose every step is new is not slowed down for ever."""


@dataclass(frozen=True, slots=True)
class Signs:
    """What the hooks notice of one call: how the outputs are used, all that get gradients as roots, and how many nodes
    the caller's code added to autograd's graph between the phases (-1 if that is not known).
    """

    usage: Usage
    nodes: int

    def differ_in_holding(self, other: Signs) -> bool:
        """Whether it is only what the caller holds that tells the calls apart."""
        mine, theirs = (dataclasses.replace(x.usage, held=_NONE, attached=_NONE) for x in (self, other))
        return (mine, self.nodes) == (theirs, other.nodes)


_NONE: frozenset[int] = frozenset()


class Observer:
    """Watches the calls of one plan. ``news``: they differ from what it is for, which ``usage`` and ``room`` say.

    ``measures``: whether the room for the loss is to be learned. ``declared``: whether the user said what it takes.
    """

    def __init__(self, k: K_graph, declared: bool) -> None:
        d = k.s.d
        self.measures, self.declared = True, declared
        self.gradients = k.gradient_bytes
        self.storages = [d.values[v].storage for v in d.outputs]
        self.saved = {x for facts in d.facts for x in facts.saved.storages}
        self.usage: Usage | None = None
        self.news = False
        self.holds_more = False  # these news are only that the caller holds more
        self.unsure = False  # a call differed from those that were looked at: its loss may take more
        self.places = differentiable(d)
        self.device = device_of_outputs(d)
        self.may_turn = frozenset(k for k in self.places if turned_strides(d.values[d.outputs[k]]))
        self.bytes = {k: d.values[d.outputs[k]].bytes for k in self.places}
        self.outputs = bytes_of_outputs(d)
        self.refused: Planner | None = None  # for what was seen, where no plan for that fitted the budget
        self._known: set[Signs] = set()
        self._peak = self._kept = -1
        self._outputs = self.outputs  # for which these are: of this size, or of a larger one
        self.waits: tuple[int, int] | None = None  # bytes that were held in forwards, and in backwards, of other calls
        self.early = 0  # bytes that the loss took before any backward began
        self._looks = 0
        self._wasted = self._passing = 0  # looks in a row that showed nothing new; calls to pass over before the next
        self._look = True  # at the next call
        self._said = False  # that there are no more

    def note_gaps(self, waits: tuple[int, int] | None, early: int) -> None:
        """A call was looked at, which held ``waits`` while others of its step ran, if there are any."""
        self.early = max(self.early, early)
        if waits is not None:
            known = self.waits or waits
            self.waits = max(known[0], waits[0]), max(known[1], waits[1])

    @property
    def room(self) -> Room | None:
        """For the loss, as it was seen; None if it was not."""
        if self._peak < 0:
            return None
        return seen_room(self._peak, self._kept, kind_of(self.device).scalars, self._outputs)

    def as_seen_by(self, other: Observer, room: Room) -> None:
        """Calls of the same graph at another size were seen; their loss took what is now ``room``.

        Where no plan was made for what was seen, ``room`` is not for that: these calls are looked at themselves. So are
        they at a larger size than was seen: a loss may grow faster than the outputs.
        """
        if other.usage is None or other.unsure or other.refused is not None or (other.news and not other.holds_more):
            return
        is_larger = self.outputs > other._outputs
        if room.outputs is None and self.declared:
            if is_larger:
                return
            self._peak, self._kept, self._outputs = other._peak, other._kept, other._outputs
        self.usage, self._known, self._look = other.usage, set() if is_larger else set(other._known), is_larger
        self.news, self.holds_more = other.news, other.holds_more
        if room.outputs is not None:
            self._peak, self._kept = room.between + room.kept + room.scalars, room.kept + room.scalars
            self._outputs = room.outputs

    def leave_room(self) -> None:
        """What was allocated between the phases was not the loss's: forget it, and measure no more."""
        self.measures, self._peak, self._kept = False, -1, -1

    def wants_look(self) -> bool:
        """Whether the call whose forward is about to run is to be looked at closely, and can be."""
        if self.unsure and self._look and len(self._known) >= _LOOKS <= self._looks and not self._said:
            self._said = True
            more = "takes more than was seen, a step exceeds the budget. Declare what it takes at most (loss_memory=)"
            warn(
                f"the loss is another one in each of {_LOOKS} observed steps, and steps are observed no more: where it "
                + (
                    more
                    if self.measures and not self.declared
                    else "uses outputs otherwise than was seen, a step may exceed the budget"
                ),
                BudgetWarning,
            )
        if not self._look or self._looks >= _LOOKS or not self.places or not Look.possible():
            return False
        if self._passing:
            self._passing -= 1
            return False
        self._looks += 1
        return True

    def planned_for(self, supposed: Usage) -> Usage:
        """How outputs are used, by all that is known; ``supposed``: before the first step."""
        if self.usage is None or not self.unsure:
            return self.usage or supposed
        return dataclasses.replace(_union(self.usage, supposed), turned=None)

    def note_later(self, k: int) -> None:
        """A second backward of a call comes to output ``k``."""
        if self.usage is not None and k not in self.usage.roots:
            self.usage = _union(self.usage, Usage((k,), _NONE, _NONE, _NONE))
            self.news, self.holds_more = True, False

    def note(self, signs: Signs, roots: tuple[int, ...] | None, seen: tuple[int, int, int] | None) -> None:
        """A call is over. Where it was looked at closely, ``roots``: outputs that its backward started from; ``seen``:
        the most bytes above the level when forward returned, those that were new when the backward began, and those of
        them that are left.
        """
        if signs in self._known:
            if roots is not None:  # of the calls of a step, others are to be looked at
                self._wasted += 1
                self._passing = self._wasted - 1
            return
        if roots is None and self.usage is not None and any(signs.differ_in_holding(other) for other in self._known):
            held = _union(self.usage, Usage((), signs.usage.held, signs.usage.attached, _NONE))
            self.holds_more = self.holds_more or not self.news
            self.news, self.usage, self._look = self.news or held != self.usage, held, True
            return
        if roots is None or (self.measures and seen is None and self._looks < _LOOKS):
            self.news = self.news or (self.usage is not None and not self.unsure)
            self.unsure = self._look = True
            return
        self._known.add(signs)
        self._wasted = 0
        self._look, self.news, self.unsure, self.holds_more = False, True, False, False
        viewed = frozenset(found for found in signs.usage.viewed if found[0] in roots)
        turned = (signs.usage.turned or _NONE).intersection(roots)
        now = dataclasses.replace(signs.usage, roots=roots, turned=turned, viewed=viewed)
        self.usage = now if self.usage is None else _union(self.usage, now)
        if self.measures and seen is not None:
            peak, level, left = seen
            # What is left and was not there when the backward began, the backward has made, as a state of optimizers.
            kept = max(0, level - sum(self.bytes[k] for k in roots), min(level, left - self.gradients))
            peak, kept = (scaled(x, self.outputs, self._outputs) for x in (peak, kept))
            self._peak, self._kept = max(self._peak, peak), max(self._kept, kept)


def _union(a: Usage, b: Usage) -> Usage:
    turned = (a.turned or _NONE) | (b.turned or _NONE)
    roots = tuple(sorted({*a.roots, *b.roots}))
    return Usage(roots, a.held | b.held, a.attached | b.attached, turned, a.viewed | b.viewed)
