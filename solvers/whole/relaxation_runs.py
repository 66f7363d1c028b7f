"""What a solution of the relaxation means as a schedule, and which solution a schedule is.

``spell`` turns a solution into reruns; ``start_values`` turns a schedule into the solution that a solver starts from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from solvers.whole.columns import ONE, ZERO
from solvers.whole.relaxation import Cover, Relaxation
from solvers.whole.stages import Cell, Reruns, Timeline, without_useless

Values = npt.NDArray[np.float64]


class Spelled(NamedTuple):
    """The reruns of a solution. ``conflicts``: positions to add, since no order of cells is the solution otherwise."""

    runs: Reruns
    conflicts: set[Cell]


def _is_one(values: Values, column: int) -> bool:
    return column == ONE or (column >= 0 and values[column] > 0.5)


def spell(model: Relaxation, values: Values) -> Spelled:
    """The reruns that ``values`` stand for: each in the last cell of its segment before the first that needs it.

    In the stage of p_k = (t, i), segment k has cells for operations after i only. A rerun that this stage needs, but
    that would have to stand before p_k, is a conflict; with (t, t) as a position there is none.
    """
    runs: list[set[int]] = [set() for _ in range(model.staged.steps)]
    conflicts: set[Cell] = set()
    for k in range(model.segments.count + 1):
        _spell_segment(model, values, k, runs, conflicts)
    for k, column in model.Q.items():
        if _is_one(values, column):
            t, i = model.segments.limits[k]
            runs[t].add(i)
    return Spelled(without_useless(model.staged, [sorted(stage) for stage in runs]), conflicts)


def _spell_segment(model: Relaxation, values: Values, k: int, runs: list[set[int]], conflicts: set[Cell]) -> None:
    """Add the reruns of segment k to ``runs``; the place of each follows from its readers'.

    A step that reads what is live at p_k needs no rerun: what is made with it may have been dropped.
    """
    segments, owners, fixed = model.segments, model.staged.owners, model.fixed
    low, high = segments.limits[k : k + 2]
    end = high[0]
    needed: dict[int, int] = {}  # per operation, the first stage that reads its data
    for t in segments.steps[k]:
        for d in segments.reads[t]:
            if not _is_one(values, model.X.get((k, d), ZERO)):
                needed[owners[d]] = min(needed.get(owners[d], end), t)
    for i in segments.again[k]:
        if not _is_one(values, model.R[k, i]):
            continue
        stages: list[int] = []
        if fixed is not None and i not in fixed.free:
            stages = [t for t, _ in fixed.reruns(i, segments.makes[i], low, high)]
        if not stages:
            chosen = segments.stage_of(k, i, needed.get(i, end))
            if chosen is None:
                chosen = segments.stage_of(k, i, end)
                assert chosen is not None
                conflicts.add((low[0],) * 2)
            stages = [chosen]
        for t in stages:
            runs[t].add(i)
            for d in segments.reads[i]:
                needed[owners[d]] = min(needed.get(owners[d], end), t)


def start_values(model: Relaxation, schedule: Timeline) -> Values:
    """The solution of ``model`` that a schedule, given by its timeline, amounts to; feasible if the schedule fits."""
    values = np.zeros(len(model.program.cost))
    limits, makes = model.segments.limits, model.segments.makes
    runs: dict[int, list[Cell]] = {}
    for cell in schedule.cells:
        runs.setdefault(cell[1], []).append(cell)

    def put(column: int, value: bool) -> None:
        if column >= 0:
            values[column] = value

    for (k, d), column in model.X.items():
        put(column, schedule.is_live(d, limits[k]))
    for k, column in model.Q.items():
        put(column, limits[k] in runs[limits[k][1]])
    for (k, i), column in model.R.items():
        # If the one datum that i makes is still live at p_k, that copy counts for the segment instead of its rerun.
        copies = [model.X.get((k, d), ZERO) for d in makes[i]] if len(makes[i]) == 1 else []
        live = any(_is_one(values, copy) for copy in copies)
        put(column, not live and any(limits[k] < cell < limits[k + 1] for cell in runs[i]))
    for key, column in model.C.items():
        rerun = model.R[key] if isinstance(key, tuple) else model.Q[key]
        warm = all(any(_is_one(values, c) for c in reruns) for reruns in model.made_before(key))
        put(column, _is_one(values, rerun) and not warm)
    for (k, i), column in model.S.items():
        put(column, (i, i) <= limits[k] <= runs[i][-1] and len(runs[i]) > 1)
    return values


def overstepped(model: Relaxation, values: Values, cells: Iterable[Cell]) -> list[Cover]:
    """Covers for the positions among ``cells`` at which a solution is over budget in bytes, not in floating point.

    Beside terabytes, a byte is below the tolerances of every solver.
    """
    covers: list[Cover] = []
    staged, numbers = model.staged, {cell: k for k, cell in enumerate(model.segments.limits)}
    for cell in cells:
        if (k := numbers.get(cell)) is None:
            continue
        data = frozenset(d for d in model.segments.alive[k] if _is_one(values, model.X[k, d]))
        runs = cell[0] == cell[1] or _is_one(values, model.Q[k])
        used = sum(staged.sizes[d] for d in data) + runs * staged.operations[cell[1]].own
        if used > model.room(k):
            covers.append((cell, data, k in model.Q and runs))
    return covers
