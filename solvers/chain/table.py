"""rotor's dynamic program over blocks with options, vectorised over memory and the end of the segment.

``inner[i,j](m)`` is the least time to run blocks i..j forward and backward with m slots beyond I_i, which is live, when
the blocks after j are done. ``top[i](m)`` is the same for blocks i..B-1 in the first forward phase, the loss included;
forward runs cost nothing there, since they are no recomputation. Equations (11) to (15) of ``solvers/README.md`` say
how they follow from one another: (11) block i is kept with an option, (12) blocks i..k-1 are passed, (13) a fresh
option. What is there in any case, the *base*, is ``rerun_base(j)``, and ``first_base`` in the first forward phase.

The table stores times only. The choice that gives a time is computed again for the few cells of a schedule.

Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains" (rotor), with options per block as in Rockmate
(Zhao et al., 2023). Known shortcoming: checkpoints are persistent, as in rotor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from solvers.chain.costs import ChainCosts

Times = npt.NDArray[np.float32]
"""Nanoseconds, infinite if nothing fits. Seven digits are exact; the walker computes times of schedules exactly."""

Slots = npt.NDArray[np.int64]

Bytes = TypeVar("Bytes", int, Slots)


class ChainTable:
    """Optimal times for every number of slots up to ``size``, each slot ``unit`` bytes.

    ``inner[i][j - i]`` and ``top[i]`` have one time for each number of slots.
    """

    def __init__(self, costs: ChainCosts, unit: int, size: int) -> None:
        self.costs, self.unit, self.size = costs, unit, size
        count = costs.blocks
        self._rerun = np.array(costs.rerun_base, np.int64)
        self._columns = np.arange(size + 1)
        self._passes = [_passes(costs, i) for i in range(count)]
        self.inner: list[Times] = [np.full((count - i, size + 1), np.inf, np.float32) for i in range(count)]
        self.top: Times = np.full((count + 1, size + 1), np.inf, np.float32)
        self.top[count, self.slots(costs.loss_peak) :] = 0
        for i in reversed(range(count)):
            self._fill_inner(i)
            self._fill_top(i)

    def slots(self, size: Bytes) -> Bytes:
        """Slots that hold ``size`` bytes; of many sizes at once, if these are an array."""
        return -(-size // self.unit)

    def _fill_inner(self, i: int) -> None:
        """``inner[i]`` for all ends j. (12) goes by rising k, since all ends from k on read ``inner[i,k-1]``."""
        out, count = self.inner[i], self.costs.blocks
        for o, option in enumerate(self.costs.options[i]):
            least, time = self._alone(i, o)
            np.minimum(out[0, least:], np.float32(time), out=out[0, least:])
            if i + 1 < count:
                used, time = self._used(i, o), float(option.forward_time + option.time)
                self._offer(out[1:], self._least_kept(i, o, self._rerun[i + 1 :]), used, self.inner[i + 1], time)
        for k in range(i + 1, count):
            peaks, _, times = self._passes[i]
            least = self.slots(peaks[k - i - 1] + self._rerun[k:])
            before = self.inner[i][k - i - 1] + np.float32(times[k - i - 1])
            self._offer(out[k - i :], least, self.slots(self.costs.interface_bytes[i][k]), self.inner[k], before)

    def _offer(self, out: Times, least: Slots, used: int, rest: Times, time: Times | float) -> None:
        """Lower row r of ``out`` to ``time`` plus ``rest[r]`` with ``used`` slots less, from column ``least[r]`` on."""
        low = max(used, int(least.min()))
        if low > self.size:
            return
        more = np.float32(time) if isinstance(time, float) else time[low:]
        offers = rest[:, low - used : self.size + 1 - used] + more
        high = int(least.max()) - low
        if high > 0:
            offers[:, :high][self._columns[low : low + high] < least[:, None]] = np.inf
        np.minimum(out[:, low:], offers, out=out[:, low:])

    def _fill_top(self, i: int) -> None:
        for o, option in enumerate(self.costs.options[i]):
            kept = self._least_kept(i, o, np.array([self.costs.first_base[i]]))
            self._offer(self.top[i : i + 1], kept, self._used(i, o), self.top[i + 1 : i + 2], float(option.time))
        for k in range(i + 1, self.costs.blocks + 1):
            least, used, _ = self._passed(i, k, self.costs.blocks)
            self._offer(self.top[i : i + 1], np.array([least]), used, self.top[k : k + 1], self.inner[i][k - i - 1])

    def _used(self, i: int, o: int) -> int:
        """Slots that option o takes from what follows."""
        return self.slots(self.costs.options[i][o].save + self.costs.interface_bytes[i][i + 1])

    def _alone(self, i: int, o: int) -> tuple[int, float]:
        """Least slots and time of (11) and (13) for a single block."""
        c, option = self.costs, self.costs.options[i][o]
        backward = c.backward_base[i] + option.backward_peak
        if option.fresh:
            return self.slots(backward), float(option.time)
        least = self.slots(max(backward, c.rerun_base[i] + option.forward_peak))
        return least, float(option.time + option.forward_time)

    def _least_kept(self, i: int, o: int, base: Slots) -> Slots:
        """Least slots of (11), per base."""
        option = self.costs.options[i][o]
        backward = self.costs.backward_base[i] + option.backward_peak
        return self.slots(np.maximum(backward, base + option.forward_peak))

    def _passed(self, i: int, k: int, j: int) -> tuple[int, int, float]:
        """Of (12) for the end j: least slots, slots used, and the time of passing i..k-1."""
        (peaks, first_peaks, times), at = self._passes[i], k - i - 1
        used = self.slots(self.costs.interface_bytes[i][k])
        if j == self.costs.blocks:
            return self.slots(int(first_peaks[at])), used, 0.0
        return self.slots(int(peaks[at]) + self.costs.rerun_base[j]), used, float(times[at])

    def breakpoints(self) -> list[int]:
        """Slot counts at which the optimal time drops, fewest slots first."""
        times = self.top[0]
        before = np.concatenate([np.full(1, np.inf, np.float32), times[:-1]])
        return [int(m) for m in np.flatnonzero(times < before * np.float32(1 - 1e-6))]

    def choice(self, i: int, j: int, m: int) -> tuple[int | None, int, int]:
        """The choice that gives ``inner[i,j](m)``, or ``top[i](m)`` where j is the number of blocks: (option, i+1) or
        (None, k), and the slots left for what follows.
        """
        return min(self._offers(i, j, m), key=lambda offer: offer[0])[1:]

    def _offers(self, i: int, j: int, m: int) -> Iterable[tuple[float, int | None, int, int]]:
        """The time of each choice, and the choice."""
        first = j == self.costs.blocks
        base = self.costs.first_base[i] if first else self.costs.rerun_base[j]
        for o, option in enumerate(self.costs.options[i]):
            if i == j:
                least, time = self._alone(i, o)
                if m >= least:
                    yield time, o, i + 1, m
                continue
            used = self._used(i, o)
            if m >= max(used, int(self._least_kept(i, o, np.array([base]))[0])):
                time = option.time + (0 if first else option.forward_time)
                yield time + self._rest(i + 1, j, m - used), o, i + 1, m - used
        for k in range(i + 1, j + 1):
            least, used, time = self._passed(i, k, j)
            if m >= max(used, least):
                done = float(self.inner[i][k - i - 1, m]) + time
                yield self._rest(k, j, m - used) + done, None, k, m - used

    def _rest(self, k: int, j: int, m: int) -> float:
        """The time of what follows, from block k to the end j."""
        return float(self.top[k, m] if j == self.costs.blocks else self.inner[k][j - k, m])


def _passes(costs: ChainCosts, i: int) -> tuple[Slots, Slots, Slots]:
    """Per k in i+1..B, of running blocks i..k-1 that keeps I_k only: peak without base, with ``first_base``, time."""
    stored = np.array(costs.interface_bytes[i][i:-1], np.int64)
    peaks = stored + np.array(costs.pass_peak[i:], np.int64)
    first = peaks + np.array(costs.first_base[i:], np.int64)
    times = np.cumsum(np.array(costs.pass_time[i:], np.int64))
    return np.maximum.accumulate(peaks), np.maximum.accumulate(first), times
