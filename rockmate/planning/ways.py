"""In which ways a planned call can run beside others: what it keeps for its backward, and its peaks, against time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch

from solvers import Loss, Problem, Schedule, ScheduleError, Walk, keep_everything, walk
from solvers.calls import Way

PEAKS = (0.3, 0.45, 0.6, 0.75, 0.9, 1.0)
"""Parts of the budget that are tried as the peak of such a call."""

TIGHT = 4
"""Peaks that are tried between the least and ``PEAKS[0]`` of the budget."""

KEPT = 6
"""Amounts to keep that are tried for each of ``PARTS``."""

PARTS = (1.0, 0.7)
"""Parts of the budget that such a call may take."""

NEAR = 0.1
"""Budgets that differ by this part of them need no search each."""

R = TypeVar("R")

Asked = tuple[int, bool]
"""A budget in bytes for which ways were looked for, and whether those of least memory were among them."""


def serving(asked: Iterable[Asked], budget: int, tight: bool) -> Asked | None:
    """What was looked for that serves for ``budget``, too, from which other calls of the step may take a little."""
    return next((a for a in asked if abs(a[0] - budget) <= NEAR * budget and (a[1] or not tight)), None)


class Waits(NamedTuple):
    """Bytes that a call holds beside the data of its plan while ``forwards`` of other calls of its step run, and
    ``backwards``. ``loss``: what it takes of its problem's room for the loss before any backward begins.
    """

    forwards: int = 0
    backwards: int = 0
    loss: int = 0


def waits_at(forwards: Sequence[int], backwards: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """What a call holds while others run, of its levels where their ``forwards`` begin, and their ``backwards``, above
    that when its own forward returned; of these also how much is new since then. What came after the forward of another
    call, the figures of that call have.
    """
    before = max(forwards, default=0)
    return before, max((level - new + min(new, max(0, before)) for level, new in backwards), default=0)


@dataclass(eq=False)
class Ways:
    """In which ways the calls of one kind can run: in one, as long as no plan of them is known.

    ``owner``: whose parameters they use, which has a name. ``device``: where they run. ``call`` in a few words.
    ``alone``: the way in which such a call runs where it is the only one of its step. ``made``: bytes of the gradients
    of parameters that the backward makes. ``rough``: these figures are bounds, since no plan is known.
    """

    owner: Any
    device: torch.device
    call: tuple[str, ...]
    alone: Way
    made: int = 0
    rough: ClassVar[bool] = True
    waits = Waits()
    left = 0  # bytes of results that the caller holds after the backward
    eager_time = 0  # nanoseconds of a step that runs nothing again, where a plan is known

    @property
    def eager(self) -> Way:
        """The way that runs nothing again."""
        return self.alone

    def within(self, budget: int, *, tight: bool = False) -> Sequence[Way]:
        """Ways that take at most ``budget`` bytes; ``tight``: also those that take least, which may take long. Where
        none is known, the one that takes least.
        """
        return [self.alone]

    def from_start(self, budget: int) -> Sequence[Way]:
        """Ways that are found where ``budget`` bytes are given from the start, those of least memory among them."""
        return [self.alone]


def peak_of(way: Way) -> int:
    """Bytes at the worst moment of its two phases."""
    return max(way.forward, way.backward)


class FoundWays(Ways, ABC, Generic[R]):
    """Ways of a call that has a plan, ``schedule``, and others that are found when they are asked for.

    ``walked``: the figures of ``schedule``. Bytes ``beside`` it are there at every moment, and those of ``waits`` while
    others run. ``searched``: schedules, by what was asked for; ``alike``: those of other sizes, which do here but for
    the tight ones. ``found``: that of each other way. ``runs``: what runs the plan alone.
    """

    rough = False

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        walked: Walk,
        beside: int,
        waits: Waits,
        searched: dict[Asked, list[Schedule]],
        runs: R,
        alike: Mapping[Asked, Sequence[Schedule]] | None = None,
    ) -> None:
        self.problem, self.beside, self.waits, self.searched = problem, beside, waits, searched
        self.alike = alike or {}
        self.left = sum(problem.data[d].size for d in problem.held)
        self.alone, self.eager_time = self.way_of(schedule, walked), problem.eager_time
        self.found: dict[Way, Schedule] = {}
        self._taken: set[tuple[Asked, bool]] = set()  # of what was searched, and whether at other sizes
        self._placed: dict[Way, R] = {self.alone: runs}

    @cached_property
    def eager(self) -> Way:
        return self.way_of(keep_everything(self.problem))

    def way_of(self, schedule: Schedule, walked: Walk | None = None) -> Way:
        """The figures of ``schedule``, which has been ``walked`` or not."""
        walked, at = walked or walk(self.problem, schedule), schedule.index(Loss())
        kept, backward = walked.timeline[at] - self.problem.loss, max(walked.timeline[at:], default=0)
        in_forwards, in_backwards, loss = self.waits
        forward = max([*walked.timeline[:at], kept + loss])
        more = max(0, in_forwards - in_backwards)
        return Way(
            kept + self.beside + in_backwards, forward + self.beside, backward + self.beside, walked.recompute, more
        )

    def within(self, budget: int, *, tight: bool = False) -> Sequence[Way]:
        like = None if tight or serving(self.searched, budget, tight) else serving(self.alike, budget, tight)
        if like is not None:
            self._take(like, self.alike)
        elif serving(self.searched, budget, tight) is None:
            self._search(budget, tight)
        for asked in self.searched:
            self._take(asked, self.searched)
        ways = [self.alone, *self.found]
        return [way for way in ways if peak_of(way) <= budget] or [min(ways, key=peak_of)]

    def _take(self, asked: Asked, searched: Mapping[Asked, Sequence[Schedule]]) -> None:
        taken = asked, searched is self.alike
        for schedule in () if taken in self._taken else searched[asked]:
            with suppress(ScheduleError):  # of another use of the outputs
                self.found.setdefault(self.way_of(schedule), schedule)
        self._taken.add(taken)

    def from_start(self, budget: int) -> Sequence[Way]:
        return [self.way_of(schedule) for schedule in self._search(budget, True)] or [self.alone]

    def _search(self, budget: int, tight: bool) -> list[Schedule]:
        """What is found where that is asked for; it is looked for once."""
        if (budget, tight) not in self.searched:
            others = self._search(budget, False) if tight else []
            self.searched[budget, tight] = list(dict.fromkeys([*self.look_for(budget, tight), *others]))
        return self.searched[budget, tight]

    def look_for(self, budget: int, tight: bool) -> Iterable[Schedule]:
        """Schedules within ``budget`` bytes: for smaller peaks, and for amounts to keep; if ``tight``, others that take
        less, down to the least.

        To keep no more than so much is to have so much more for the loss.
        """
        problem, keep, budget = self.problem, keep_everything(self.problem), budget - self.beside
        asked: list[tuple[Problem, int]]
        if tight:
            least, schedule = self.least()
            if schedule is not None:
                yield schedule
            more = max(0, int(PEAKS[0] * budget) - least)
            asked = [(problem, least + more * k // TIGHT) for k in range(TIGHT)]
        else:
            walked = walk(problem, keep)
            if walked.peak <= budget:
                yield keep
            kept = walked.timeline[keep.index(Loss())] - problem.loss
            asked = [(problem, int(part * budget)) for part in PEAKS if part * budget < walked.peak]
            limits = [(int(part * budget), k) for part in PARTS for k in range(KEPT)]
            asked += [(replace(problem, loss=max(problem.loss, of - kept * k // KEPT)), of) for of, k in limits]
        for wanted, limit in asked:
            schedule = self.solve(wanted, limit)
            if schedule is not None:
                yield schedule

    def placed(self, way: Way) -> R:
        """What runs in this way."""
        if way not in self._placed:
            self._placed[way] = self.lowered(way, self.found[way])
        return self._placed[way]

    @abstractmethod
    def lowered(self, way: Way, schedule: Schedule) -> R:
        """``schedule``, which is that of ``way``, ready to run."""

    @abstractmethod
    def least(self) -> tuple[int, Schedule | None]:
        """The fewest bytes that a schedule takes, and that schedule, if it is known."""

    @abstractmethod
    def solve(self, problem: Problem, limit: int) -> Schedule | None:
        """A schedule of ``problem``, which may have another loss, within ``limit`` bytes; None if none is found."""
