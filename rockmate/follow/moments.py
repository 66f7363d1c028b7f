"""The moments of a followed step's backward at which autograd asks for saved tensors, as they were observed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rockmate.follow.observed import Seen
from rockmate.follow.record import Datum, Op, needed_for


class Forward(NamedTuple):
    """What a ``Tape`` has noted."""

    ops: list[Op]
    data: list[Datum]


@dataclass
class BackwardMoment:
    """One moment of the backward. ``slots``: that it reads. ``gathered``: storages that come and go which are there."""

    slots: list[int]
    gathered: frozenset[int]
    reads: set[int]
    before: int
    peak: int
    time: int
    after: int = 0


def moments_of(tape: Forward, seen: Seen, ends: dict[int, int]) -> list[BackwardMoment]:
    """The moments of the backward, in order. Where autograd asks for several tensors at once, they are one. So are all
    from one at which it asks for a tensor to the last at which it does so again, as for a hook that differentiates.
    """
    first: dict[int, int] = {}  # the moment that reads it, by slot
    asked = [k for k, mark in enumerate(seen.marks) if mark.what == "asked"]
    steps: list[BackwardMoment] = []
    last = _last_needed(tape, seen, asked) if seen.used_up else {}
    quiet = False  # nothing was allocated since the moment before was answered
    for k, end in itertools.zip_longest(asked, asked[1:], fillvalue=len(seen.marks)):
        after = range(k + 1, end)  # "answered", and then "gone"
        before = seen.moments[k].level - seen.marks[k].live
        gone = itertools.accumulate((_gone(tape, seen, j, last, k) for j in after[1:]), initial=0)
        peak = max(seen.moments[j].peak + idle for j, idle in zip(after, gone, strict=True)) - seen.marks[k + 1].live
        held = {n for n, at in ends.items() if len(tape.ops) + k < at < len(tape.ops) + len(seen.marks)}
        reads = {*seen.reads[k], *held}
        time = (seen.marks[end].time if end < len(seen.marks) else seen.ended) - seen.marks[k + 1].time
        if quiet:
            steps[-1].peak = 0
        there = seen.gathered.get(k, frozenset())
        steps.append(BackwardMoment([seen.marks[k].number], there, reads, max(0, before), max(0, peak), time))
        at = first.get(seen.marks[k].number, len(steps) - 1 - quiet)
        steps[at:] = [_joined(steps[at:])]
        first.update(dict.fromkeys(steps[at].slots, at))
        quiet = {bytes_ for j in after for bytes_ in seen.moments[j]} == {seen.moments[end].level}
    final = seen.moments[-1].level - seen.left if steps else 0
    for step, following in itertools.zip_longest(steps, steps[1:]):
        step.after = max(0, following.before if following is not None else final)
        step.peak = max(step.peak, step.before, step.after)
    return steps


def _joined(steps: list[BackwardMoment]) -> BackwardMoment:
    joined, *others = steps
    for step in others:
        joined.slots += step.slots
        joined.reads |= step.reads
        joined.peak = max(joined.peak, step.peak)
        joined.time += step.time
    return joined


def _last_needed(tape: Forward, seen: Seen, asked: Sequence[int]) -> dict[int, int]:
    """By datum, the last of the marks ``asked`` that needs it: itself, or something that is made again from it."""
    last: dict[int, int] = {}
    for k in reversed(asked):
        number = seen.packs[seen.marks[k].number][1]
        if number is not None:
            last.update(dict.fromkeys(needed_for(tape.ops, tape.data, [number], last), k))
    return last


def _gone(tape: Forward, seen: Seen, j: int, last: dict[int, int], k: int) -> int:
    """Bytes that went at mark ``j``, and may be there under another schedule: what nobody used, and what autograd did
    use for the moment at mark ``k``, and something is made from again later.
    """
    used_up = (n for n in seen.used_up.get(j, ()) if last.get(n, k) > k)
    return seen.marks[j].number + sum(tape.data[n].size for n in used_up)
