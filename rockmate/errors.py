"""Errors of the module; each says what happened, where, and what to do next."""

from __future__ import annotations


class RockmateError(Exception):
    """Base of the errors raised by ``rockmate`` itself."""


class InputError(RockmateError, ValueError):
    """An argument cannot be used as it is."""


class BudgetError(InputError):
    """The budget is no number of bytes."""


class CannotBeCalledError(InputError):
    """The model itself fails when it is called with these arguments; ``__cause__`` is its error."""


class PlanError(RockmateError):
    """A saved plan cannot be used here."""


class PieceError(RockmateError):
    """A compiled piece does not compute what eager kernels do, or cannot be compiled here."""


class HookError(RockmateError):
    """A hook of a submodule would not be called under a plan."""


class GoneError(RockmateError, RuntimeError):
    """A second backward, or one of a part of the graph, needs what is gone and cannot be computed again."""


class BudgetWarning(UserWarning):
    """For this call the budget is not promised; results are right all the same."""


class PlanningWarning(UserWarning):
    """Plans are made again and again, or a capture has failed by a defect."""


class InfeasibleBudgetError(RockmateError):
    """No plan fits the budget. ``min_budget``: the smallest that can be planned (bytes)."""

    def __init__(self, message: str, min_budget: int) -> None:
        super().__init__(message)
        self.min_budget = min_budget
