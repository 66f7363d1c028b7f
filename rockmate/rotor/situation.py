"""What decides the memory of a call, to tell whether a plan for one call fits another."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from rkgb.graphs import Mode
from rkgb.settings import settings
from rkgb.trace.capture import current_mode
from rkgb.trees import tensor_leaves
from rockmate.rotor.parts import Parts, changing


@dataclass(frozen=True)
class Situation:
    """Layers and their modes, autocast, torch's settings, parameters, buffers, and the input.

    ``kinds``: of parameters and inputs, and how they lie. ``configured``: plain attributes of each layer. ``wants``:
    which parameters and inputs require grad. ``changing``: the buffers of each layer that runs are known to change in
    place, of which copies are kept for a recompute.
    """

    layers: tuple[tuple[nn.Module, bool], ...]
    mode: Mode
    settings: tuple[Hashable, ...]
    kinds: tuple[tuple[Hashable, ...], ...]
    configured: tuple[tuple[tuple[str, Hashable], ...], ...]
    wants: tuple[bool, ...]
    shapes: tuple[tuple[int, ...], ...]
    changing: tuple[frozenset[str], ...]

    @classmethod
    def of(cls, functions: tuple[nn.Module, ...], parts: Sequence[Parts], x: Any) -> Situation:
        """The situation of a call of ``functions``, which have these ``parts``, with ``x``."""
        inputs = tensor_leaves(x)
        parameters = [p for of in parts for p in of.parameters.values()]
        modules = [m for of in parts for _, m in of.modules]
        return cls(
            tuple((m, m.training) for m in modules),
            replace(current_mode(), grad=True),
            settings(),
            (*((p.dtype, p.device, p.shape) for p in parameters), *map(_kind, inputs)),
            tuple(of.configuration() for of in parts),
            tuple(t.requires_grad for t in (*parameters, *inputs)),
            tuple(tuple(t.shape) for t in inputs),
            tuple(changing(f) for f in functions),
        )

    def covers(self, other: Situation) -> bool:
        """Whether a call in ``other`` needs at most the memory of one in this situation.

        Layers, modes, settings, attributes, dtypes, devices and strides (but of contiguous inputs) must be equal. Sizes
        of the input may be smaller, fewer tensors may require grad, and fewer buffers may change.
        """
        equal = all(
            getattr(self, k) == getattr(other, k) for k in ("layers", "mode", "settings", "kinds", "configured")
        )
        no_less: Any = (
            (self.wants, other.wants),
            (self.changing, other.changing),
            (chain.from_iterable(self.shapes), chain.from_iterable(other.shapes)),
        )
        return equal and all(a >= b for mine, others in no_less for a, b in zip(mine, others, strict=True))


def _kind(t: torch.Tensor) -> tuple[Hashable, ...]:
    """Of an input."""
    lies = t.layout if t.layout != torch.strided or t.is_contiguous() else t.stride()
    return t.dtype, t.device, t.dim(), lies
