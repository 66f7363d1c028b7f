"""What a solution of the relaxation means as a schedule, and which solution a schedule is.

``spell`` turns a solution into reruns; ``start_values`` turns a schedule into the solution that a solver starts from.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.whole.columns import ONE, ZERO
from solvers.whole.relaxation import Cover, Relaxation, again
from solvers.whole.stages import Cell, Reruns, Timeline, without_useless

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spelled:
    """The reruns of a solution. ``conflicts``: positions to add, since no order of cells is the solution otherwise."""

    runs: Reruns
    conflicts: frozenset[Cell]


def _is_one(values: Values, column: int) -> bool:
    return column == ONE or (column >= 0 and values[column] > 0.5)


def spell(model: Relaxation, values: Values) -> Spelled:
    """The reruns that ``values`` stand for: each in the last cell of its segment before the first that needs it.

    In the stage of p_k = (t, i), segment k has cells for operations after i only. A rerun that this stage needs, but
    that would have to stand before p_k, is a conflict; with (t, t) as a position there is none.
    """
    staged = model.staged
    runs: list[set[int]] = [set() for _ in range(staged.steps)]
    conflicts: set[Cell] = set()
    for k in range(model.segments.count + 1):
        _spell_segment(model, values, k, runs, conflicts)
    for k, column in model.columns.Q.items():
        if _is_one(values, column):
            t, i = model.segments.limits[k]
            runs[t].add(i)
    return Spelled(without_useless(staged, [sorted(stage) for stage in runs]), frozenset(conflicts))


def _spell_segment(model: Relaxation, values: Values, k: int, runs: list[set[int]], conflicts: set[Cell]) -> None:
    """Add the reruns of segment k to ``runs``; the place of each follows from its readers'.

    A step that reads what is live at p_k needs no rerun: what is made with it may have been dropped.
    """
    segments, owners = model.segments, model.staged.owners
    end = segments.limits[k + 1][0]
    needed: dict[int, int] = {}  # per operation, the first stage that reads its data
    for t in segments.steps[k]:
        for d in segments.reads[t]:
            if not _is_one(values, model.columns.X.get((k, d), ZERO)):
                needed[owners[d]] = min(needed.get(owners[d], end), t)
    for i in model.useful.again[k]:
        if not _is_one(values, model.columns.R[k, i]):
            continue
        stages = _fixed_stages(model, k, i)
        if not stages:
            chosen = segments.stage_of(k, i, needed.get(i, end))
            if chosen is None:
                chosen = segments.stage_of(k, i, end)
                assert chosen is not None
                conflicts.add((segments.limits[k][0],) * 2)
            stages = [chosen]
        for t in stages:
            runs[t].add(i)
            for d in segments.reads[i]:
                needed[owners[d]] = min(needed.get(owners[d], end), t)


def _fixed_stages(model: Relaxation, k: int, i: int) -> list[int]:
    """The stages in which i runs again in segment k, if that is not decided anew."""
    if model.fixed is None or i in model.fixed.free:
        return []
    low, high = model.segments.limits[k : k + 2]
    return [t for t, _ in model.fixed.reruns(i, model.segments.makes[i], low, high)]


def start_values(model: Relaxation, schedule: Timeline) -> Values:
    """The solution of ``model`` that a schedule, given by its timeline, amounts to; feasible if the schedule fits."""
    values = np.zeros(len(model.program.cost))
    columns, limits, makes = model.columns, model.segments.limits, model.segments.makes
    cells = schedule.cells
    runs: dict[int, list[Cell]] = {}
    for cell in cells:
        runs.setdefault(cell[1], []).append(cell)

    def put(column: int, value: bool) -> None:
        if column >= 0:
            values[column] = value

    for (k, d), column in columns.X.items():
        put(column, any(cells[c[0]] < limits[k] <= cells[c[-1]] for c in schedule.copies[d]))
    for k, column in columns.Q.items():
        put(column, limits[k] in runs[limits[k][1]])
    for (k, i), column in columns.R.items():
        # If the one datum that i makes is still live at p_k, that copy counts for the segment instead of its rerun.
        copies = [columns.X.get((k, d), ZERO) for d in makes[i]] if len(makes[i]) == 1 else []
        live = any(_is_one(values, copy) for copy in copies)
        put(column, not live and any(limits[k] < cell < limits[k + 1] for cell in runs[i]))
    for key, column in columns.C.items():
        rerun = columns.R[key] if isinstance(key, tuple) else columns.Q[key]
        warm = all(any(_is_one(values, c) for c in reruns) for reruns in again(model, key))
        put(column, _is_one(values, rerun) and not warm)
    for (k, i), column in columns.S.items():
        put(column, (i, i) <= limits[k] <= runs[i][-1] and len(runs[i]) > 1)
    return values


def overstepped(model: Relaxation, values: Values, cells: Iterable[Cell]) -> list[Cover]:
    """Covers for the positions among ``cells`` at which a solution is over budget in bytes, not in floating point.

    Beside terabytes, a byte is below the tolerances of every solver.
    """
    covers: list[Cover] = []
    staged, columns, positions = model.staged, model.columns, model.segments.limits[1:-1]
    for cell in cells:
        k = bisect_left(positions, cell) + 1
        if k > len(positions) or positions[k - 1] != cell:
            continue
        data = frozenset(d for d in model.useful.alive[k] if _is_one(values, columns.X[k, d]))
        runs = cell[0] == cell[1] or _is_one(values, columns.Q[k])
        used = sum(staged.sizes[d] for d in data) + runs * staged.operations[cell[1]].own
        if used > model.room(k):
            covers.append((cell, data, k in columns.Q and runs))
    return covers
