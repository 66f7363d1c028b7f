"""The terms of rotor's equations (``solvers.rotor.table``) as arrays: times, and slots of memory.

Stages are padded to a whole number of tiles. Those of the padding take no memory and infinite time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.rotor.chain import Chain
from solvers.rotor.needs import Needs
from solvers.rotor.tiles import TILE, Cells, cells

Times = npt.NDArray[np.float32]
"""Times in float32, which halves the memory traffic. The walker computes times of sequences exactly."""

Slots = npt.NDArray[np.int64]
INF = np.float32(np.inf)


@dataclass(frozen=True)
class WayTerms:
    """Of (2), one way of every stage. By s and t, ``least``: slots, ``time``. ``taken``: by s, slots that it keeps."""

    least: Cells
    time: Cells
    taken: Slots


@dataclass(frozen=True)
class Terms:
    """What the equations add and compare. Times are fractions of ``scale``, the time of all stages.

    ``unit``: bytes of a slot; sizes are rounded to the nearest slot. ``start``: time to pass the stages before s.
    ``taken``: slots of x_s. ``besides``: bytes of D_t. ``passes``: bytes for (1) by s and k, without D. ``leaves``:
    for (3), per stage and way, least slots and time. ``ways``: for (2).
    """

    unit: float
    scale: float
    start: Times
    taken: Slots
    besides: Slots
    passes: Cells
    leaves: tuple[tuple[tuple[int, np.float32], ...], ...]
    ways: tuple[WayTerms, ...]


def terms_of(chain: Chain, unit: float, size: int) -> Terms:
    """The terms for ``chain`` and a table of up to ``size`` slots of ``unit`` bytes."""
    needs, length = Needs(chain), chain.length
    padded = -(-length // TILE) * TILE
    scale = float(max(1, sum(s.forward_time + s.backward_time for s in chain.stages)))
    start = np.zeros(padded, np.float32)
    start[1:length] = np.cumsum([s.runs.passing / scale for s in chain.stages[:-1]])
    taken, besides = np.zeros((2, padded), np.int64)
    taken[:length] = [round(a / unit) for a in needs.inputs]
    besides[:length] = needs.besides
    passes = np.zeros((padded, padded), np.int64)
    for s in range(length):
        passes[s, s + 1 : length] = needs.pass_peaks[s][: length - s - 1]
    leaves = tuple(_leaves(needs, s, unit, scale) for s in range(length))
    ways = range(max((len(s.ways) for s in chain.stages[:-1]), default=0))
    enabled = tuple(_way(needs, w, padded, unit, size, scale) for w in ways)
    return Terms(unit, scale, start, taken, besides, cells(passes), leaves, enabled)


def _leaves(needs: Needs, s: int, unit: float, scale: float) -> tuple[tuple[int, np.float32], ...]:
    """(3) for stage s: least slots and time of each way."""
    stage, first = needs.chain.stages[s], s == needs.chain.length - 1

    def time(w: int) -> int:
        run = stage.run_time(w, first=True) if first else stage.runs.stopping
        return run + stage.ways[w].refill_time + stage.backward_time

    return tuple((round(needs.leaf(s, w) / unit), np.float32(time(w) / scale)) for w in needs.leaf_ways(s))


def _way(needs: Needs, w: int, padded: int, unit: float, size: int, scale: float) -> WayTerms:
    """(2) for way w of every stage; no memory is enough where a stage has no such way."""
    least = np.full((padded, padded), size + 1, np.int64)
    taken = np.zeros(padded, np.int64)
    time = np.full((padded, padded), INF)
    for s, stage in enumerate(needs.chain.stages[:-1]):
        if w < len(stage.ways):
            taken[s] = round(needs.kept(s, w) / unit)
            slots = np.rint(needs.enable(s, w) / unit)
            least[s, : len(slots)] = np.maximum(slots, taken[s])
            behind = stage.ways[w].refill_time + stage.backward_time
            time[s] = (stage.run_time(w, first=False) + behind) / scale
            time[s, needs.chain.length - 1] = (stage.run_time(w, first=True) + behind) / scale
    return WayTerms(cells(least), cells(time), taken)
