"""The variables of ``solvers.whole.relaxation``, and those whose value is known before anything is solved."""

from __future__ import annotations

from dataclasses import dataclass

from solvers.milp.milp import IntegerProgram
from solvers.whole.segments import Segments
from solvers.whole.stages import Cell, Timeline

ONE, ZERO = -1, -2
"""Instead of the index of a column: the variable is known to be 1, or 0."""

Key = int | tuple[int, int]
"""A rerun: (k, i), of i in segment k; or k, that at p_k."""


@dataclass(frozen=True)
class Fixed:
    """A schedule of which only the operations in ``free`` are decided anew; all else stays as in ``current``."""

    current: Timeline
    free: frozenset[int]

    def reruns(self, i: int, makes: tuple[int, ...], low: Cell, high: Cell) -> list[Cell]:
        """The cells between ``low`` and ``high``, or at them if they are one, in which i, making ``makes``, reruns."""
        cells = self.current.cells
        runs = [cells[copy[0]] for copy in self.current.copies[makes[0]]] if makes else []
        return [c for c in runs if (low < c < high or low == c == high) and c != (i, i)]


class Columns:
    """Where ``program`` has the variables of the equations: the index of a column, or ``ONE`` or ``ZERO``.

    ``C``: for reruns that take less time where what they read was just made. ``time_unit``: nanoseconds per unit of the
    program's cost. With ``fixed``, some operations only are decided.
    """

    def __init__(self, segments: Segments, fixed: Fixed | None) -> None:
        self.segments, self.staged, self.fixed = segments, segments.staged, fixed
        self.program = IntegerProgram()
        self.time_unit = max(1.0, self.staged.eager_time / 1e4)
        self.X: dict[tuple[int, int], int] = {}
        self.R: dict[tuple[int, int], int] = {}
        self.Q: dict[int, int] = {}
        self.S: dict[tuple[int, int], int] = {}
        self.C: dict[Key, int] = {}
        for k in range(1, segments.count + 1):
            self._add_position(k)
        for k, again in enumerate(segments.again):
            for i in again:
                self.R[k, i] = self._rerun((k, i), i, segments.limits[k], segments.limits[k + 1])
        for i, operation in enumerate(self.staged.operations):
            if operation.rng and operation.rerun:
                self._add_generator_states(i)

    def _add_position(self, k: int) -> None:
        """Q and X of p_k."""
        segments, (t, i) = self.segments, self.segments.limits[k]
        if t != i:
            self.Q[k] = self._rerun(k, i, (t, i), (t, i))
        needed = segments.reads[i] if t == i else ()
        for d in sorted(segments.alive[k]):
            if d in needed:
                self.X[k, d] = ONE
            elif self.fixed is None or self.staged.owners[d] in self.fixed.free:
                self.X[k, d] = self.program.column()
            else:
                self.X[k, d] = ONE if self.fixed.current.is_live(d, (t, i)) else ZERO

    def _rerun(self, key: Key, i: int, low: Cell, high: Cell) -> int:
        """R or Q, with its C."""
        operation = self.staged.operations[i]
        if self.fixed is not None and i not in self.fixed.free:
            return ONE if self.fixed.reruns(i, self.segments.makes[i], low, high) else ZERO
        least = operation.least_time if operation.reads else operation.time
        if least < operation.time and self.segments.reads[i]:
            self.C[key] = self.program.column((operation.time - least) / self.time_unit, integer=False)
        return self.program.column(least / self.time_unit)

    def _add_generator_states(self, i: int) -> None:
        """S for all positions behind the first run of i. Continuous will do: its lower bounds are 0/1."""
        for k in range(self.segments.count, 0, -1):
            if self.segments.limits[k] < (i, i):
                break
            later = self.later_reruns(k, i)
            if ONE in later:
                self.S[k, i] = ONE
            elif any(column >= 0 for column in later):
                self.S[k, i] = self.program.column(integer=False)

    def later_reruns(self, k: int, i: int) -> tuple[int, ...]:
        """The variables of which one is 1 if operation i runs again at p_k or later."""
        at = self.Q.get(k, ZERO) if self.segments.limits[k][1] == i else ZERO
        return self.S.get((k + 1, i), ZERO), self.R.get((k, i), ZERO), at
