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
from dataclasses import dataclass
from math import gcd

from solvers.milp.milp import INFINITY, IntegerProgram, limit_in_units
from solvers.whole.columns import ONE, ZERO, Columns, Fixed, add_columns
from solvers.whole.segments import Segments, Useful, cut, useful
from solvers.whole.stages import Cell, Staged

Cover = tuple[Cell, frozenset[int], bool]
"""A position, data that cannot all be live there, and whether its own rerun counts among them."""

MAX_UNITS = 10**6
"""Largest sum of sizes in units of the program; coarser units make the coefficients fractions."""


@dataclass(frozen=True)
class Relaxation:
    """The program for some positions, and the meaning of its columns. ``time_unit``: nanoseconds per unit of its cost.

    With ``fixed``, it decides on some operations only.
    """

    segments: Segments
    useful: Useful
    columns: Columns
    program: IntegerProgram
    time_unit: float
    budget: int
    fixed: Fixed | None

    @property
    def staged(self) -> Staged:
        """The problem."""
        return self.segments.staged

    def room(self, k: int) -> int:
        """Bytes of the budget at p_k for deletable data, generator states and the operation that runs there."""
        cell, staged = self.segments.limits[k], self.staged
        held = sum(staged.sizes[d] for d in staged.held if (staged.owners[d],) * 2 < cell)
        return self.budget - held - staged.extra(cell)


def relax(
    staged: Staged,
    budget: int,
    positions: Iterable[Cell],
    covers: Iterable[Cover] = (),
    fixed: Fixed | None = None,
) -> Relaxation:
    """The program that limits memory to ``budget`` bytes at ``positions``, with the rows that ``covers`` ask for."""
    segments = cut(staged, positions)
    use = useful(segments)
    program = IntegerProgram()
    time_unit = max(1.0, sum(op.time for op in staged.operations) / 1e4)
    columns = add_columns(program, segments, use, time_unit, fixed)
    model = Relaxation(segments, use, columns, program, time_unit, budget, fixed)
    for k in range(segments.count + 1):
        _add_kept(model, k)
        _add_reruns(model, k)
        _add_steps(model, k)
        _add_position(model, k)
    _add_states(model)
    unit, whole = _scale(segments)
    for k in range(1, segments.count + 1):
        _add_memory(model, k, unit, whole)
    for cover in covers:
        _add_cover(model, cover)
    return model


class _Sum:
    """A sum of columns times values, and a constant."""

    def __init__(self) -> None:
        self.terms: list[tuple[int, float]] = []
        self.constant = 0

    def add(self, column: int, value: int = 1) -> None:
        if column == ONE:
            self.constant += value
        elif column >= 0:
            self.terms.append((column, value))


def _available(model: Relaxation, k: int, d: int, step: int | None = None) -> _Sum:
    """avail(k,d) anywhere in segment k. For ``step`` in it, a rerun counts only if it has a cell before the step."""
    segments, columns = model.segments, model.columns
    total = _Sum()
    owner = segments.staged.owners[d]
    if owner in segments.steps[k] or segments.limits[k] == (owner, owner):
        total.constant = 1
        return total
    total.add(columns.X.get((k, d), ZERO))
    if step is None or segments.stage_of(k, owner, step) is not None:
        total.add(columns.R.get((k, owner), ZERO))
    if segments.limits[k][1] == owner and k in columns.Q:
        total.add(columns.Q[k])
    return total


def _at_most(program: IntegerProgram, column: int, limit: _Sum) -> None:
    """Row: column <= limit."""
    if column == ZERO or limit.constant:
        return
    if column == ONE:
        program.row(limit.terms, 1, INFINITY)
    else:
        program.row([(column, 1), *((c, -v) for c, v in limit.terms)], -INFINITY, 0)


def _add_kept(model: Relaxation, k: int) -> None:
    """Rows keep; and need, for data that p_{k+1} reads, whose X is ``ONE``."""
    for d in sorted(model.useful.alive[k + 1]):
        _at_most(model.program, model.columns.X[k + 1, d], _available(model, k, d))


def _add_reruns(model: Relaxation, k: int) -> None:
    """Rows input and once, for the operations that may run again in segment k."""
    segments, R = model.segments, model.columns.R
    for i in model.useful.again[k]:
        for d in segments.reads[i]:
            _at_most(model.program, R[k, i], _available(model, k, d))
        _add_cold(model, R[k, i], (k, i))
        alone = len(model.staged.operations[i].makes) == 1 and i not in model.staged.for_speed
        for d in segments.makes[i] if alone else ():
            once = _available(model, k, d)
            if len(once.terms) > 1:
                model.program.row(once.terms, -INFINITY, 1 - once.constant)


