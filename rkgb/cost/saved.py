"""The tensors that autograd saves while a piece of a model runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.graph import saved_tensors_hooks


def each_saved(note: Callable[[torch.Tensor], None]) -> saved_tensors_hooks:
    """A context in which ``note`` is called with each tensor that autograd saves. The tensor is saved as without it."""

    def pack(t: torch.Tensor) -> torch.Tensor:
        note(t)
        return t

    return saved_tensors_hooks(pack, lambda t: t)
