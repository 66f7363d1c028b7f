"""Chains of whole stages for the dynamic program of ``solvers.chain.table``, and the sequence of least memory.

A stage is a block with two options. *Keep* (F_all of the paper) holds what its backward reads. *Stop* is the run right
before the backward of the stage, which ends with the last tensor that this backward reads.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory", Inria RR-9302 (2019), Theorem 1. Further than there, the last stage may run
again as well. Known shortcoming: x_{i+1} counts behind stage i even if no backward reads it; the walker counts exactly.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from solvers.block.block import Option
from solvers.chain.costs import ChainCosts
from solvers.chain.expand import Choose, choices
from solvers.rotor.chain import Chain, Stage
from solvers.rotor.ops import B, Fck, Fe, Fn, Loss, Operation

_NEVER = 1 << 60
"""Bytes that no table has."""


def costs_of(chain: Chain, unit: int = 1) -> ChainCosts:
    """The costs of ``chain``; generator states are left out.

    ``unit``: bytes of a slot of the table. The table rounds up, so half a slot is taken off each value: what rounding
    adds to them would add up over the chain. The walker counts exactly.
    """
    values = [dict(value) for value in chain.values]
    beyond = [[sum(size for x, size in b.items() if x not in a) - unit // 2 for b in values] for a in values[:-1]]
    of_parameters = [*accumulate((s.parameter_gradients for s in chain.stages[:0:-1]), initial=0)][::-1]
    behind = [chain.value_bytes[-1] + sum(pair) for pair in zip(chain.gradient_bytes[1:], of_parameters, strict=True)]
    return ChainCosts(
        options=tuple(_options(s, chain.value_bytes[i], i < chain.length) for i, s in enumerate(chain.stages, 1)),
        interface_bytes=tuple((0,) * (i + 1) + tuple(of[i + 1 :]) for i, of in enumerate(beyond)),
        pass_peak=tuple(stage.pass_peak for stage in chain.stages),
        pass_time=tuple(stage.forward_time for stage in chain.stages),
        first_base=(0,) * chain.length,
        rerun_base=tuple(behind),
        backward_base=tuple(behind),
        loss_peak=chain.output_gradient + chain.loss,
    )


def _options(stage: Stage, output: int, inner: bool) -> tuple[Option, Option]:
    time, again = stage.forward_time, stage.held + stage.backward_peak + (output if stage.keeps_output else 0)
    kept = again if inner else stage.held + stage.backward_peak  # the caller holds the last output
    keep = Option((), stage.held, stage.forward_peak, kept, 0, time, False, True, 0)
    return keep, Option((), _NEVER, 0, max(stage.stop_peak, again), time - stage.tail, time, True, True, 0)


def build(length: int, choose: Choose, m: int) -> tuple[Operation, ...]:
    """The operations for ``m`` slots."""
    done: list[Operation] = []
    for c in choices(length, choose, m):
        if c.i == length:
            done.append(Loss())
        elif c.option is None:
            done += [Fck(c.i), *(Fn(n) for n in range(c.i + 1, c.k))]
        else:
            done.append(B(c.i) if c.backward else Fe(c.i))
    return tuple(done)


def of_least_memory(costs: ChainCosts) -> tuple[Operation, ...]:
    """The operations of least memory: the same equations with peak bytes in place of time, without slots."""
    length = costs.blocks
    least = np.zeros((length + 1, length + 1), np.int64)  # by i and j
    least[length, length] = costs.loss_peak
    choices: dict[tuple[int, int], tuple[int | None, int, int]] = {}
    for i in reversed(range(length)):
        keep, stop = costs.options[i]
        beyond = np.array(costs.interface_bytes[i], np.int64)
        passes = np.maximum.accumulate(beyond[i:-1] + np.array(costs.pass_peak[i:], np.int64))
        for j in range(i, length + 1):
            base = costs.first_base[i] if j == length else costs.rerun_base[j]
            if i == j:
                best = costs.backward_base[i] + stop.backward_peak
            else:
                rest = keep.save + int(beyond[i + 1] + least[i + 1, j])
                best = max(base + keep.forward_peak, costs.backward_base[i] + keep.backward_peak, rest)
            least[i, j], choices[i, j] = best, (0, i + 1, 0)
            if i < j:
                behind = np.maximum(beyond[i + 1 : j + 1] + least[i + 1 : j + 1, j], least[i, i:j])
                peaks = np.maximum(behind, base + passes[: j - i])
                k = int(peaks.argmin())
                if peaks[k] < best:
                    least[i, j], choices[i, j] = peaks[k], (None, i + 1 + k, 0)
    return build(length, lambda i, j, _: choices[i, j], 0)
