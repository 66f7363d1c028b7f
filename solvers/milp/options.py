"""How integer programs are solved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """How integer programs are solved.

    ``gap``: relative gap at which a proof may stop.
    ``time_limit``: seconds of one solve, far more than it needs, so that plans do not depend on the machine's load.
    ``threads``: of the solver.
    """

    gap: float = 1e-4
    time_limit: float = 60.0
    threads: int = 1
