"""The rotor dynamic program over blocks with options, vectorised over memory.

``inner[i,j][m]`` is the least time to run blocks i..j forward and backward, given I_i live and m slots
beyond it, when blocks after j are done. ``top[i][m]`` is the same for i..B-1 in the first forward phase,
whose forward runs are no recomputation, and includes the loss. With e(i,k) = bytes of I_k not in I_i::

    inner[i,j][m] = min of
      (a)  fwd(i) + time(o) + inner[i+1,j][m - save(o) - e(i,i+1)]          over options o of block i
           if  m >= rerun_base(j) + forward_peak(o)  and  m >= backward_base(i) + backward_peak(o)
      (b)  fwd(i..k-1) + inner[k,j][m - e(i,k)] + inner[i,k-1][m]           over i < k <= j
           if  m >= rerun_base(j) + peak of running i..k-1 keeping I_k only
      (c)  time(o), for i = j and o fresh, if m >= backward_base(i) + backward_peak(o)
    top[i][m]     = the same with fwd = 0, first_base for rerun_base, top[k] for inner[k,j], k up to B
    top[B][m]     = 0 if m >= loss_peak

Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains" (rotor), with options per
block as in Rockmate (Zhao et al., 2023). Known shortcoming: checkpoints are persistent, as in rotor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.chain_costs import ChainCosts

Times = npt.NDArray[np.int64]
Choices = npt.NDArray[np.int32]
INFINITE = 2**60
"""Nanoseconds that stand for "does not fit"; three of them still add up within int64."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Least times and the choices that reach them, per slot count: option o >= 0, or -k for case (b)."""

    times: Times
    choices: Choices


class ChainTable:
    """Optimal times and choices for every number of slots up to ``size``, each slot ``unit`` bytes."""

    def __init__(self, costs: ChainCosts, unit: int, size: int) -> None:
        self.costs = costs
        self.unit = unit
        self.size = size
        last = costs.blocks
        self.top: dict[int, Cell] = {last: self._loss_cell()}
        self.inner: dict[tuple[int, int], Cell] = {}
        for i in reversed(range(last)):
            for j in range(i, last):
                self.inner[i, j] = self._inner_cell(i, j)
            self.top[i] = self._top_cell(i)

    def slots(self, size: int) -> int:
        """Slots that hold ``size`` bytes."""
        return -(-size // self.unit)

    def _empty(self) -> Cell:
        return Cell(np.full(self.size + 1, INFINITE, np.int64), np.zeros(self.size + 1, np.int32))

    def _offer(self, cell: Cell, choice: int, least: int, used: int, time: int, *parts: Times) -> None:
        """Take ``choice`` wherever it is cheaper: ``parts[0]`` gets what ``used`` leaves, ``parts[1]`` all of it."""
        start = max(least, used)
        if start > self.size:
            return
        total = np.full(self.size + 1 - start, time, np.int64)
        if parts:
            total += parts[0][start - used : self.size + 1 - used]
        for part in parts[1:]:
            total += part[start:]
        better = total < cell.times[start:]
        cell.times[start:][better] = total[better]
        cell.choices[start:][better] = choice

    def _loss_cell(self) -> Cell:
        cell = self._empty()
        self._offer(cell, 0, self.slots(self.costs.loss_peak), 0, 0)
        return cell

    def _inner_cell(self, i: int, j: int) -> Cell:
        c, cell = self.costs, self._empty()
        for index, o in enumerate(c.options[i]):
            backward = c.backward_base[i] + o.backward_peak
            forward = c.rerun_base[j] + o.forward_peak
            if i == j and o.fresh:
                self._offer(cell, index, self.slots(backward), 0, o.time)
            elif i == j:
                self._offer(cell, index, self.slots(max(backward, forward)), 0, o.time + o.forward_time)
            else:
                used = self.slots(o.save + c.interface_bytes[i][i + 1])
                least = self.slots(max(backward, forward))
                self._offer(cell, index, least, used, o.time + o.forward_time, self.inner[i + 1, j].times)
        peak = time = 0
        for k in range(i + 1, j + 1):
            peak = max(peak, c.interface_bytes[i][k - 1] + c.pass_peak[k - 1])
            time += c.pass_time[k - 1]
            least, used = self.slots(peak + c.rerun_base[j]), self.slots(c.interface_bytes[i][k])
            self._offer(cell, -k, least, used, time, self.inner[k, j].times, self.inner[i, k - 1].times)
        return cell

    def _top_cell(self, i: int) -> Cell:
        c, cell = self.costs, self._empty()
        for index, o in enumerate(c.options[i]):
            least = max(c.backward_base[i] + o.backward_peak, c.first_base[i] + o.forward_peak)
            used = self.slots(o.save + c.interface_bytes[i][i + 1])
            self._offer(cell, index, self.slots(least), used, o.time, self.top[i + 1].times)
        peak = 0
        for k in range(i + 1, c.blocks + 1):
            peak = max(peak, c.interface_bytes[i][k - 1] + c.pass_peak[k - 1] + c.first_base[k - 1])
            used = self.slots(c.interface_bytes[i][k])
            self._offer(cell, -k, self.slots(peak), used, 0, self.top[k].times, self.inner[i, k - 1].times)
        return cell

    def breakpoints(self) -> list[int]:
        """Slot counts at which the optimal time drops, fewest slots first."""
        times = self.top[0].times
        drops = np.flatnonzero(np.diff(times, prepend=INFINITE) < 0)
        return [int(m) for m in drops if times[m] < INFINITE]
