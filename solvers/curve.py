"""``Frontier``: time against memory, for all budgets; as a table and as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from solvers.figures import MIB, finished, new_figure
from solvers.tables import html_table, text_table
from solvers.units import show_at_least, show_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 10
"""How many rows a table has, about."""

STEPS = (10, 5, 2, 1)
"""Percents of memory that may lie between two rows of a table."""

KNEE = 0.05
"""A budget between two rows has a row if its overhead is lower by this than a line between the two says."""


class Baseline(NamedTuple):
    """A usual way to checkpoint: ``peak`` in bytes, ``overhead`` as a fraction of the time without recomputation."""

    name: str
    peak: int
    overhead: float


@dataclass(frozen=True, slots=True, repr=False)
class Frontier:
    """Time against memory: ``points`` are (budget in bytes, overhead), overhead falling as the budget grows.

    Overhead is recompute time as a fraction of the time without recomputation. Budgets are bytes. From ``max_budget``
    on, nothing is recomputed. ``min_budget`` is the smallest budget for which a schedule is known. Every schedule of
    the solver's class needs at least ``lower`` bytes. If the two are equal (``exact``), ``min_budget`` is proven to be
    the smallest feasible budget. ``baselines``: what the usual ways to checkpoint take, where blocks are known. It
    prints as a table of about ten rows. ``call``: which calls it is of, in a few words, where there are others.
    """

    min_budget: int
    max_budget: int
    points: tuple[tuple[int, float], ...]
    lower: int = 0
    baselines: tuple[Baseline, ...] = ()
    call: str = ""

    @property
    def exact(self) -> bool:
        """Whether ``min_budget`` is proven to be the smallest budget that a schedule of the class fits."""
        return self.lower == self.min_budget

    def overhead(self, budget: float) -> float:
        """The least overhead of the points that fit ``budget`` bytes. Raises ``ValueError`` if none does, and for what
        is no number.
        """
        if not isinstance(budget, (int, float)):
            raise ValueError(f"budget={budget!r}: give a number of bytes")
        found = [overhead for size, overhead in self.points if size <= budget]
        if not found:
            raise ValueError(f"no point fits {show_bytes(budget)}: the smallest budget is {self._least()}")
        return min(found)

    def plot(self, path: str | Path | None = None, *, measured: Sequence[tuple[int, float]] = ()) -> Figure:
        """The curve as a figure of matplotlib, with the usual ways to checkpoint; also written to ``path``.

        The ending of ``path`` says in which format. ``measured``: (peak in bytes, overhead as a fraction) of runs.
        Raises ``ImportError`` where matplotlib is missing.
        """
        figure, axes = new_figure()
        budgets, overheads = [size / MIB for size, _ in self.points], [100 * time for _, time in self.points]
        axes.step(budgets, overheads, where="post", label="Rockmate, predicted")
        if measured:
            axes.plot([p / MIB for p, _ in measured], [100 * t for _, t in measured], "o", label="Rockmate, measured")
        for found in self.baselines:
            axes.plot([found.peak / MIB], [100 * found.overhead], "x", label=found.name)
        axes.set_xlabel("peak memory of a training step (MiB)")
        axes.set_ylabel("longer than without recomputation (%)")
        # The smallest budgets may take many times longer; the others are of interest.
        axes.set_ylim(top=min(axes.get_ylim()[1], 100))
        axes.legend()
        return finished(figure, path)

    def table(self) -> list[tuple[int, float, float]]:
        """About ten rows: a budget in bytes, its share of ``max_budget``, and the overhead. The largest comes first.

        There are more where the overhead rises steeply: the smallest budgets before it does. Shares are whole
        percents, which can be given as a budget ("60%"), but for the last one, ``min_budget``.
        """
        if self.max_budget <= 0:
            return []
        least = self.min_budget / self.max_budget
        last = self.min_budget, least, self.overhead(self.min_budget)
        rows = [self._row(p) for p in _percents(100 * least) if p / 100 - least > 0.005]  # else it prints as the last
        knees = [row for above, below in pairwise([*rows, last]) for row in self._knee(above, below)]
        return [*sorted([*rows, *knees], reverse=True), last]

    def _row(self, percent: int) -> tuple[int, float, float]:
        budget = self.max_budget * percent // 100
        return budget, percent / 100, self.overhead(budget)

    def _knee(self, above: tuple[int, float, float], below: tuple[int, float, float]) -> list[tuple[int, float, float]]:
        """The row between two that lies lowest under the line between them, if it lies low enough, and those between it
        and the two.
        """
        rise = (below[2] - above[2]) / (above[1] - below[1]) if above[1] > below[1] else 0.0
        if below[2] - above[2] < KNEE:
            return []
        between = [
            self._row(p) for p in range(int(100 * below[1]) + 1, round(100 * above[1])) if p / 100 - below[1] > 0.005
        ]
        gains = [(above[2] + rise * (above[1] - share) - overhead, budget) for budget, share, overhead in between]
        gain, budget = max(gains, default=(0.0, 0))
        found = [row for row in between if row[0] == budget and gain >= KNEE]
        return [knee for row in found for knee in (*self._knee(above, row), row, *self._knee(row, below))]

    def _rows(self) -> list[tuple[str, str, str]]:
        rows = [("budget", "of eager's peak", "extra time")]
        for budget, share, overhead in self.table():
            percent = ceil(1000 * share - 1e-6) / 10  # of the last row, rounded up, so that it can be given
            rows.append((show_at_least(budget), f"{percent:g} %", f"{100 * overhead:.1f} %"))
        return rows

    def _least(self) -> str:
        return show_at_least(self.min_budget)

    def __repr__(self) -> str:
        return f"<Frontier: {self._least()} to {show_bytes(self.max_budget)}, {len(self.points)} points>"

    def __str__(self) -> str:
        return f"for {self.call}\n{text_table(self._rows())}" if self.call else text_table(self._rows())

    def _repr_html_(self) -> str:
        """A notebook shows the table."""
        return f"<p>for {escape(self.call)}</p>" * bool(self.call) + html_table(self._rows())


def _percents(least: float) -> Iterator[int]:
    """Round percents from 100 down to ``least``, about ``ROWS`` of them at most."""
    step = next((s for s in reversed(STEPS) if (100 - least) / s <= ROWS - 1), STEPS[0])
    yield from range(100, int(least), -step)
