"""HiGHS; where it is missing, an error says so when a solver first needs it, and everything else works."""

from __future__ import annotations

from typing import Any

from solvers.errors import SolverError

highspy: Any


class Missing:
    """Stands for the package where there is none."""

    def __getattr__(self, name: str) -> Any:
        raise SolverError(
            "HiGHS is not installed: pip install highspy, or name another solver that PuLP has. "
            "Saved plans, and budgets with which nothing is recomputed, need no solver."
        )


try:
    import highspy
except ImportError:
    highspy = Missing()
