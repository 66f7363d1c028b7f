"""What of the arguments of a call decides which graph it runs."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

from rkgb.settings import settings
from rkgb.trace.capture import current_mode

_PLAIN = frozenset({bool, int, float, str, type(None)})
"""Types of arguments that a key has the value of."""


def _value(x: Any) -> tuple[Hashable, ...]:
    """What distinguishes a leaf that is no tensor; of objects, only the type."""
    if isinstance(x, (np.ndarray, np.generic)):
        return () if x.dtype.hasobject else (x.dtype.str, x.shape, x.tobytes())
    if type(x) not in _PLAIN:
        return ()
    return (x, math.copysign(1, x)) if type(x) is float and not x else (x,)


def _described(x: Any, sized: bool, valued: bool) -> tuple[Hashable, ...]:
    if not isinstance(x, torch.Tensor):
        free = (type(x) is int and not sized) or (type(x) in (int, float, str) and not valued)
        return (type(x), *(() if free else _value(x)))
    if x.layout != torch.strided:
        lies: Hashable = x.layout
    else:
        lies = x.stride() if sized else x.is_contiguous()
    return tuple(x.shape) if sized else x.dim(), lies, x.dtype, x.device, x.requires_grad


def call_key(leaves: list[Any], spec: Any, sized: bool = True, valued: bool = True) -> Hashable:
    """Calls of a pure program with equal keys run the same graph; if not ``sized``, perhaps at other sizes, and if not
    ``valued``, perhaps with other numbers and texts. The memory of any call depends on modes and settings of torch.
    """
    mode = current_mode()
    cached = bool(mode.autocast) and torch.is_autocast_cache_enabled()  # whether a weight used twice is cast once
    return spec, tuple(_described(x, sized, valued) for x in leaves), (mode, cached, settings())
