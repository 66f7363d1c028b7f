"""One call of a step: its turn, from its forward to its backward, and the ways in which such calls can run."""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch

from rockmate.calls.look import Look
from rockmate.planning.ways import Asked, serving, way_of
from solvers import Problem, Schedule, keep_everything
from solvers.calls import Way

_CLOCK = itertools.count(1)
"""The order of forwards and backwards."""


class Ways(Protocol):
    """In which ways the calls of one kind can run.

    ``owner``: whose parameters they use. ``device``: where they run. ``call`` in a few words. ``made``: bytes of the
    gradients of parameters that the backward makes. ``alone``: the way in which such a call runs where it is the only
    one of its step; ``eager``: the one that runs nothing again. ``rough``: these figures are bounds, since no plan is
    known.
    """

    @property
    def owner(self) -> object: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def call(self) -> tuple[str, ...]: ...
    @property
    def made(self) -> int: ...
    @property
    def alone(self) -> Way: ...
    @property
    def eager(self) -> Way: ...
    @property
    def rough(self) -> bool: ...
    def within(self, budget: int, *, tight: bool = False) -> Sequence[Way]:
        """Ways that take at most ``budget`` bytes; ``tight``: also those that take least, which may take long. Where
        none is known, the one that takes least.
        """


@dataclass(frozen=True, eq=False)
class Rough:
    """The only way of a call that no plan is known for: see ``Ways``."""

    owner: object
    device: torch.device
    call: tuple[str, ...]
    alone: Way
    made: int = 0
    rough: bool = True

    @property
    def eager(self) -> Way:
        """As in ``Ways``."""
        return self.alone

    def within(self, budget: int, *, tight: bool = False) -> Sequence[Way]:
        """As in ``Ways``."""
        return [self.alone]


def peak_of(way: Way) -> int:
    """Bytes at the worst moment of its two phases."""
    return max(way.forward, way.backward)


Found = TypeVar("Found")


class FoundWays(ABC, Generic[Found]):
    """Ways of a call that has a plan, ``schedule``, and others that are found when they are asked for: see ``Ways``.

    ``problem``, ``beside``, ``waits``: see ``way_of``. ``found``: what runs in each other way.
    """

    rough = False

    def __init__(self, problem: Problem, schedule: Schedule, beside: int, waits: tuple[int, int]) -> None:
        self.problem, self.schedule, self.beside, self.waits = problem, schedule, beside, waits
        self.found: dict[Way, Found] = {}
        self._asked: set[Asked] = set()

    @cached_property
    def alone(self) -> Way:
        """As in ``Ways``."""
        return self.way_of(self.schedule)

    @cached_property
    def eager(self) -> Way:
        """As in ``Ways``."""
        return self.way_of(keep_everything(self.problem))

    def way_of(self, schedule: Schedule) -> Way:
        """The figures of ``schedule``."""
        return way_of(self.problem, schedule, self.beside, self.waits)

    def within(self, budget: int, *, tight: bool = False) -> Sequence[Way]:
        """As in ``Ways``."""
        if serving(self._asked, budget, tight) is None:
            self.found.update(self.look_for(budget, tight))
            self._asked.add((budget, tight))
        ways = [self.alone, *self.found]
        return [way for way in ways if peak_of(way) <= budget] or [min(ways, key=peak_of)]

    @abstractmethod
    def look_for(self, budget: int, tight: bool) -> dict[Way, Found]:
        """Other ways, with what runs in them; see ``Ways.within``."""


class Turn:
    """One call of a step. ``way``: in which it runs. ``at``: when its forward began; ``began``: when its backward did,
    0 before; ``gone``: when it was seen that there will be none.
    """

    def __init__(self, key: Hashable, ways: Ways, way: Way, name: str) -> None:
        """``key``: of the kind of call, with how many calls of the step came before. ``name``: of the model."""
        self.key, self.ways, self.way, self.name = key, ways, way, name
        self.at, self.began, self.gone = next(_CLOCK), 0, 0
        self._graph: weakref.ref[Any] | None = None

    def held_by(self, graph: object) -> None:
        """``graph`` lives as long as there may be a backward."""
        self._graph = weakref.ref(graph)

    def begin(self, look: Look | None = None) -> None:
        """A backward has come to it. ``look``: at this call, if there is one."""
        if not self.began:
            self.began = next(_CLOCK)
            if Look.current is not None and Look.current is not look:
                Look.current.pause()

    @property
    def waits(self) -> bool:
        """Whether a backward may still come."""
        if not self.began and not self.gone and (self._graph is None or self._graph() is None):
            self.gone = next(_CLOCK)
        return not self.began and not self.gone

    def waits_at(self, moment: int) -> bool:
        """Whether it kept its data at this moment."""
        return self.at < moment < (self.began or self.gone or moment + 1)
