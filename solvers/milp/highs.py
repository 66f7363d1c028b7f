"""HiGHS, loaded when the first program is solved. Without it, everything that solves no program works."""

from __future__ import annotations

from functools import cache
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


@cache
def quiet() -> Any:
    """The class ``highspy.Highs``, whose instances print nothing: from 1.16 on, it says its name when one is made."""
    highspy = load()

    class Quiet(highspy.Highs):  # type: ignore[misc, name-defined]
        def enableCallbacks(self) -> None:
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    return Quiet