def _add_steps(model: Relaxation, k: int) -> None:
    """Rows need, for the steps in segment k."""
    for t in model.segments.steps[k]:
        for d in model.segments.reads[t]:
            _at_most(model.program, ONE, _available(model, k, d, t))


def _add_position(model: Relaxation, k: int) -> None:
    """Rows position."""
    if k in model.columns.Q:
        for d in model.segments.reads[model.segments.limits[k][1]]:
            live = _Sum()
            live.add(model.columns.X.get((k, d), ZERO))
            _at_most(model.program, model.columns.Q[k], live)
        _add_cold(model, model.columns.Q[k], k)


def again(model: Relaxation, key: int | tuple[int, int]) -> list[list[int]]:
    """For each datum that a rerun reads, the reruns of its owner that may stand before it in its stage.

    ``key``: of the rerun, as in ``Columns.C``.
    """
    segments, columns = model.segments, model.columns
    k, i = key if isinstance(key, tuple) else (key, segments.limits[key][1])
    found: list[list[int]] = []
    for d in segments.reads[i]:
        owner = segments.staged.owners[d]
        reruns = [columns.R.get((k, owner), ZERO)] if isinstance(key, tuple) else []
        at, (stage, first) = k, segments.limits[k]
        while at > 0 and segments.limits[at][0] == stage != first:  # p_at is a rerun, in the stage of p_k
            if segments.limits[at][1] == owner and (at < k or isinstance(key, tuple)):
                reruns.append(columns.Q[at])
            at -= 1
            reruns.append(columns.R.get((at, owner), ZERO))
        found.append(reruns)
    return found


def _add_cold(model: Relaxation, rerun: int, key: int | tuple[int, int]) -> None:
    """Rows cold."""
    for reruns in again(model, key) if key in model.columns.C else ():
        total = _Sum()
        for column in (model.columns.C[key], *reruns):
            total.add(column)
        _at_most(model.program, rerun, total)


def _add_states(model: Relaxation) -> None:
    """Rows state."""
    for (k, i), column in model.columns.S.items():
        if column >= 0:
            for later in model.columns.later_reruns(model.segments, k, i):
                if later >= 0:
                    model.program.row([(column, 1), (later, -1)], 0, INFINITY)


def _add_memory(model: Relaxation, k: int, unit: int, whole: bool) -> None:
    """Row memory, in units."""
    staged, columns = model.staged, model.columns
    t, i = model.segments.limits[k]
    total = _Sum()
    for d in sorted(model.useful.alive[k]):
        total.add(columns.X[k, d], staged.sizes[d])
    total.add(ONE if t == i else columns.Q[k], staged.operations[i].own)
    for (at, j), column in columns.S.items():
        if at == k:
            total.add(column, staged.operations[j].rng)
    limit = limit_in_units(model.room(k) - total.constant, unit, whole)
    model.program.row([(c, v / unit) for c, v in total.terms], -INFINITY, limit)


def _add_cover(model: Relaxation, cover: Cover) -> None:
    """Row cover; nothing if its cell is not a position of this program, or a member is not live."""
    cell, data, rerun = cover
    positions = model.segments.limits[1:-1]
    if cell not in positions:
        return
    k = positions.index(cell) + 1
    total = _Sum()
    for d in data:
        total.add(model.columns.X.get((k, d), ZERO))
    if rerun:
        total.add(model.columns.Q[k])
    model.program.row(total.terms, -INFINITY, len(data) + rerun - 1 - total.constant)


def _scale(segments: Segments) -> tuple[int, bool]:
    """Bytes per unit of memory rows, and whether all their coefficients are then whole.

    The unit is the common divisor of all sizes, unless numbers would be too large.
    """
    staged = segments.staged
    sizes = [staged.sizes[d] for makes in segments.makes for d in makes]
    rerun = [op for op in staged.operations if op.rerun]
    divisor = gcd(*sizes, *(op.own for op in rerun), *(op.rng for op in rerun)) or 1
    unit = max(divisor, -(-sum(sizes) // MAX_UNITS))
    return unit, unit == divisor
