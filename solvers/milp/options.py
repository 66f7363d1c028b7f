"""How integer programs are solved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """How integer programs are solved.

    ``name``: a PuLP solver name (``HiGHS`` is called directly). ``gap``: relative gap at which a proof may stop.
    ``time_limit``: seconds of one solve, far more than it needs, so that plans do not depend on the machine's load.
    ``threads``: of the solver.
    """

    name: str = "HiGHS"
    gap: float = 1e-4
    time_limit: float = 60.0
    threads: int = 1
