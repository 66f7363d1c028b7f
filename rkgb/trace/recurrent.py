"""Weights of recurrent layers under autocast, which casts inside the operation, where the tracer does not see it."""

from __future__ import annotations

from typing import Any

import torch

from rkgb.nodes import Mode

RECURRENT = frozenset({torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu})


class CastWeights:
    """Casts weights of recurrent operations before these, once for a trace, as autocast's cache does in eager mode.

    A run again has no such cache: the operation would cast its weights in each step, save each copy, and add up
    gradients that are cast already.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}  # by ``id``; it is held

    def __call__(self, args: tuple[Any, ...], mode: Mode) -> tuple[Any, ...]:
        """``args`` of a call of one of ``RECURRENT``, its weights cast where autocast would keep what it casts."""
        if not (mode.autocast and mode.grad and torch.is_autocast_cache_enabled()):
            return args
        at = max(k for k, a in enumerate(args) if isinstance(a, (list, tuple)))  # the states of an LSTM come before
        weights = [self._cast(w, dict(mode.autocast).get(w.device.type)) for w in args[at]]
        return (*args[:at], weights, *args[at + 1 :])

    def _cast(self, w: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """As ``cached_cast`` in torch's source."""
        if dtype is None or w.dtype != torch.float32 or not w.requires_grad or not w.is_leaf or w._is_view():
            return w
        if (id(w), dtype) not in self._made:
            self._made[id(w), dtype] = w, w.to(dtype)
        return self._made[id(w), dtype][1]
