"""Integer programs with memory rows, whose solutions are checked in bytes.

Solvers compute in floating point. Memory rows are scaled for them, so that neither tensors of ten bytes nor of ten
terabytes are beyond their tolerances, limits are raised a little, and what they return is checked in whole bytes.
Where a solution oversteps a row, the columns at 1 that overstep it together are forbidden together (a cover cut, valid
for these limits), and the program is solved again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, gcd

from solvers.milp.milp import INFINITY, Effort, Outcome, Program, limit_in_units, run

MAX_UNITS = 10**6
"""Largest sum of sizes in units; larger ones make rows fractions of a coarser unit."""

HIGHS_SETTINGS = (("mip_heuristic_effort", 0.0), ("mip_pscost_minreliable", 1))
"""Measured on transformer layers: these programs need cuts and branching, heuristics do not pay."""

MAX_CUTS = 50
"""Solves for one point before it is given up; one is the rule."""


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """How integer programs are solved.

    ``name``: a PuLP solver name (``HiGHS`` is called directly). ``gap``: relative gap at which a proof may stop.
    ``time_limit``: seconds a solve; far more than is needed, so that plans do not depend on how busy a machine is.
    ``threads``: of the solver.
    """

    name: str = "HiGHS"
    gap: float = 1e-4
    time_limit: float = 60.0
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Found:
    """``ones``: the columns at 1; ``bound``: no solution takes less time (ns); ``optimal``: proven, up to the gap."""

    ones: frozenset[int]
    bound: int
    optimal: bool


class MemoryProgram:
    """0/1 columns that cost time, rows of logic, and named rows of memory whose limits are set at each solve."""

    def __init__(self, sizes: Iterable[int], times: Iterable[int]) -> None:
        """``sizes``: bytes that memory rows add up; ``times``: nanoseconds of columns."""
        amounts = tuple(sizes)
        # With numbers up to MAX_UNITS, one byte of a terabyte is still as large as the solver's tolerance.
        self.unit = max(gcd(*amounts) or 1, -(-sum(amounts) // MAX_UNITS))
        self.time_unit = max(1.0, sum(times) / 1000)
        self.program = Program()
        self.rows: dict[str, int] = {}
        self.memory: dict[str, dict[int, int]] = {}
        self._whole: dict[str, bool] = {}

    def column(self, time: int = 0) -> int:
        """A new 0/1 column."""
        return self.program.column(time / self.time_unit)

    def at_least(self, name: str, left: Iterable[int], right: Iterable[int], constant: int = 0) -> None:
        """Row ``name``: sum of the columns ``left`` >= sum of the columns ``right`` + ``constant``."""
        self.rows[name] = len(self.program.upper)
        terms = [(c, 1.0) for c in left] + [(c, -1.0) for c in right]
        self.program.row(terms, constant, INFINITY)

    def at_most_one(self, name: str, columns: Iterable[int]) -> None:
        """Row ``name``: sum of ``columns`` <= 1."""
        self.rows[name] = len(self.program.upper)
        self.program.row([(c, 1.0) for c in columns], -INFINITY, 1)

    def memory_row(self, name: str, terms: Iterable[tuple[int, int]]) -> None:
        """Row ``name``: sum of bytes times columns, limited at each solve."""
        sizes: dict[int, int] = {}
        for column, size in terms:
            sizes[column] = sizes.get(column, 0) + size
        self.memory[name] = sizes
        self.rows[name] = len(self.program.upper)
        self._whole[name] = all(size % self.unit == 0 for size in sizes.values())
        self.program.row([(c, size / self.unit) for c, size in sizes.items()], -INFINITY, INFINITY)

    def solve(self, limits: Mapping[str, int], options: SolverOptions) -> Found | None:
        """The least time within ``limits`` (bytes per memory row); None if there provably is no solution.

        ``TimeoutError`` if the solver stops at its limit without a solution, ``KeyboardInterrupt`` after Ctrl-C.
        """
        program, size = self.program, (len(self.program.lower), len(self.program.columns))
        for name, limit in limits.items():
            program.upper[self.rows[name]] = limit_in_units(limit, self.unit, self._whole[name])
        effort = Effort(options.name, options.threads, options.gap, options.time_limit, HIGHS_SETTINGS)
        try:
            for _ in range(MAX_CUTS):
                outcome = run(program, effort)
                if outcome.values is None and outcome.optimal:
                    return None
                if outcome.values is None:
                    raise TimeoutError(f"{options.name} found no solution in {options.time_limit:g} s")
                ones = frozenset(int(c) for c in (outcome.values > 0.5).nonzero()[0])
                covers = self._overstepped(ones, limits)
                if not covers:
                    return Found(ones, self._bound(outcome), outcome.optimal)
                for cover in covers:
                    program.row([(c, 1.0) for c in cover], -INFINITY, len(cover) - 1)
        finally:
            _truncate(program, *size)
        raise TimeoutError("no solution passed the check in bytes")

    def _bound(self, outcome: Outcome) -> int:
        """Nanoseconds; 1e-6 of the unit, 1e-9 of all nodes together, is left to the solver's tolerances."""
        return max(0, ceil((outcome.bound - 1e-6) * self.time_unit))

    def _overstepped(self, ones: frozenset[int], limits: Mapping[str, int]) -> list[list[int]]:
        found = []
        for name, limit in limits.items():
            taken = [c for c in self.memory[name] if c in ones]
            if taken and sum(self.memory[name][c] for c in taken) > limit:
                found.append(taken)
        return found


def _truncate(program: Program, rows: int, terms: int) -> None:
    """Forget the rows added since: cover cuts hold for one set of limits only."""
    del program.starts[rows + 1 :], program.lower[rows:], program.upper[rows:]
    del program.columns[terms:], program.values[terms:]
