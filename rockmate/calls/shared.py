"""What the ranks of a distributed job have seen of steps of several graphs: all plan for the most that any has seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rockmate.planning.disk import named
from rockmate.planning.kept import versions
from rockmate.planning.places import Places
from solvers.files.values import from_json, to_json
from solvers.sequence import Stage, together

_made: Counter[str] = Counter()  # by the name, apart from the number at its end


@dataclass
class SharedStages:
    """One sequence of graphs, as the ranks of ``places`` have seen it.

    ``stages``: with the most of what any of them has seen so far, as far as this rank knows; none before the first.
    ``name``: the same on all ranks for the same choices. ``offers``: how many this rank knows.

    Each offer is wider than the one before. No rank waits for another: it takes up later offers when a step begins.
    """

    places: Places
    name: str
    stages: tuple[Stage, ...] = ()
    offers: int = 0

    @classmethod
    def of(cls, places: Places, stages: tuple[Stage, ...], options: tuple[tuple[int, ...], ...]) -> SharedStages:
        """For steps that have these choices, as positions among those of the graphs, too.

        The n-th model of a rank with such steps shares with the n-th of another: an earlier one may have had another
        loss.
        """
        name = named("stages", to_json([stage.choices for stage in stages]), options, versions())
        _made[name] += 1
        return cls(places, f"{name}/{_made[name]}")

    def is_new(self) -> bool:
        """Take up what others have offered since; whether there was something."""
        before = self.offers
        while (found := self.places.read(self._next, _stages)) is not None:
            self.stages = found
            self.offers += 1
        return self.offers > before

    def add(self, seen: tuple[Stage, ...]) -> None:
        """This rank has seen ``seen``."""
        self.is_new()
        while (wider := together([self.stages or seen, seen], max)) != self.stages:
            self.stages = self.places.keep(self._next, {"stages": wider}, _stages, wider)
            self.offers += 1

    @property
    def _next(self) -> str:
        return f"{self.name}/{self.offers}"


def _stages(content: dict[str, Any]) -> tuple[Stage, ...]:
    found: tuple[Stage, ...] = from_json(content["stages"], tuple[Stage, ...], "stages")
    return found
