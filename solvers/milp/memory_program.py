"""Integer programs with memory rows, whose solutions are checked in bytes.

Solvers compute in floating point. Memory rows are scaled, so that neither tensors of ten bytes nor of ten terabytes are
beyond a solver's tolerances. Limits are raised by half a unit, and solutions are checked in whole bytes. If a solution
exceeds a limit in bytes, a row is added that forbids to have all of its columns at 1 (a cover cut, valid for these
limits), and the program is solved again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, gcd

from solvers.milp.milp import INFINITY, IntegerProgram, limit_in_units, run
from solvers.milp.options import SolverOptions

MAX_UNITS = 10**6
"""Largest sum of sizes in units; larger ones make rows fractions of a coarser unit."""

HIGHS_SETTINGS = (("mip_heuristic_effort", 0.0), ("mip_pscost_minreliable", 1))
"""From measurements on transformer layers: cuts and branching solve these programs, heuristics only take time."""

MAX_NODES = 20
"""Branches of a search that has a solution. Blocks of real models take at most 18; a uniform chain of 17 nodes took
1,900, and 14 to 50 s, to prove what it had found at the root."""

MAX_CUTS = 50
"""Most solves for one pair of limits; usually one is enough."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A solution. ``ones``: the columns at 1. ``bound``: no solution takes less time (ns). ``optimal``: proven so.

    ``searched``: the solver did not end at its time limit.
    """

    ones: frozenset[int]
    bound: int
    optimal: bool
    searched: bool


class MemoryProgram:
    """Columns that cost time, rows of logic, and rows of memory, whose limits are given at each solve."""

    def __init__(self, sizes: Iterable[int], times: Iterable[int]) -> None:
        """``sizes``: bytes that memory rows add up. ``times``: nanoseconds of columns; both set the units."""
        amounts = tuple(sizes)
        # With numbers up to MAX_UNITS, one byte of a terabyte is still as large as the solver's tolerance.
        self.unit = max(gcd(*amounts) or 1, -(-sum(amounts) // MAX_UNITS))
        self.time_unit = max(1.0, sum(times) / 1000)
        self.program = IntegerProgram()
        self.rows: dict[str, int] = {}
        self.memory: dict[str, dict[int, int]] = {}

    def column(self, time: int = 0) -> int:
        """Add a 0/1 column that costs ``time`` nanoseconds; its index."""
        return self.program.column(time / self.time_unit)

    def at_least(self, name: str, left: Iterable[int], right: Iterable[int], constant: int = 0) -> None:
        """Row ``name``: sum of the columns ``left`` >= sum of the columns ``right`` + ``constant``."""
        self._row(name, [(c, 1.0) for c in left] + [(c, -1.0) for c in right], constant, INFINITY)

    def at_most_one(self, name: str, columns: Iterable[int]) -> None:
        """Row ``name``: sum of ``columns`` <= 1."""
        self._row(name, [(c, 1.0) for c in columns], -INFINITY, 1)

    def memory_row(self, name: str, terms: Iterable[tuple[int, int]]) -> None:
        """Row ``name``: sum of column times bytes, over ``terms`` (column, bytes). Its limit is given at each solve."""
        sizes: dict[int, int] = {}
        for column, size in terms:
            sizes[column] = sizes.get(column, 0) + size
        self.memory[name] = sizes
        self._row(name, [(c, size / self.unit) for c, size in sizes.items()], -INFINITY, INFINITY)

    def _row(self, name: str, terms: list[tuple[int, float]], lower: float, upper: float) -> None:
        self.rows[name] = len(self.program.upper)
        self.program.row(terms, lower, upper)

    def solve(self, limits: Mapping[str, int], options: SolverOptions) -> Choice | None:
        """The solution of least time within ``limits`` (bytes per memory row); None if it is proven that none exists.

        Raises ``TimeoutError`` if the solver stops at its time limit without a solution, ``KeyboardInterrupt`` after
        Ctrl-C.
        """
        program, size = self.program, (len(self.program.lower), len(self.program.columns))
        for name, limit in limits.items():
            whole = all(size % self.unit == 0 for size in self.memory[name].values())
            program.upper[self.rows[name]] = limit_in_units(limit, self.unit, whole)
        try:
            for _ in range(MAX_CUTS):
                outcome = run(program, options, None, (*HIGHS_SETTINGS, ("mip_max_nodes", MAX_NODES)))
                if outcome.values is None and outcome.searched and not outcome.optimal:
                    outcome = run(program, options, None, HIGHS_SETTINGS)
                if outcome.values is None and outcome.optimal:
                    return None
                if outcome.values is None:
                    raise TimeoutError(f"{options.name} found no solution in {options.time_limit:g} s")
                ones = frozenset(int(c) for c in (outcome.values > 0.5).nonzero()[0])
                covers = self._overstepped(ones, limits)
                if not covers:
                    # Less 1e-6 units, 1e-9 of the time of all nodes, for the solver's tolerances.
                    bound = max(0, ceil((outcome.bound - 1e-6) * self.time_unit))
                    return Choice(ones, bound, outcome.optimal, outcome.searched)
                for cover in covers:
                    program.row([(c, 1.0) for c in cover], -INFINITY, len(cover) - 1)
        finally:  # cover cuts hold for one set of limits only
            program.truncate(*size)
        raise TimeoutError(f"none of {MAX_CUTS} solutions is within the limits in bytes")

    def _overstepped(self, ones: frozenset[int], limits: Mapping[str, int]) -> list[list[int]]:
        covers = []
        for name, limit in limits.items():
            taken = [c for c in self.memory[name] if c in ones]
            if taken and sum(self.memory[name][c] for c in taken) > limit:
                covers.append(taken)
        return covers
