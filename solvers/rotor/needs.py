"""Bytes that the choices of rotor's dynamic program need (``solvers.rotor.table``), and the sequence of least memory.

``build`` turns choices into operations.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from solvers.rotor.chain import Chain
from solvers.rotor.ops import B, Fck, Fe, Fn, Loss, Operation


class Needs:
    """The bytes that the equations compare with m. (1), (2) and (3) are those of ``solvers.rotor.table``."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        last = chain.length - 1
        a, after, grads = chain.value_bytes, chain.parameter_gradients_after, chain.gradient_bytes
        self.a = a
        self.inputs = np.array(a[:-1], np.int64)
        self.pass_peaks = [self._pass_peaks(s) for s in range(chain.length)]
        self.besides = np.array([a[-1] + grads[t + 1] + after[t] for t in range(last)] + [0], np.int64)
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
        """Bytes for (3) with a way of stage s."""
        stage, backward = self.chain.stages[s], self.backward[s][way]
        if s < self.chain.length - 1:
            return max(int(self.besides[s]) + stage.stop_peak, backward)
        w = stage.ways[way]
        loss = w.held + self.a[-1] + self.chain.output_gradient + self.chain.loss
        return max(w.forward_peak, loss, backward)

    def enable(self, s: int, way: int) -> npt.NDArray[np.int64]:
        """Bytes for (2) with a way of stage s, for each t."""
        return np.maximum(self.besides + self.chain.stages[s].ways[way].forward_peak, self.backward[s][way])

    def passes(self, s: int, t: int) -> npt.NDArray[np.int64]:
        """Bytes for (1), for k = s+1..t."""
        peaks: npt.NDArray[np.int64] = self.pass_peaks[s][: t - s] + self.besides[t]
        return peaks

    def _pass_peaks(self, s: int) -> npt.NDArray[np.int64]:
        """Bytes for (1) without D, for k = s+1..L; they grow with k."""
        peaks = np.array([stage.pass_peak for stage in self.chain.stages[s:]], np.int64)
        peaks[1:] += self.inputs[s + 1 :]
        grown: npt.NDArray[np.int64] = np.maximum.accumulate(peaks)
        return grown

    def kept(self, s: int, way: int) -> int:
        """Bytes that (2) keeps while the stages behind s run."""
        return self.chain.stages[s].ways[way].held + self.a[s + 1]

    def leaf_ways(self, s: int) -> range:
        """Ways for (3); there is a choice in the first forward phase only."""
        return range(len(self.chain.stages[s].ways) if s == self.chain.length - 1 else 1)


def build(
    chain: Chain,
    choice: Callable[[int, int, int], tuple[int | None, int]],
    m: int,
    left: Callable[[int, int, int | None, int], int],
) -> tuple[Operation, ...]:
    """The operations of T[0, L-1](m).

    ``choice(s, t, m)``: (way, s+1), or (None, k) to keep x_s and go on from k. ``left(s, k, way, m)``: slots that this
    leaves for the stages from k on. It uses a stack, since chains may be too long for recursion.
    """
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
    """The sequence of least memory: the same recursion with peak bytes in place of time, without slots."""

    def __init__(self, chain: Chain) -> None:
        self.chain, self.needs = chain, Needs(chain)
        length = chain.length
        self.least = np.zeros((length, length), np.int64)
        self.choices: dict[tuple[int, int], tuple[int | None, int]] = {}
        a = np.array(chain.value_bytes, np.int64)
        for s in reversed(range(length)):
            enable = [self.needs.enable(s, w) for w in range(len(chain.stages[s].ways))]
            for t in range(s, length):
                self._fill(s, t, a, enable)

    def _fill(self, s: int, t: int, a: npt.NDArray[np.int64], enable: list[npt.NDArray[np.int64]]) -> None:
        needs = self.needs
        if s == t:
            offers = [(needs.leaf(s, w), w) for w in needs.leaf_ways(s)]
        else:
            rest = int(self.least[s + 1, t])
            offers = [(max(int(least[t]), needs.kept(s, w) + rest), w) for w, least in enumerate(enable)]
        best, way = min(offers)
        self.least[s, t], self.choices[s, t] = best, (way, s + 1)
        if s < t:
            peaks = np.maximum(a[s + 1 : t + 1] + self.least[s + 1 : t + 1, t], self.least[s, s:t])
            peaks = np.maximum(peaks, needs.passes(s, t))
            k = int(peaks.argmin())
            if peaks[k] < best:
                self.least[s, t], self.choices[s, t] = peaks[k], (None, s + 1 + k)

    def sequence(self) -> tuple[Operation, ...]:
        return build(self.chain, lambda s, t, _: self.choices[s, t], 0, lambda *_: 0)
