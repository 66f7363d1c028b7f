"""The kernels that ``scaled_dot_product_attention`` may use, as ``torch.nn.attention.sdpa_kernel`` sets them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_C: Any = torch._C
_KINDS = ("flash", "mem_efficient", "math", "cudnn", "overrideable")
_READ = [getattr(_C, f"_get_{kind}_sdp_enabled") for kind in _KINDS]
_SET = [getattr(_C, f"_set_sdp_use_{kind}") for kind in _KINDS]


def attention_kernels() -> tuple[int, ...]:
    """Whether each kind is on (0 or 1), then their order of preference."""
    return (*(int(read()) for read in _READ), *_C._get_sdp_priority_order())


USUAL_ATTENTION = attention_kernels()


@contextlib.contextmanager
def attention_by(kernels: tuple[int, ...]) -> Iterator[None]:
    """A context in which attention uses these ``attention_kernels``; (): those at the import of this file."""
    before = attention_kernels()
    _choose(kernels or USUAL_ATTENTION)
    try:
        yield
    finally:
        _choose(before)


def _choose(kernels: tuple[int, ...]) -> None:
    for set_use, on in zip(_SET, kernels, strict=False):
        set_use(bool(on))
    _C._set_sdp_priority_order(list(kernels[len(_SET) :]))
