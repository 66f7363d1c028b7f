"""What decides the memory of a call, to tell whether a plan for one call fits another."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rkgb.settings import settings
from rkgb.trace.capture import current_mode
from rkgb.trees import tensor_leaves
from rockmate.rotor.parts import Parts, changing


@dataclass(frozen=True)
class Situation:
    """What must be equal in a call that a plan for this one is to fit, and what must be no more there.

    ``fixed``: layers and their modes, autocast, torch's settings, plain attributes of layers, kinds of parameters and
    inputs, and how inputs lie. ``most``: whether each parameter and input requires grad, the buffers of each layer that
    runs are known to change in place, of which copies are kept for a recompute, and the sizes of inputs.
    """

    fixed: tuple[Hashable, ...]
    most: tuple[Any, ...]

    @classmethod
    def of(cls, functions: Sequence[nn.Module], x: Any) -> Situation:
        """The situation of a call of ``functions`` with ``x``."""
        layers, inputs = [*map(Parts, functions)], tensor_leaves(x)
        parameters = [p for of in layers for p in of.parameters.values()]
        fixed = (
            *((m, m.training) for of in layers for _, m in of.modules),
            *(replace(current_mode(), grad=True), settings()),
            *(of.configuration() for of in layers),
            *((p.dtype, p.device, p.shape) for p in parameters),
            *map(_kind, inputs),
        )
        wants = (t.requires_grad for t in (*parameters, *inputs))
        return cls(fixed, (*wants, *map(changing, functions), *(size for t in inputs for size in t.shape)))

    def covers(self, other: Situation) -> bool:
        """Whether a call in ``other`` needs at most the memory of one in this situation."""
        return self.fixed == other.fixed and all(a >= b for a, b in zip(self.most, other.most, strict=True))


def _kind(t: torch.Tensor) -> tuple[Hashable, ...]:
    """Of an input."""
    lies = t.layout if t.layout != torch.strided or t.is_contiguous() else t.stride()
    return t.dtype, t.device, t.dim(), lies
