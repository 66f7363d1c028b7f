"""Torch's rules for sizes, for a few operations in their usual form: those in Python take a tenth of a millisecond."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_META = torch.device("meta")


class QuickRules(TorchDispatchMode):
    """Results of operations on tensors without data, as torch makes them. Torch's own rules decide all other cases."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see rkgb.trace.operators.WritesSeen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = None if kwargs else _RULES.get(func)
        result = None if rule is None else rule(*args)
        return func(*args, **(kwargs or {})) if result is None else result


def _is_single(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_meta and t.dtype == torch.float32


def _is_usual(t: Any) -> bool:
    """Whether ``t`` is in single precision, and lies in order without gaps."""
    return _is_single(t) and _is_dense(t)


def _is_dense(t: torch.Tensor) -> bool:
    return t.dim() > 0 and t.numel() > 0 and t.is_contiguous()


def _made(shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=_META)


def _elementwise(x: Any, other: Any = None, *numbers: Any) -> torch.Tensor | None:
    """As large as ``x``. ``other``: a number, a tensor that is no larger, a setting, or nothing."""
    if not _is_single(x):
        return None
    if other is None or isinstance(other, str):
        return _made(x.shape) if _is_dense(x) else _as_it_lies(x)
    if not isinstance(other, torch.Tensor):
        return _as_it_lies(x) if isinstance(other, (int, float)) else None
    if not other.dim():
        return _as_it_lies(x) if other.dtype in (torch.float64, torch.float32) else None
    return _broadcast(x, other)


def _broadcast(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    if not (_is_dense(x) and _is_usual(other)) or other.dim() > x.dim():
        return None
    if other.shape == x.shape:
        return _made(x.shape)
    if 1 in x.shape:  # its stride there says nothing, and may decide
        return None
    sizes = zip(other.shape, x.shape[x.dim() - other.dim() :], strict=True)
    return _made(x.shape) if all(size in (1, most) for size, most in sizes) else None


def _as_it_lies(x: torch.Tensor) -> torch.Tensor | None:
    """A result that lies as ``x``, which has no gaps."""
    made = torch.empty_like(x)
    return made if made.dim() and made.numel() and made.stride() == x.stride() else None


def _layer_norm(x: Any, shape: Any, weight: Any, bias: Any, *_: Any) -> tuple[torch.Tensor, ...] | None:
    if not _is_usual(x) or not all(p is None or _is_usual(p) for p in (weight, bias)):
        return None
    rows = [*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)]
    return _made(x.shape), _made(rows), _made(rows)


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *_: Any
) -> tuple[torch.Tensor, ...] | None:
    if not training or not _is_usual(x) or not all(p is None or _is_usual(p) for p in (weight, bias, mean, variance)):
        return None
    return _made(x.shape), _made(x.shape[1:2]), _made(x.shape[1:2])


def _product(a: Any, b: Any) -> torch.Tensor | None:
    usual = all(isinstance(t, torch.Tensor) and t.is_meta and t.dtype == torch.float32 for t in (a, b))
    return _made((a.shape[0], b.shape[1])) if usual and a.shape[1] == b.shape[0] else None


def _sum_and_product(bias: Any, a: Any, b: Any) -> torch.Tensor | None:
    return _product(a, b) if _is_usual(bias) and bias.shape == b.shape[1:] else None


def _products(a: Any, b: Any) -> torch.Tensor | None:
    usual = all(isinstance(t, torch.Tensor) and t.is_meta and t.dtype == torch.float32 for t in (a, b))
    fits = usual and a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1]
    return _made((a.shape[0], a.shape[1], b.shape[2])) if fits else None


def _softmax(x: Any, _: int, other: Any = None) -> torch.Tensor | None:
    """``other``: whether it is of a half precision, or the dtype of the result."""
    return _made(x.shape) if _is_usual(x) and not other else None


def _mean(x: Any, dims: Sequence[int] | None, keeps: bool = False) -> torch.Tensor | None:
    if not (_is_usual(x) and dims):
        return None
    over = {d % x.dim() for d in dims}
    sizes = [1 if d in over else size for d, size in enumerate(x.shape) if keeps or d not in over]
    return _made(sizes) if len(over) == len(dims) else None


def _joined(tensors: Sequence[Any], dim: int = 0) -> torch.Tensor | None:
    first, *others = tensors
    if not all(map(_is_usual, tensors)) or any(t.dim() != first.dim() for t in others):
        return None
    sizes = [list(t.shape) for t in tensors]
    along = sum(size.pop(dim) for size in sizes)
    if any(size != sizes[0] for size in sizes):
        return None
    sizes[0].insert(dim % first.dim(), along)
    return _made(sizes[0])


def _in_place(x: Any, number: Any = None) -> torch.Tensor | None:
    return x if _is_usual(x) and isinstance(number, (int, float)) else None


_ATEN = torch.ops.aten
_ALL = "relu gelu silu tanh sigmoid exp neg rsqrt".split()
_BY_TWO = "add sub mul div".split()
_RULES: dict[Any, Callable[..., Any]] = {
    **{getattr(_ATEN, name).Tensor: _elementwise for name in _BY_TWO},
    **{getattr(_ATEN, name).Scalar: _elementwise for name in _BY_TWO},
    **{getattr(_ATEN, f"{name}_").Scalar: _in_place for name in _BY_TWO},
    _ATEN.bernoulli_.float: _in_place,
    **{getattr(_ATEN, name).default: _elementwise for name in _ALL},
    _ATEN.pow.Tensor_Scalar: _elementwise,
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN.native_batch_norm.default: _batch_norm,
    **{getattr(_ATEN, name).default: _softmax for name in ("_softmax", "_safe_softmax", "_log_softmax")},
    _ATEN.mean.dim: _mean,
    _ATEN.cat.default: _joined,
    _ATEN.bmm.default: _products,
    _ATEN.mm.default: _product,
    _ATEN.addmm.default: _sum_and_product,
}
