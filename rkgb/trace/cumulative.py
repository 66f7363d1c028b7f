"""Batch norm with ``momentum=None`` as one operation.

Its running statistics are averages over all batches. Their factor is one over a counter, which torch reads in Python
at every step, so that as a constant of a plan it would be wrong at the next step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

_LIBRARY = torch.library.Library("rkgb", "DEF")
_LIBRARY.define(
    "cumulative_batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!) mean, Tensor(b!) var, Tensor count, "
    "float eps) -> Tensor"
)


def _run(x: Any, weight: Any, bias: Any, mean: Any, var: Any, count: Any, eps: float) -> torch.Tensor:
    return torch.nn.functional.batch_norm(x, mean, var, weight, bias, True, 1.0 / float(count), eps)


_LIBRARY.impl("cumulative_batch_norm", _run, "CompositeImplicitAutograd")


@contextlib.contextmanager
def cumulative_as_one() -> Iterator[None]:
    """A context in which such a batch norm is one operation, which reads the counter itself."""
    original = _BatchNorm.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.momentum is not None or not self.training or self.num_batches_tracked is None:
            return original(self, x)
        self._check_input_dim(x)
        self.num_batches_tracked.add_(1)
        if self.running_mean is None or self.running_var is None:  # which the counter is for
            return torch.nn.functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        result: torch.Tensor = torch.ops.rkgb.cumulative_batch_norm(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.num_batches_tracked, self.eps
        )
        return result

    _BatchNorm.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _BatchNorm.forward = original  # type: ignore[method-assign]
