"""One call of a step: its turn, from its forward to its backward."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable
from typing import Any

from rockmate.calls.look import Look
from rockmate.planning.ways import Ways
from solvers.calls import Way

_CLOCK = itertools.count(1)
"""The order of forwards and backwards."""


class Turn:
    """One call of a step. ``way``: in which it runs. ``at``: when its forward began; ``began``: when its backward did,
    0 before; ``gone``: when it was seen that there will be none.
    """

    def __init__(self, key: tuple[Hashable, int], ways: Ways, way: Way, name: str) -> None:
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
    def runs(self) -> bool:
        """Whether its forward is not over."""
        return self._graph is None

    @property
    def waits(self) -> bool:
        """Whether its forward is over, and a backward may still come."""
        if self._graph is None:
            return False
        if not self.began and not self.gone and self._graph() is None:
            self.gone = next(_CLOCK)
        return not self.began and not self.gone

    def waits_at(self, moment: int) -> bool:
        """Whether it kept its data at this moment."""
        return self.at < moment < (self.began or self.gone or moment + 1)
