"""rotor's persistent dynamic program over a heterogeneous chain, vectorised over memory.

``T[s,t](m)`` is the least time to run stages s..t forward and backward, when those behind t are done, with m slots
beyond x_s, which is live until B_s::

    T[s,t](m) = min of
      (1)  pass(s..k-1) + T[k,t](m - a_k) + T[s,k-1](m)             over s < k <= t: F_ck^s, F_∅^{s+1}.., then from k
           if  m >= D_t + max over s <= j < k of (a_j if j > s) + o_f(j)
      (2)  run(s,w) + r(w) + u_b(s) + T[s+1,t](m - held(w) - a_{s+1})   over ways w of stage s, for s < t
           if  m >= D_t + forward_peak(w)  and  m >= E_s + what B_s takes with w
      (3)  stop(s) + u_b(s)                                           for s = t
           if  m >= D_s + stop_peak(s)  and  m >= E_s + what B_s takes

a_i: bytes of x_i. Runs of a stage, u_f in the paper, differ in time by what they keep (``Runs`` in
``solvers.rotor.chain``): pass, run and stop; run(s,0) is u_f for t = L-1, and the time of a rerun otherwise. r(w): time
of the reruns of way w. D_t: bytes of the gradient of x_{t+1}, of the gradients of later stages' parameters, and of x_L,
which the caller holds. E_s: the same with x_{s+1} and the stages behind s. In the first forward phase, t = L-1, D is 0,
(3) is a whole run in any way, and the loss has to fit behind it.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory", Inria RR-9302 (2019), Theorem 1; ways as the options of Rockmate (Zhao et
al., ICML 2023). Known shortcoming: values that share memory count each, and a_{s+1} counts in (2) even if no backward
reads it; the walker counts exactly.
"""

from __future__ import annotations

import numpy as np

from solvers.rotor.chain import Chain
from solvers.rotor.fill import least_times
from solvers.rotor.needs import build
from solvers.rotor.ops import Operation
from solvers.rotor.terms import INF, Slots, Times, terms_of


class Table:
    """``T`` for every number of slots up to ``size``, with ``unit`` bytes a slot.

    ``times[p, s, t, j]`` times ``terms.scale`` is T[s,t](p * width + j) in the chain's unit of time
    (``solvers.rotor.fill``).
    """

    def __init__(self, chain: Chain, unit: float, size: int) -> None:
        self.chain, self.size = chain, size
        self.terms = terms_of(chain, unit, size)
        self.times = least_times(self.terms, size)

    def breakpoints(self) -> list[int]:
        """Slot counts at which the least time drops, fewest slots first."""
        times = self.times[:, 0, self.chain.length - 1].reshape(-1)[: self.size + 1]
        return [int(m) for m in np.flatnonzero(times[1:] < times[:-1] * np.float32(1 - 1e-6)) + 1]

    def sequence(self, m: int) -> tuple[Operation, ...]:
        """The operations that take least time with ``m`` slots."""
        return build(self.chain, self._choice, m, self._left)

    def _left(self, s: int, k: int, way: int | None, m: int) -> int:
        """Slots that a choice leaves for what follows."""
        return m - int(self.terms.taken[k] if way is None else self.terms.ways[way].taken[s])

    def _time(self, s: int | Slots, t: int | Slots, m: int | Slots) -> Times:
        width = self.times.shape[-1]
        times: Times = self.times[m // width, s, t, m % width]
        return times

    def _choice(self, s: int, t: int, m: int) -> tuple[int | None, int]:
        """(way, s+1) for (2) and (3), (None, k) for (1)."""
        terms = self.terms
        if s == t:
            return min((time, w) for w, (least, time) in enumerate(terms.leaves[s]) if m >= least)[1], s + 1
        offers = [
            (float(self._time(s + 1, t, m - way.taken[s])) + float(way.time.whole[s, t]), w)
            for w, way in enumerate(terms.ways)
            if m >= way.least.whole[s, t]
        ]
        best, chosen = min(offers, default=(np.inf, 0))
        splits = self._splits(s, t, m)
        at = int(splits.argmin())
        # Among equals, up to float32's precision, keeping what the backward reads is preferred.
        if splits[at] < best - 1e-7 * max(1.0, best if np.isfinite(best) else 1.0):
            return None, s + 1 + at
        return chosen, s + 1

    def _splits(self, s: int, t: int, m: int) -> Times:
        """(1) for each k in s+1..t."""
        terms, k = self.terms, np.arange(s + 1, t + 1)
        times = self._time(k, t, np.maximum(m - terms.taken[k], 0)) + terms.start[k] + self._time(s, k - 1, m)
        times -= terms.start[s]
        peaks = np.rint((terms.passes.whole[s, k] + terms.besides[t]) / terms.unit)
        times[(m < terms.taken[k]) | (peaks > m)] = INF
        return times
