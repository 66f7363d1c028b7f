"""A relaxation of the whole-graph program that sees memory at a few positions only, and is exact with enough of them.

Checkmate's program has a memory row for each of the n²/2 cells of its stages, and variables for what is live at
each. Yet few steps of a graph decide what must be dropped. Let p_1 < ... < p_m be *positions* (cells, in
lexicographic order). Between two of them memory is not looked at, so whatever runs there is one *segment*, in which
an operation runs again once or not at all. What remains is a program of m + 1 segments instead of n stages:

- ``X[k,d]`` in {0,1}: datum d is live at p_k (made before it, read at or after it);
- ``R[k,i]`` in {0,1}: operation i runs again in segment k, which lies between p_k and p_{k+1};
- ``Q[k]`` in {0,1}: the rerun at p_k takes place, where p_k = (t, i) with i < t.

With avail(k,d) = X[k,d] + R[k,owner(d)] + [owner(d) runs at p_k], or 1 if the first run of owner(d) is in segment k::

    minimise  sum time(i) R[k,i] + sum time(i_k) Q[k]
    keep      X[k+1,d] <= avail(k,d)
    input     R[k,i] <= avail(k,d)               d read by i
    need      1 <= avail(k,d)                    d read by a step in segment k, or at p_{k+1}; R[k,owner(d)] counts
                                                 only if the segment has a cell for that rerun before the step
    position  Q[k] <= X[k,d]                     d read by i_k
    once      avail(k,d) <= 1                    where owner(d) makes nothing else
    memory    sum size(d) X[k,d] + own(i_k) Q[k] <= budget - extra(p_k)      (with 1 for Q[k] if p_k is a step)
    cover     at most all but one of the variables at 1 that overstepped a memory row, by a check in bytes

Every schedule of the class (``solvers.whole.stages``) gives a solution that costs no more, whatever the positions. So
the optimum is a lower bound for the class; and where its reruns, put as late as they are needed, fit the budget at all
cells, they are an optimal schedule. Where they do not, the cells that overstep become positions.

Source: the class and its variables are Checkmate's (Jain et al., MLSys 2020); retention seen as intervals
between events is MOCCASIN's (Bartan et al., ICML 2023). Generating the positions lazily is of this project.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from solvers.milp.milp import INFINITY, Program, limit_in_units
from solvers.whole.stages import Cell, Staged, Timeline

Cover = tuple[Cell, frozenset[int], bool]
"""A position, data that cannot all be live there, and whether its own rerun counts among them."""

MAX_UNITS = 10**6
"""Largest sum of sizes in units of the program; coarser units make the coefficients fractions."""

ONE, ZERO = -1, -2
"""What stands for a column where its value is known."""


class _Sum:
    """Terms and a constant."""

    def __init__(self) -> None:
        self.terms: list[tuple[int, float]] = []
        self.constant = 0

    def add(self, column: int, value: int = 1) -> None:
        if column == ONE:
            self.constant += value
        elif column >= 0:
            self.terms.append((column, value))


class Relaxation:
    """The program for ``positions``. With ``current``, the timeline of a schedule, only the operations in ``free``
    are decided on; all others, and their data, stay as they are there."""

    def __init__(
        self,
        staged: Staged,
        budget: int,
        positions: Iterable[Cell],
        covers: Iterable[Cover] = (),
        free: frozenset[int] = frozenset(),
        current: Timeline | None = None,
    ) -> None:
        self.staged, self.budget = staged, budget
        self.free, self.current = free, current
        self.program = Program()
        self.time_unit = max(1.0, sum(op.time for op in staged.operations) / 1e4)
        counted = {d for d, size in enumerate(staged.sizes) if size and d not in staged.held}
        self.reads = [tuple(d for d in op.reads if d in counted) for op in staged.operations]
        self.makes = [tuple(d for d in op.makes if d in counted) for op in staged.operations]
        self.unit, self.whole = _scale(staged, counted)
        self.positions = sorted(positions)
        self.limits: list[Cell] = [(-1, -1), *self.positions, (staged.steps, -1)]
        self._segments()
        self._useful()
        self.X: dict[tuple[int, int], int] = {}
        self.R: dict[tuple[int, int], int] = {}
        self.Q: dict[int, int] = {}
        self._columns()
        for k in range(len(self.positions) + 1):
            self._sources(k)
        self.states = self._generator_states()
        for k in range(1, len(self.positions) + 1):
            self._memory(k)
        for cover in covers:
            self._cover(cover)

    def _segments(self) -> None:
        """``steps[k]``: steps in segment k; ``born[i]``: the first k such that operation i runs before p_k."""
        count = self.staged.steps
        self.born = [0] * count
        self.steps: list[set[int]] = []
        at = 0
        for k, limit in enumerate(self.limits[1:], start=1):
            inside: set[int] = set()
            while at < count and (at, at) < limit:
                inside.add(at)
                self.born[at] = k
                at += 1
            self.steps.append(inside)
            if at < count and (at, at) == limit:
                self.born[at] = k + 1
                at += 1

    def stage_of(self, k: int, i: int, latest: int) -> int | None:
        """The last stage up to ``latest`` in which segment k has a cell for a rerun of i."""
        low, high = self.limits[k], self.limits[k + 1]
        for t in (min(latest, high[0], self.staged.steps - 1), min(latest, high[0] - 1)):
            if t > i and t >= self.staged.first and low < (t, i) < high:
                return t
        return None

    def _useful(self) -> None:
        """``alive[k]``: data worth being live at p_k; ``again[k]``: operations worth running again in segment k."""
        m, owners = len(self.positions), self.staged.owners
        self.alive: list[set[int]] = [set() for _ in range(m + 2)]
        self.again: list[list[int]] = [[] for _ in range(m + 1)]
        for k in range(m, -1, -1):
            wanted = set(self.alive[k + 1])
            for t in self.steps[k]:
                wanted.update(self.reads[t])
            for i in range(min(self.limits[k + 1][0], self.staged.steps) - 1, -1, -1):
                if not wanted.isdisjoint(self.makes[i]) and self._may_rerun(k, i):
                    self.again[k].append(i)
                    wanted.update(self.reads[i])
            if k:
                wanted.update(self.reads[self.limits[k][1]])
                self.alive[k] = {d for d in wanted if self.born[owners[d]] <= k}

    def _may_rerun(self, k: int, i: int) -> bool:
        """Whether i may run again in segment k: its first run lies before, and the segment has a cell for it."""
        return (
            self.born[i] <= k and self.staged.operations[i].rerun and self.stage_of(k, i, self.staged.steps) is not None
        )

    def _fixed(self, i: int) -> bool:
        return self.current is not None and i not in self.free

    def _columns(self) -> None:
        """Columns X, R and Q, or what stands for them where they are known."""
        staged, column = self.staged, self.program.column
        for k in range(1, len(self.positions) + 1):
            t, i = self.positions[k - 1]
            if t != i:
                cost = staged.operations[i].time / self.time_unit
                self.Q[k] = self._known_rerun(i, (t, i), (t, i)) if self._fixed(i) else column(cost)
            needed = self.reads[i] if t == i else ()
            for d in sorted(self.alive[k]):
                if d in needed:
                    self.X[k, d] = ONE
                elif self._fixed(staged.owners[d]):
                    self.X[k, d] = self._known_live(d, (t, i))
                else:
                    self.X[k, d] = column()
        for k, again in enumerate(self.again):
            for i in again:
                cost = staged.operations[i].time / self.time_unit
                if self._fixed(i):
                    self.R[k, i] = self._known_rerun(i, self.limits[k], self.limits[k + 1])
                else:
                    self.R[k, i] = column(cost)

    def _known_live(self, d: int, at: Cell) -> int:
        assert self.current is not None
        cells = self.current.cells
        for copy in self.current.copies[d]:
            if cells[copy[0]] < at <= cells[copy[-1]]:
                return ONE
        return ZERO

    def _known_rerun(self, i: int, low: Cell, high: Cell) -> int:
        """Whether i runs again in the current schedule between two cells, or at them if they are one."""
        assert self.current is not None
        cells = self.current.cells
        makes = self.makes[i]
        runs = [cells[copy[0]] for copy in self.current.copies[makes[0]]] if makes else []
        between = (c for c in runs if (low < c < high or low == c == high) and c != (i, i))
        return ONE if any(between) else ZERO

    def _available(self, k: int, d: int, step: int | None = None) -> _Sum:
        """avail(k,d): at ``step``, for which no rerun counts whose cells all come later, or anywhere in segment k."""
        total = _Sum()
        owner = self.staged.owners[d]
        if owner in self.steps[k] or self.limits[k] == (owner, owner):
            total.constant = 1
            return total
        total.add(self.X.get((k, d), ZERO))
        if step is None or self.stage_of(k, owner, step) is not None:
            total.add(self.R.get((k, owner), ZERO))
        if self.limits[k][1] == owner and k in self.Q:
            total.add(self.Q[k])
        return total

    def _at_most(self, column: int, limit: _Sum) -> None:
        """Row: column <= limit."""
        if column == ZERO or limit.constant:
            return
        if column == ONE:
            self.program.row(limit.terms, 1, INFINITY)
        else:
            self.program.row([(column, 1), *((c, -v) for c, v in limit.terms)], -INFINITY, 0)

    def _sources(self, k: int) -> None:
        """Rows keep, input, need, position and once: data come from somewhere."""
        for d in sorted(self.alive[k + 1]):
            self._at_most(self.X[k + 1, d], self._available(k, d))
        for i in self.again[k]:
            for d in self.reads[i]:
                self._at_most(self.R[k, i], self._available(k, d))
            for d in self.makes[i] if len(self.staged.operations[i].makes) == 1 else ():
                once = self._available(k, d)
                if len(once.terms) > 1:
                    self.program.row(once.terms, -INFINITY, 1 - once.constant)
        for t in sorted(self.steps[k]):
            for d in self.reads[t]:
                self._at_most(ONE, self._available(k, d, t))
        if k in self.Q:
            i = self.limits[k][1]
            for d in self.reads[i]:
                limit = _Sum()
                limit.add(self.X.get((k, d), ZERO))
                self._at_most(self.Q[k], limit)

    def _generator_states(self) -> dict[tuple[int, int], int]:
        """Per position and operation with a generator state: a column of at least every later rerun's."""
        kept: dict[tuple[int, int], int] = {}
        m = len(self.positions)
        for i in (i for i, op in enumerate(self.staged.operations) if op.rng and op.rerun):
            later: list[int] = []
            for k in range(m, 0, -1):
                if self.limits[k] < (i, i):
                    break
                later.append(self.R.get((k, i), ZERO))
                if self.limits[k][1] == i and k in self.Q:
                    later.append(self.Q[k])
                if ONE in later:
                    kept[k, i] = ONE
                    continue
                later = [column for column in later if column >= 0]
                if not later:
                    continue
                kept[k, i] = self.program.column(integer=False)
                for column in later:
                    self.program.row([(kept[k, i], 1), (column, -1)], 0, INFINITY)
                later = [kept[k, i]]
        return kept

    def room(self, cell: Cell) -> int:
        """Bytes of the budget for counted data, generator states and what runs there."""
        held = sum(self.staged.sizes[d] for d in self.staged.held if (self.staged.owners[d],) * 2 < cell)
        return self.budget - held - self.staged.extra(cell)

    def _memory(self, k: int) -> None:
        """Row memory, in units."""
        staged, cell = self.staged, self.positions[k - 1]
        t, i = cell
        total = _Sum()
        for d in sorted(self.alive[k]):
            total.add(self.X[k, d], staged.sizes[d])
        total.add(ONE if t == i else self.Q[k], staged.operations[i].own)
        for (at, j), column in self.states.items():
            if at == k:
                total.add(column, staged.operations[j].rng)
        room = self.room(cell) - total.constant
        limit = limit_in_units(room, self.unit, self.whole)
        self.program.row([(c, v / self.unit) for c, v in total.terms], -INFINITY, limit)

    def _cover(self, cover: Cover) -> None:
        """Row cover; nothing if the position is not one of this program's, or a member is not live."""
        cell, data, rerun = cover
        if cell not in self.positions:
            return
        k = self.positions.index(cell) + 1
        total = _Sum()
        for d in data:
            total.add(self.X.get((k, d), ZERO))
        if rerun:
            total.add(self.Q[k])
        self.program.row(total.terms, -INFINITY, len(data) + rerun - 1 - total.constant)


def _scale(staged: Staged, counted: set[int]) -> tuple[int, bool]:
    """Bytes per unit: the common divisor, for integer rows, unless numbers would be too large. Whether it is that."""
    sizes = [staged.sizes[d] for d in counted]
    rerun = [op for op in staged.operations if op.rerun]
    divisor = gcd(*sizes, *(op.own for op in rerun), *(op.rng for op in rerun)) or 1
    unit = max(divisor, -(-sum(sizes) // MAX_UNITS))
    return unit, unit == divisor
