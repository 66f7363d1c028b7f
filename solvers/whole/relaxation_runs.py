"""Between reruns of a schedule and solutions of its relaxation: what a solution means, and how to start from one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.whole.relaxation import ONE, ZERO, Cover, Relaxation
from solvers.whole.stages import Cell, Runs, Timeline, without_useless

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spelled:
    """The reruns of a solution, and positions without which it cannot be put into one order of cells."""

    runs: Runs
    conflicts: frozenset[Cell]


def _is_one(values: Values, column: int) -> bool:
    return column == ONE or (column >= 0 and values[column] > 0.5)


def spell(model: Relaxation, values: Values) -> Spelled:
    """The reruns that ``values`` stand for: each at the first cell of its segment that needs it, else at the last.

    In the stage of p_k = (t, i), a segment has cells for operations after i only. A rerun that is needed there
    but lies before p_k is a conflict; with (t, t) as a position there is none.
    """
    staged = model.staged
    runs: list[set[int]] = [set() for _ in range(staged.steps)]
    conflicts: set[Cell] = set()
    for k in range(len(model.positions) + 1):
        _spell_segment(model, values, k, runs, conflicts)
    for k, column in model.Q.items():
        if _is_one(values, column):
            t, i = model.limits[k]
            runs[t].add(i)
    return Spelled(without_useless(staged, [sorted(stage) for stage in runs]), frozenset(conflicts))


def _spell_segment(model: Relaxation, values: Values, k: int, runs: list[set[int]], conflicts: set[Cell]) -> None:
    staged, end = model.staged, model.limits[k + 1][0]
    stage: dict[int, int] = {}  # of the first cell that reads an operation's data
    for t in model.steps[k]:
        for d in model.reads[t]:
            stage[staged.owners[d]] = min(stage.get(staged.owners[d], end), t)
    for i in model.again[k]:
        if not _is_one(values, model.R[k, i]):
            continue
        cells = _known_cells(model, k, i)
        if not cells:
            chosen = model.stage_of(k, i, stage.get(i, end))
            if chosen is None:
                chosen = model.stage_of(k, i, end)
                assert chosen is not None
                conflicts.add((model.limits[k][0],) * 2)
            cells = [chosen]
        for t in cells:
            runs[t].add(i)
            for d in model.reads[i]:
                stage[staged.owners[d]] = min(stage.get(staged.owners[d], end), t)


def _known_cells(model: Relaxation, k: int, i: int) -> list[int]:
    """The stages in which a rerun that is not decided on stands in segment k."""
    if model.current is None or i in model.free:
        return []
    low, high = model.limits[k], model.limits[k + 1]
    cells = model.current.cells
    made = (cells[copy[0]] for copy in model.current.copies[model.makes[i][0]])
    return [c[0] for c in made if low < c < high and c[0] != i]


def start_values(model: Relaxation, schedule: Timeline) -> Values:
    """The solution of ``model`` that a schedule, given by its timeline, amounts to; feasible if the schedule fits."""
    values = np.zeros(len(model.program.cost))
    runs: dict[int, list[Cell]] = {}
    for cell in schedule.cells:
        runs.setdefault(cell[1], []).append(cell)

    def put(column: int, value: bool) -> None:
        if column >= 0:
            values[column] = value

    cells, limits = schedule.cells, model.limits
    for (k, d), column in model.X.items():
        put(column, any(cells[c[0]] < limits[k] <= cells[c[-1]] for c in schedule.copies[d]))
    for k, column in model.Q.items():
        put(column, limits[k] in runs[limits[k][1]])
    for (k, i), column in model.R.items():
        # Where the one datum that i makes is still live, an earlier copy serves and later is made again.
        copies = [model.X.get((k, d), ZERO) for d in model.makes[i]] if len(model.makes[i]) == 1 else []
        serves = any(_is_one(values, copy) for copy in copies)
        put(column, not serves and any(limits[k] < cell < limits[k + 1] for cell in runs[i]))
    for (k, i), column in model.states.items():
        put(column, (i, i) <= limits[k] <= runs[i][-1] and len(runs[i]) > 1)
    return values


def overstepped(model: Relaxation, values: Values, cells: Iterable[Cell]) -> list[Cover]:
    """Covers for the positions among ``cells`` that a solution oversteps in bytes, though not in floating point.

    Solvers have tolerances; beside terabytes, a byte is below all of them.
    """
    covers: list[Cover] = []
    for cell in cells:
        k = bisect_left(model.positions, cell) + 1
        if k > len(model.positions) or model.positions[k - 1] != cell:
            continue
        data = frozenset(d for d in model.alive[k] if _is_one(values, model.X[k, d]))
        runs = cell[0] == cell[1] or _is_one(values, model.Q[k])
        used = sum(model.staged.sizes[d] for d in data) + runs * model.staged.operations[cell[1]].own
        if used > model.room(cell):
            covers.append((cell, data, k in model.Q and runs))
    return covers
