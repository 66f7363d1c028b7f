"""What decides the memory of a call, to tell whether a plan for one call fits another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rkgb.graphs import Mode
from rkgb.trace.capture import current_mode
from rkgb.trees import tensor_leaves
from rockmate.rotor.buffers import changing
from rockmate.rotor.values import Parts


@dataclass(frozen=True)
class Situation:
    """Layers and their modes, autocast, parameters, buffers, and the input.

    ``wants``: which parameters and inputs require grad. ``changing``: the buffers of each layer that runs are known to
    change in place, of which copies are kept for a recompute.
    """

    layers: tuple[tuple[nn.Module, bool], ...]
    mode: Mode
    kinds: tuple[tuple[torch.dtype, torch.device, int], ...]
    wants: tuple[bool, ...]
    shapes: tuple[tuple[int, ...], ...]
    changing: tuple[frozenset[str], ...]

    @classmethod
    def of(cls, functions: tuple[nn.Module, ...], parts: Sequence[Parts], x: Any) -> Situation:
        """The situation of a call of ``functions``, which have these ``parts``, with ``x``."""
        inputs = tensor_leaves(x)
        tensors = [*(p for of in parts for p in of.parameters.values()), *inputs]
        return cls(
            tuple((m, m.training) for of in parts for _, m in of.modules),
            replace(current_mode(), grad=True),
            tuple((t.dtype, t.device, t.dim()) for t in tensors),
            tuple(t.requires_grad for t in tensors),
            tuple(tuple(t.shape) for t in inputs),
            tuple(changing(f) for f in functions),
        )

    def covers(self, other: Situation) -> bool:
        """Whether a call in ``other`` needs at most the memory of one in this situation.

        Layers, modes, dtypes and devices must be equal. Sizes of the input may be smaller, fewer tensors may require
        grad, and fewer buffers may change.
        """
        return (
            (self.layers, self.mode, self.kinds) == (other.layers, other.mode, other.kinds)
            and all(a or not b for a, b in zip(self.wants, other.wants, strict=True))
            and all(a >= b for a, b in zip(self.changing, other.changing, strict=True))
            and all(a >= b for a, b in zip(_sizes(self.shapes), _sizes(other.shapes), strict=True))
        )


def _sizes(shapes: tuple[tuple[int, ...], ...]) -> list[int]:
    return [size for shape in shapes for size in shape]
