"""The whole-graph program with memory limited at a few positions only: a relaxation, exact with enough positions.

Checkmate's program limits memory in each of the n²/2 cells of its stages, and has variables for what is live in each.
Yet few cells decide what must be dropped. Let p_1 < ... < p_m be *positions* (cells, in lexicographic order). Memory
is limited there and nowhere else. The cells between two positions are one *segment*, in which an operation runs again
once or not at all. The program has m + 1 segments instead of n stages:

- ``X[k,d]`` in {0,1}: datum d is live at p_k (made before it, read at or after it);
- ``R[k,i]`` in {0,1}: operation i runs again in segment k, which lies between p_k and p_{k+1};
- ``Q[k]`` in {0,1}: the rerun at p_k takes place, where p_k = (t, i) with i < t;
- ``S[k,i]`` in [0,1]: the generator state of operation i is kept at p_k, since i runs again at p_k or later;
- ``C[k,i]`` in [0,1]: i runs again in segment k (or at p_k) and reads what was not just made: it takes ``time(i)``,
  and ``warm(i)`` if all was made again since the last step.

With avail(k,d) = X[k,d] + R[k,owner(d)] + [owner(d) runs at p_k], or 1 if the first run of owner(d) is in segment k::

    minimise  sum warm(i) R[k,i] + sum warm(i_k) Q[k] + sum (time(i) - warm(i)) C[k,i]
    keep      X[k+1,d] <= avail(k,d)
    input     R[k,i] <= avail(k,d)               d read by i
    need      1 <= avail(k,d)                    d read by a step in segment k, or at p_{k+1}; R[k,owner(d)] counts
                                                 only if the segment has a cell for that rerun before the step
    position  Q[k] <= X[k,d]                     d read by i_k
    once      avail(k,d) <= 1                    where owner(d) makes nothing else, and takes no less than what its
                                                 readers gain in all if it runs again for that alone
    cold      C[k,i] >= R[k,i] - again(k,d)      d read by i; again: reruns of owner(d) in segment k, and in the part
                                                 of p_k's stage before p_k, if p_k is a rerun
    state     S[k,i] >= S[k+1,i], R[k,i], Q[k]   Q[k] only if p_k is a rerun of i
    memory    sum size(d) X[k,d] + own(i_k) Q[k] + sum rng(i) S[k,i] <= budget - extra(p_k)
                                                 1 stands for Q[k] if p_k is a step
    cover     at most all but one of the variables at 1 that overstepped a memory row, by a check in bytes

Every schedule of the class (``solvers.whole.stages``) gives a solution that costs no more, whatever the positions. So
the optimum is a lower bound for the class. Its reruns, put as late as they are needed, are an optimal schedule if they
fit the budget in all cells. If they do not, the cells over budget become positions, and the program is solved again.

Source: the class and its variables are from Checkmate (Jain et al., MLSys 2020). Retention as intervals between events
is from MOCCASIN (Bartan et al., ICML 2023). Generating the positions lazily is this project's.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from solvers.milp.milp import INFINITY, limit_in_units
from solvers.whole.columns import ONE, ZERO, Columns, Fixed, Key
from solvers.whole.segments import Segments
from solvers.whole.stages import Cell, Staged

Cover = tuple[Cell, frozenset[int], bool]
"""A position, data that cannot all be live there, and whether its own rerun counts among them."""

MAX_UNITS = 10**6
"""Largest sum of sizes in units of the program; coarser units make the coefficients fractions."""


class _Sum:
    """A sum of columns times values, and a constant."""

    def __init__(self, *columns: int) -> None:
        self.terms: list[tuple[int, float]] = []
        self.constant = 0
        for column in columns:
            self.add(column)

    def add(self, column: int, value: int = 1) -> None:
        if column == ONE:
            self.constant += value
        elif column >= 0:
            self.terms.append((column, value))


class Relaxation(Columns):
    """The program that limits memory to ``budget`` bytes at ``positions``, with the rows that ``covers`` ask for."""

    def __init__(
        self,
        staged: Staged,
        budget: int,
        positions: Iterable[Cell],
        covers: Iterable[Cover] = (),
        fixed: Fixed | None = None,
    ) -> None:
        super().__init__(Segments(staged, positions), fixed)
        self.budget = budget
        for k in range(self.segments.count + 1):
            self._add_kept(k)
            self._add_reruns(k)
            self._add_steps(k)
            self._add_position_rows(k)
        self._add_states()
        self._add_memory()
        for cover in covers:
            self._add_cover(*cover)

    def room(self, k: int) -> int:
        """Bytes of the budget at p_k for deletable data, generator states and the operation that runs there."""
        cell, staged = self.segments.limits[k], self.staged
        held = sum(staged.sizes[d] for d in staged.held if (staged.owners[d],) * 2 < cell)
        return self.budget - held - staged.extra(cell)

    def _available(self, k: int, d: int, step: int | None = None) -> _Sum:
        """avail(k,d) anywhere in segment k. For a ``step`` in it, a rerun counts only if it has a cell before it."""
        segments, owner = self.segments, self.staged.owners[d]
        if owner in segments.steps[k] or segments.limits[k] == (owner, owner):
            return _Sum(ONE)
        total = _Sum(self.X.get((k, d), ZERO))
        if step is None or segments.stage_of(k, owner, step) is not None:
            total.add(self.R.get((k, owner), ZERO))
        if segments.limits[k][1] == owner:
            total.add(self.Q.get(k, ZERO))
        return total

    def _at_most(self, column: int, limit: _Sum) -> None:
        """Row: column <= limit."""
        if column == ZERO or limit.constant:
            return
        if column == ONE:
            self.program.row(limit.terms, 1, INFINITY)
        else:
            self.program.row([(column, 1), *((c, -v) for c, v in limit.terms)], -INFINITY, 0)

    def _add_kept(self, k: int) -> None:
        """Rows keep; and need, for data that p_{k+1} reads, whose X is ``ONE``."""
        for d in sorted(self.segments.alive[k + 1]):
            self._at_most(self.X[k + 1, d], self._available(k, d))

    def _add_reruns(self, k: int) -> None:
        """Rows input and once, for the operations that may run again in segment k."""
        for i in self.segments.again[k]:
            for d in self.segments.reads[i]:
                self._at_most(self.R[k, i], self._available(k, d))
            self._add_cold(self.R[k, i], (k, i))
            alone = len(self.staged.operations[i].makes) == 1 and i not in self.staged.for_speed
            for d in self.segments.makes[i] if alone else ():
                once = self._available(k, d)
                if len(once.terms) > 1:
                    self.program.row(once.terms, -INFINITY, 1 - once.constant)

    def _add_steps(self, k: int) -> None:
        """Rows need, for the steps in segment k."""
        for t in self.segments.steps[k]:
            for d in self.segments.reads[t]:
                self._at_most(ONE, self._available(k, d, t))

    def _add_position_rows(self, k: int) -> None:
        """Rows position."""
        if k in self.Q:
            for d in self.segments.reads[self.segments.limits[k][1]]:
                self._at_most(self.Q[k], _Sum(self.X.get((k, d), ZERO)))
            self._add_cold(self.Q[k], k)

    def made_before(self, key: Key) -> list[list[int]]:
        """For each datum that a rerun reads, the reruns of its owner that may stand before it in its stage."""
        limits, inside = self.segments.limits, isinstance(key, tuple)
        k, i = key if isinstance(key, tuple) else (key, limits[key][1])
        found: list[list[int]] = []
        for d in self.segments.reads[i]:
            owner = self.staged.owners[d]
            reruns = [self.R.get((k, owner), ZERO)] if inside else []
            at, (stage, first) = k, limits[k]
            while at > 0 and limits[at][0] == stage != first:  # p_at is a rerun, in the stage of p_k
                if limits[at][1] == owner and (at < k or inside):
                    reruns.append(self.Q[at])
                at -= 1
                reruns.append(self.R.get((at, owner), ZERO))
            found.append(reruns)
        return found

    def _add_cold(self, rerun: int, key: Key) -> None:
        """Rows cold."""
        if key in self.C:
            for reruns in self.made_before(key):
                self._at_most(rerun, _Sum(self.C[key], *reruns))

    def _add_states(self) -> None:
        """Rows state."""
        for (k, i), column in self.S.items():
            if column >= 0:
                for later in self.later_reruns(k, i):
                    if later >= 0:
                        self.program.row([(column, 1), (later, -1)], 0, INFINITY)

    def _add_memory(self) -> None:
        """Rows memory, in units: the common divisor of all sizes, unless numbers would be too large."""
        staged = self.staged
        sizes = [staged.sizes[d] for makes in self.segments.makes for d in makes]
        rerun = [op for op in staged.operations if op.rerun]
        divisor = gcd(*sizes, *(op.own for op in rerun), *(op.rng for op in rerun)) or 1
        unit = max(divisor, -(-sum(sizes) // MAX_UNITS))
        for k in range(1, self.segments.count + 1):
            t, i = self.segments.limits[k]
            total = _Sum()
            for d in sorted(self.segments.alive[k]):
                total.add(self.X[k, d], staged.sizes[d])
            total.add(ONE if t == i else self.Q[k], staged.operations[i].own)
            for (at, j), column in self.S.items():
                if at == k:
                    total.add(column, staged.operations[j].rng)
            limit = limit_in_units(self.room(k) - total.constant, unit, unit == divisor)
            self.program.row([(c, v / unit) for c, v in total.terms], -INFINITY, limit)

    def _add_cover(self, cell: Cell, data: frozenset[int], rerun: bool) -> None:
        """Row cover; nothing if its cell is not a position of this program, or a member is not live."""
        positions = self.segments.limits[1:-1]
        if cell not in positions:
            return
        k = positions.index(cell) + 1
        total = _Sum(*(self.X.get((k, d), ZERO) for d in data), self.Q[k] if rerun else ZERO)
        self.program.row(total.terms, -INFINITY, len(data) + rerun - 1 - total.constant)
