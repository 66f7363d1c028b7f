"""HiGHS, loaded when the first program is solved. Without it, everything that solves no program works."""

from __future__ import annotations

from typing import Any

from solvers.errors import SolverError


def load() -> Any:
    """The package ``highspy``; ``SolverError`` if it is not installed.

    Imported here because most runs need no solver: their plans are saved, or nothing has to be recomputed.
    """
    try:
        import highspy
    except ImportError as error:
        raise SolverError(
            "HiGHS is not installed: pip install highspy, or name another solver that PuLP has. "
            "Saved plans, and budgets with which nothing is recomputed, need no solver."
        ) from error
    return highspy
