"""rotor's persistent dynamic program over a heterogeneous chain, vectorised over memory.

``T[s,t](m)`` is the least time to run stages s..t forward and backward, stages behind t being done, with m slots
beyond x_s, which is there and stays until B_s::

    T[s,t](m) = min of
      (1)  u_f(s..k-1) + T[k,t](m - a_k) + T[s,k-1](m)              over s < k <= t: F_ck^s, F_∅^{s+1}.., then from k
           if  m >= D_t + max over s <= j < k of (a_j if j > s) + o_f(j)
      (2)  u_f(s) + r(w) + u_b(s) + T[s+1,t](m - held(w) - a_{s+1})   over ways w of stage s, for s < t
           if  m >= D_t + forward_peak(w)  and  m >= E_s + what B_s takes with w
      (3)  u_f(s) - tail(s) + u_b(s)                                  for s = t
           if  m >= D_s + stop_peak(s)  and  m >= E_s + what B_s takes

a_i: bytes of x_i; r(w): what way w runs again. D_t, E_s: what is there besides, gradients of x_{t+1} (x_{s+1}) and of
the parameters of later stages, and x_L, which the caller holds. For t = L-1, the first forward phase, D is 0, (3) is
a whole run in any way, and the loss has to fit behind it.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory", Inria RR-9302 (2019), Theorem 1; ways as the options of Rockmate (Zhao et
al., ICML 2023). Known shortcoming: a value counts once for each of two neighbours that share its memory, and a_{s+1} in
(2) even where no backward reads it; the walker counts exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from solvers.rotor_chain import Chain
from solvers.rotor_ops import B, Fck, Fe, Fn, Loss, Operation

Times = npt.NDArray[np.float32]
_GROUP = 8
_FIRST = 4  # the part of the columns that is done first
_ROUNDING = 3e-6  # of all times together
_NEVER = np.float32(np.inf)


class Needs:
    """What the equations ask for, in bytes."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        last = chain.length - 1
        a, after, grads = chain.value_bytes, chain.parameter_gradients_after, chain.gradient_bytes
        self.a = a
        self.inputs = np.array(a[:-1], np.int64)
        self.pass_peaks = [self._pass_peaks(s) for s in range(chain.length)]
        self.besides = [a[-1] + grads[t + 1] + after[t] for t in range(last)] + [0]
        self.backward = [
            tuple(
                max(w.held + w.refill_peak, w.refilled + s.backward_peak)
                + grads[i + 1]
                + after[i]
                + a[-1]
                + (a[i + 1] if s.keeps_output and not k and i < last else 0)
                for k, w in enumerate(s.ways)
            )
            for i, s in enumerate(chain.stages)
        ]

    def leaf(self, s: int, way: int) -> int:
        """Bytes for (3)."""
        stage, backward = self.chain.stages[s], self.backward[s][way]
        if s < self.chain.length - 1:
            return max(self.besides[s] + stage.stop_peak, backward)
        w = stage.ways[way]
        loss = w.held + self.a[-1] + self.chain.output_gradient + self.chain.loss
        return max(w.forward_peak, loss, backward)

    def enable(self, s: int, t: int, way: int) -> int:
        """Bytes for (2)."""
        return max(self.besides[t] + self.chain.stages[s].ways[way].forward_peak, self.backward[s][way])

    def passes(self, s: int, t: int, splits: int) -> npt.NDArray[np.int64]:
        """Bytes for (1), for the first ``splits`` k from s+1 on."""
        found: npt.NDArray[np.int64] = self.pass_peaks[s][:splits] + self.besides[t]
        return found

    def _pass_peaks(self, s: int) -> npt.NDArray[np.int64]:
        """The same for k = s+1..L without D; they grow with k."""
        peaks = np.array([stage.pass_peak for stage in self.chain.stages[s:]], np.int64)
        peaks[1:] += self.inputs[s + 1 :]
        grown: npt.NDArray[np.int64] = np.maximum.accumulate(peaks)
        return grown

    def kept(self, s: int, way: int) -> int:
        """Bytes that (2) takes from what lies behind s."""
        return self.chain.stages[s].ways[way].held + self.a[s + 1]

    def leaf_ways(self, s: int) -> range:
        """Ways in which (3) may run: only the first phase has a choice."""
        return range(len(self.chain.stages[s].ways) if s == self.chain.length - 1 else 1)


