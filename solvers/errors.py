"""Errors of the solvers. Each message says what is wrong, where, and what to do next."""

from __future__ import annotations

from solvers.schedule import Step


class SolverError(Exception):
    """Base of all errors raised by ``solvers``."""


class ProblemError(SolverError, ValueError):
    """The problem breaks one of its stated invariants."""


class ScheduleError(SolverError, ValueError):
    """A schedule cannot be parsed, or the walker rejects one of its steps."""


class InfeasibleError(SolverError):
    """The solver has no schedule that fits. ``min_budget``: bytes of the smallest budget for which it has one.

    ``step``: the name of the step that needs ``min_budget``. ``at``: that step, if the problem is a ``Problem``.
    """

    def __init__(self, message: str, min_budget: int, step: str, at: Step | None = None) -> None:
        super().__init__(message)
        self.min_budget = min_budget
        self.step = step
        self.at = at


def check_whole(where: str, **figures: object) -> None:
    """Raise ``ProblemError`` for the first of ``figures`` that is no whole number from 0 to ``MOST``; it begins with
    ``where``.
    """
    for name, figure in figures.items():
        if type(figure) is not int:
            raise ProblemError(f"{where}: {name} is {figure!r}; expected an int")
        if figure < 0:
            raise ProblemError(f"{where} has a negative {name}, {figure}")
        if figure > MOST:
            raise ProblemError(f"{where}: {name} is {figure}; expected at most 2**53, in larger units")


MOST = 2**53
"""Solvers compute with floating-point numbers, which are not exact beyond."""
