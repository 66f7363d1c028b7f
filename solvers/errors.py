"""Errors of the solvers; each message says what, where, and what to do next."""

from __future__ import annotations


class SolverError(Exception):
    """Base of all errors raised by ``solvers``."""


class ProblemError(SolverError, ValueError):
    """The problem breaks one of its stated invariants."""


class ScheduleError(SolverError, ValueError):
    """A schedule cannot be read, or does what the walker forbids."""


class InfeasibleError(SolverError):
    """No schedule fits. ``min_budget`` is the smallest budget (bytes) that does; ``step`` says what sets it."""

    def __init__(self, message: str, min_budget: int, step: str) -> None:
        super().__init__(message)
        self.min_budget = min_budget
        self.step = step