class Table:
    """``T`` for every number of slots up to ``size``; ``unit`` bytes a slot, sizes rounded to the nearest slot."""

    def __init__(self, chain: Chain, unit: float, size: int) -> None:
        self.chain, self.unit, self.size = chain, unit, size
        self.needs = Needs(chain)
        length = chain.length
        # Float32 halves the memory traffic; the walker computes times again, exactly.
        self.scale = float(max(1, sum(s.forward_time + s.backward_time for s in chain.stages)))
        self.run = [s.forward_time / self.scale for s in chain.stages]
        self.start = np.concatenate([[0.0], np.cumsum(self.run)])
        self.shift = list(self.start.astype(np.float32))
        both = np.cumsum([(s.forward_time + s.backward_time) / self.scale for s in chain.stages])
        whole = [0.0, *both.tolist()]
        tails = [*(s.tail_time / self.scale for s in chain.stages[:-1]), 0.0]
        # The time of stages s..t without recomputation is until[t] - before[s], a little more for rounding.
        self.before = [time * (1 + 1e-6) for time in whole[:-1]]
        self.until = [(time - tail) * (1 + 1e-6) for time, tail in zip(whole[1:], tails, strict=True)]
        self.rows = [self._unknown(length - s) for s in range(length)]
        # behind[t][k](m) = T[k,t](m - a_k) plus the time to run the stages before k from stage 0
        self.behind = [self._unknown(t + 1) for t in range(length)]
        self.first = [np.full(t + 1, size + 1, np.int64) for t in range(length)]
        self.lowest = np.full(length, size + 1).tolist()  # of first[t] so far
        self.taken = [self.slots(a) for a in self.needs.a]
        self.ways = [list(self._ways(s)) for s in range(length)]
        self.buffer = np.empty(length * (size + 1), np.float32)
        # Row t of ``behind`` is read for several s while it is in the processor's cache.
        for high in range(length - 1, -1, -_GROUP):
            group = range(high, max(-1, high - _GROUP), -1)
            for t in range(group[-1], length):
                for s in (s for s in group if s <= t):
                    self._fill(s, t)

    def _unknown(self, count: int) -> Times:
        """Times not known yet; each row begins a cache line (16 numbers) as the others do."""
        padded = np.full((count, -(-(self.size + 1) // 16) * 16), np.inf, np.float32)
        return padded[:, : self.size + 1]

    def slots(self, size: int) -> int:
        return round(size / self.unit)

    def _ways(self, s: int) -> Iterator[tuple[int, list[int], int, float]]:
        """For (2): way, least slots for each t, slots taken from the rest, time."""
        stage, needs = self.chain.stages[s], self.needs
        for w, way in enumerate(stage.ways if s < self.chain.length - 1 else ()):
            least = [self.slots(needs.enable(s, t, w)) for t in range(self.chain.length)]
            time = self.run[s] + (stage.backward_time + way.refill_time) / self.scale
            yield w, least, self.slots(needs.kept(s, w)), time

    def _fill(self, s: int, t: int) -> None:
        row, end = self.rows[s][t - s], self.size + 1
        for way, least, used, time, rest in self._direct(s, t):
            start = max(least, used)
            if start >= end:
                continue
            found = time if rest is None else rest[start - used : end - used] + np.float32(time)
            if way:
                np.minimum(row[start:], found, out=row[start:])
            else:
                row[start:] = found
        if s < t:
            self._offer_splits(s, t, row)
        taken = self.taken[s]
        if taken < end:
            np.add(row[: end - taken], self.shift[s], out=self.behind[t][s, taken:])
            first = taken + end - int(row[::-1].searchsorted(_NEVER))  # times fall with m
            if first < end:
                self.first[t][s] = first
                self.lowest[t] = min(self.lowest[t], first)

    def _direct(self, s: int, t: int) -> list[tuple[int, int, int, float, Times | None]]:
        """(2) and (3): way, least slots, slots taken from the rest, time, the rest's times."""
        if s < t:
            rest = self.rows[s + 1][t - s - 1]
            return [(w, least[t], used, time, rest) for w, least, used, time in self.ways[s]]
        stage, needs = self.chain.stages[s], self.needs
        tail = 0 if s == self.chain.length - 1 else stage.tail_time
        times = [(stage.backward_time - tail + stage.ways[w].refill_time) / self.scale for w in needs.leaf_ways(s)]
        return [(w, self.slots(needs.leaf(s, w)), 0, self.run[s] + time, None) for w, time in enumerate(times)]

    def _offer_splits(self, s: int, t: int, row: Times) -> None:
        """(1), in the columns where something is recomputed in (2): no split takes less than keeping everything.

        Nor does a split at k take less than that and a second run of s..k-1. So where a few columns are done, those of
        more memory, which take no longer, need the first splits only.
        """
        low, everything = self.lowest[t], self.until[t] - self.before[s]
        if low > self.size or row[low] <= everything:
            return
        high = int((-row).searchsorted(np.float32(-everything)))
        middle = low + 1 + (high - low) // _FIRST
        self._offer_some(s, t, row, t - s, low, min(middle, high))
        if middle < high:
            least = row[middle - 1]
            np.minimum(row[middle:high], least, out=row[middle:high])
            again = self.start[s] + (least - everything) + _ROUNDING
            splits = int(self.start[s + 1 : t + 1].searchsorted(again, "right"))
            if splits:
                self._offer_some(s, t, row, splits, middle, high)

    def _offer_some(self, s: int, t: int, row: Times, splits: int, low: int, high: int) -> None:
        """The first of these, in the columns from ``low`` to ``high``."""
        behind, rest = self.behind[t][s + 1 : s + 1 + splits, low:high], self.rows[s][:splits, low:high]
        times = self.buffer[: splits * (high - low)].reshape(splits, high - low)
        np.add(behind, rest, out=times)
        if self.needs.pass_peaks[s][splits - 1] + self.needs.besides[t] > low * self.unit:
            self._forbid(s, t, times, low)
        found = np.minimum.reduce(times)
        found -= self.shift[s]
        np.minimum(row[low:high], found, out=row[low:high])

    def _forbid(self, s: int, t: int, times: Times, low: int) -> None:
        """Splits for which there is not the memory to pass on to k; it grows with k."""
        room = low * self.unit - self.needs.besides[t]
        fits = int(self.needs.pass_peaks[s][: len(times)].searchsorted(room, "right"))
        least = np.rint(self.needs.passes(s, t, len(times))[fits:] / self.unit).astype(np.int64)
        given = np.maximum(self.first[t][s + 1 + fits : s + 1 + len(times)], low)
        for k in (least > given).nonzero()[0].tolist():
            times[fits + k, : max(0, int(least[k]) - low)] = np.inf

    def breakpoints(self) -> list[int]:
        """Slot counts at which the least time drops, fewest slots first."""
        times = self.rows[0][-1]
        return [int(m) for m in np.flatnonzero(times[1:] < times[:-1] * np.float32(1 - 1e-6)) + 1]

    def sequence(self, m: int) -> tuple[Operation, ...]:
        """The operations that take least time with ``m`` slots."""
        return build(self.chain, self._choice, m, self._left)

    def _left(self, s: int, k: int, way: int | None, m: int) -> int:
        taken = self.needs.a[k] if way is None else self.needs.kept(s, way)
        return m - self.slots(taken)

    def _choice(self, s: int, t: int, m: int) -> tuple[int | None, int]:
        """(way, s+1) for (2) and (3), (None, k) for (1)."""
        best, found = np.inf, (0, s + 1)
        for way, least, used, time, rest in self._direct(s, t):
            if m >= max(least, used):
                value = time if rest is None else float(rest[m - used]) + time
                if value < best:
                    best, found = value, (way, s + 1)
        if s < t:
            splits = self._column(s, t, m)
            k = int(splits.argmin())
            # Storing everything is preferred among equals: float32 cannot tell less than this.
            if splits[k] < best - 1e-7 * max(1.0, best if np.isfinite(best) else 1.0):
                return None, s + 1 + k
        return found

    def _column(self, s: int, t: int, m: int) -> Times:
        column: Times = self.behind[t][s + 1 : t + 1, m] + self.rows[s][: t - s, m] - self.shift[s]
        column[np.rint(self.needs.passes(s, t, t - s) / self.unit) > m] = np.inf
        return column


def build(
    chain: Chain,
    choice: Callable[[int, int, int], tuple[int | None, int]],
    m: int,
    left: Callable[[int, int, int | None, int], int],
) -> tuple[Operation, ...]:
    """The operations of T[0, L-1](m), following ``choice``. Depth-first with a stack: chains are long."""
    last = chain.length - 1
    done: list[Operation] = []
    todo: list[tuple[int, int, int] | Operation] = [(0, last, m)]
    while todo:
        item = todo.pop()
        if not isinstance(item, tuple):
            done.append(item)
            continue
        s, t, m = item
        way, k = choice(s, t, m)
        if way is None:
            done += [Fck(s), *(Fn(j) for j in range(s + 1, k))]
            todo += [(s, k - 1, m), (k, t, left(s, k, None, m))]
        else:
            done.append(Fe(s, way))
            todo.append(B(s))
            if s < t:
                todo.append((s + 1, t, left(s, k, way, m)))
            elif t == last:
                todo.append(Loss())
    return tuple(done)


class LeastMemory:
    """The same recursion with peak bytes in place of time: the sequence that takes least memory, exactly as counted."""

    def __init__(self, chain: Chain) -> None:
        self.chain, self.needs = chain, Needs(chain)
        length = chain.length
        self.least = np.zeros((length, length), np.int64)
        self.choices: dict[tuple[int, int], tuple[int | None, int]] = {}
        a = np.array(chain.value_bytes, np.int64)
        for s in reversed(range(length)):
            for t in range(s, length):
                self._fill(s, t, a)

    def _fill(self, s: int, t: int, a: npt.NDArray[np.int64]) -> None:
        needs = self.needs
        if s == t:
            offers = [(needs.leaf(s, w), w) for w in needs.leaf_ways(s)]
        else:
            rest = int(self.least[s + 1, t])
            ways = range(len(self.chain.stages[s].ways))
            offers = [(max(needs.enable(s, t, w), needs.kept(s, w) + rest), w) for w in ways]
        best, way = min(offers)
        self.least[s, t], self.choices[s, t] = best, (way, s + 1)
        if s < t:
            peaks = np.maximum(a[s + 1 : t + 1] + self.least[s + 1 : t + 1, t], self.least[s, s:t])
            peaks = np.maximum(peaks, needs.passes(s, t, t - s))
            k = int(peaks.argmin())
            if peaks[k] < best:
                self.least[s, t], self.choices[s, t] = peaks[k], (None, s + 1 + k)

    def sequence(self) -> tuple[Operation, ...]:
        return build(self.chain, lambda s, t, _: self.choices[s, t], 0, lambda *_: 0)
