"""The result of a solver: a verified schedule, its cost, and a proven lower bound on the cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from solvers.schedule import Schedule

Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True, slots=True)
class Solution:
    """The answer of one solver to one problem and budget.

    ``status``:

    - ``"optimal"``: ``schedule`` fits, and no schedule of the solver's class costs less, up to the gap asked for;
    - ``"feasible"``: ``schedule`` fits; cheaper ones are not excluded (``gap`` says by how much at most);
    - ``"infeasible"``: proven that no schedule of the solver's class fits;
    - ``"unknown"``: no schedule was found in the time given, and none is excluded.

    ``reason`` says what the status rests on, and names the class. ``cost`` and ``bound`` are times of the whole step in
    the problem's unit (nanoseconds, unless a file has another); no schedule of the class costs less than ``bound``.
    ``peak`` is the walker's figure in bytes. ``seconds`` is wall time. ``solver`` is the name of the solver that found
    the schedule. ``cost``, ``peak`` and ``schedule`` are None if there is no schedule.
    """

    status: Status
    reason: str
    cost: int | None
    bound: int
    peak: int | None
    schedule: Schedule | None
    seconds: float
    solver: str

    @property
    def gap(self) -> float:
        """``(cost - bound) / cost``: 0 for a proven optimum, infinite without a schedule."""
        if self.cost is None:
            return float("inf")
        return (self.cost - self.bound) / self.cost if self.cost else 0.0
