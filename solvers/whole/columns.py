"""The variables of ``solvers.whole.relaxation``, and those whose value is known before anything is solved."""

from __future__ import annotations

from dataclasses import dataclass

from solvers.milp.milp import IntegerProgram
from solvers.whole.segments import Segments, Useful
from solvers.whole.stages import Cell, Timeline

ONE, ZERO = -1, -2
"""Instead of the index of a column: the variable is known to be 1, or 0."""


@dataclass(frozen=True)
class Fixed:
    """A schedule of which only the operations in ``free`` are decided anew; all else stays as in ``current``."""

    current: Timeline
    free: frozenset[int]

    def live(self, d: int, at: Cell) -> int:
        """``ONE`` if the schedule has d live at cell ``at``, made before it and read at it or later; else ``ZERO``."""
        cells = self.current.cells
        lives = any(cells[copy[0]] < at <= cells[copy[-1]] for copy in self.current.copies[d])
        return ONE if lives else ZERO

    def reruns(self, i: int, makes: tuple[int, ...], low: Cell, high: Cell) -> list[Cell]:
        """The cells between ``low`` and ``high``, or at them if they are one, in which i, making ``makes``, reruns."""
        cells = self.current.cells
        runs = [cells[copy[0]] for copy in self.current.copies[makes[0]]] if makes else []
        return [c for c in runs if (low < c < high or low == c == high) and c != (i, i)]


@dataclass(frozen=True)
class Columns:
    """Where the program has the variables of the equations: the index of a column, or ``ONE`` or ``ZERO``.

    ``C[k, i]``: for operations that take less time where what they read was just made; ``C[k]``: that of p_k.
    """

    X: dict[tuple[int, int], int]
    R: dict[tuple[int, int], int]
    Q: dict[int, int]
    S: dict[tuple[int, int], int]
    C: dict[int | tuple[int, int], int]

    def later_reruns(self, segments: Segments, k: int, i: int) -> tuple[int, ...]:
        """The variables of which one is 1 if operation i runs again at p_k or later."""
        at = self.Q.get(k, ZERO) if segments.limits[k][1] == i else ZERO
        return self.S.get((k + 1, i), ZERO), self.R.get((k, i), ZERO), at


def add_columns(
    program: IntegerProgram, segments: Segments, use: Useful, time_unit: float, fixed: Fixed | None
) -> Columns:
    """Add columns for all variables whose value is not known. A rerun costs its nanoseconds over ``time_unit``."""
    staged = segments.staged
    columns = Columns({}, {}, {}, {}, {})

    def rerun(key: int | tuple[int, int], i: int, low: Cell, high: Cell) -> int:
        operation = staged.operations[i]
        if fixed is not None and i not in fixed.free:
            return ONE if fixed.reruns(i, segments.makes[i], low, high) else ZERO
        least = operation.least_time if operation.reads else operation.time
        if least < operation.time and segments.reads[i]:
            columns.C[key] = program.column((operation.time - least) / time_unit, integer=False)
        return program.column(least / time_unit)

    for k in range(1, segments.count + 1):
        t, i = cell = segments.limits[k]
        if t != i:
            columns.Q[k] = rerun(k, i, cell, cell)
        needed = segments.reads[i] if t == i else ()
        for d in sorted(use.alive[k]):
            if d in needed:
                columns.X[k, d] = ONE
            elif fixed is None or staged.owners[d] in fixed.free:
                columns.X[k, d] = program.column()
            else:
                columns.X[k, d] = fixed.live(d, cell)
    for k, again in enumerate(use.again):
        for i in again:
            columns.R[k, i] = rerun((k, i), i, segments.limits[k], segments.limits[k + 1])
    _add_generator_states(program, segments, columns)
    return columns


def _add_generator_states(program: IntegerProgram, segments: Segments, columns: Columns) -> None:
    """S[k,i] for all positions behind the first run of i. Continuous will do: its lower bounds are 0/1."""
    for i, operation in enumerate(segments.staged.operations):
        if not (operation.rng and operation.rerun):
            continue
        for k in range(segments.count, 0, -1):
            if segments.limits[k] < (i, i):
                break
            later = columns.later_reruns(segments, k, i)
            if ONE in later:
                columns.S[k, i] = ONE
            elif any(column >= 0 for column in later):
                columns.S[k, i] = program.column(integer=False)
