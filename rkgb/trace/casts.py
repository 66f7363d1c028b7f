"""What autocast casts, made before operations: where the tracer does not see it, and on the meta device, where autocast
does nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from rkgb.nodes import Mode
from rkgb.trace.patches import is_traced
from rkgb.trees import map_tensors, tensors_in

_C: Any = torch._C
_CLEAR: Any = torch.clear_autocast_cache

RECURRENT = frozenset({torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu})
NAMES_OF_RECURRENT = frozenset(function.__name__ for function in RECURRENT)

_LOWER = frozenset(
    "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d linear matmul mm bmm addmm "
    "addbmm baddbmm mv addmv addr linalg_vecdot linalg_multi_dot chain_matmul prelu "
    "scaled_dot_product_attention".split()
)
"""Of the operators that autocast knows, those that compute in its type (``lower_precision_fp`` in torch's source)."""

_WIDEST = frozenset("cat stack index_copy atan2 addcdiv addcmul bilinear cross dot vdot tensordot scatter_add".split())
"""Those that compute in the widest type that they are given (``promote``)."""

_OWN = frozenset("softmax log_softmax cumprod cumsum sum norm linalg_vector_norm linalg_matrix_norm index_put".split())
"""Those that autocast calls otherwise: with a type, or for some arguments. On the meta device they are left."""


class Casts:
    """Makes the casts of one trace. ``kind``: of device, which the meta device stands for.

    Weights are cast once until ``clear``, as by autocast's cache in eager mode. Those of recurrent operations autocast
    casts inside the operation, where the tracer does not see it. A run again has no such cache: the operation would
    cast its weights in each step, save each copy, and add up gradients that are cast already.
    """

    def __init__(self, kind: str | None) -> None:
        self.kind = kind
        self._made: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}  # by ``id``; it is held

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> Any:
        """Positional arguments and keywords of a call, with casts."""
        if not mode.autocast:
            return args, kwargs
        if func in RECURRENT:
            return self._of_weights(args, mode), kwargs
        lower = dict(mode.autocast).get(self.kind or "")
        name = getattr(func, "__name__", "").strip("_")
        if lower is None or name in _OWN or not _is_known(name, str(self.kind)):
            return args, kwargs
        single = any(t.dtype == torch.float32 for t in tensors_in((args, kwargs)))
        wide = name not in _LOWER and (name not in _WIDEST or single)
        dtype = torch.float32 if wide else lower

        def cast(t: torch.Tensor) -> torch.Tensor:
            eligible = t.is_floating_point() and t.dtype not in (torch.float64, dtype)
            return self._cast(t, dtype) if eligible else t

        named = {k: map_tensors(kwargs[k], cast) for k in reversed(kwargs)}  # the last argument first, as in C++
        return tuple([map_tensors(a, cast) for a in reversed(args)][::-1]), named

    def clear(self) -> None:
        """In the place of ``torch.clear_autocast_cache``, which the outermost ``autocast`` calls when it ends."""
        if is_traced():  # else another thread's
            self._made.clear()
        _CLEAR()

    def _of_weights(self, args: tuple[Any, ...], mode: Mode) -> tuple[Any, ...]:
        """``args`` of a call of one of ``RECURRENT``, its weights cast where autocast would keep what it casts."""
        at = max(k for k, a in enumerate(args) if isinstance(a, (list, tuple)))  # the states of an LSTM come before
        lower = dict(mode.autocast)
        weights = [
            self._cast(w, lower[kind]) if (kind := self.kind or w.device.type) in lower and self._is_kept(w) else w
            for w in args[at]
        ]
        return (*args[:at], weights, *args[at + 1 :])

    @staticmethod
    def _is_kept(t: torch.Tensor) -> bool:
        """Whether autocast keeps what it casts, as ``cached_cast`` in torch's source."""
        on = torch.is_grad_enabled() and torch.is_autocast_cache_enabled()
        return on and t.dtype == torch.float32 and t.requires_grad and t.is_leaf and not t._is_view()

    def _cast(self, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if dtype == torch.float32 or not self._is_kept(t):
            return t.to(dtype)
        if (id(t), dtype) not in self._made:
            self._made[id(t), dtype] = t, t.to(dtype)
        return self._made[id(t), dtype][1]


@cache
def _is_known(name: str, kind: str) -> bool:
    """Whether autocast of this kind of device does something about operators of this name."""
    schemas = _C._jit_get_schemas_for_operator(f"aten::{name}")
    overloads = (f"aten::{name}.{s.overload_name}".rstrip(".") for s in schemas)
    known = filter(_C._dispatch_has_kernel, overloads)  # others are of TorchScript alone
    return any(_C._dispatch_has_kernel_for_dispatch_key(o, f"Autocast{kind.upper()}") for o in known)
