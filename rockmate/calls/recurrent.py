"""Recurrent layers in captures: TorchDynamo learns the sizes of what they make without a run of each time step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from rkgb.trace import recurrent
from rockmate.calls.unguarded import is_captured

RECURRENT = tuple(function.__name__ for function in recurrent.RECURRENT)
"""Names of the operations."""


def know_sizes_of_recurrent_layers() -> None:
    """From now on, where a call of ours is captured, recurrent operations on tensors without memory are one operation.

    torch's decompositions make one for each step in time. That takes seconds, and a capture serves one length only.
    """
    for name in RECURRENT:
        operator = getattr(torch.ops.aten, name).input
        kernels: dict[Any, Callable[..., Any]] = operator.py_kernels
        for key, kernel in kernels.items():
            if not isinstance(kernel, partial):
                kernels[key] = partial(_of_one_step, kernel)
        operator._dispatch_cache.clear()


def _of_one_step(kernel: Callable[..., Any], input: Any, hx: Any, *others: Any) -> Any:
    """What ``kernel`` makes of the first step, with all steps in its place. ``others``: the last is batch_first."""
    if not (is_captured() and is_fake(input)):
        return kernel(input, hx, *others)
    along = 1 if others[-1] else 0
    output, *states = kernel(input.narrow(along, 0, 1), hx, *others)
    steps = output.transpose(0, along).expand(input.shape[along], -1, -1).clone()
    return steps.transpose(0, along), *states
