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


def attention_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **named: Any,
) -> torch.Tensor:
    """``scaled_dot_product_attention`` of tensors without data by the kernel that a CPU chooses for them."""
    own = None if attn_mask is None else _like(attn_mask)
    kernel = torch._fused_sdp_choice(_like(q), _like(k), _like(v), own, dropout_p, is_causal, **named)
    aten = torch.ops.aten
    result: torch.Tensor
    if kernel != torch.nn.attention.SDPBackend.FLASH_ATTENTION.value:
        result = aten._scaled_dot_product_attention_math(q, k, v, attn_mask, dropout_p, is_causal, **named)[0]
        return result
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=q.dtype)  # what it is made of
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    result = flash(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=named.get("scale"))[0]
    return result


def _like(t: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU of these sizes, with memory that is never touched."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).requires_grad_(t.requires_grad)
