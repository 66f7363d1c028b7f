"""A call that needed no plan: what is remembered of it, so that its frontier can be asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rkgb.sample import Call
from rkgb.settings import settings
from rkgb.storages import has_memory
from rkgb.trace.capture import current_mode
from rkgb.trees import unflatten
from rockmate.calls.surroundings import running_in
from rockmate.errors import InputError
from rockmate.planning.planner import lacks_gradient


class RememberedCall:
    """A call of ``model``, and the modes and settings in which it ran.

    No tensor of the caller's is held: inputs are made anew in the same form, with random numbers, or with the values
    that they had where these may be indices.
    """

    def __init__(self, model: torch.nn.Module, call: Call) -> None:
        self._mode, self._settings = current_mode(), settings()
        self._missing = {n for n, p in model.named_parameters() if lacks_gradient(p)}
        self._leaves, self._spec = [_again(leaf) for leaf in call.leaves], call.spec

    @contextmanager
    def again(self, model: torch.nn.Module) -> Iterator[Call]:
        """Such a call, as it was when it came: the gradients that its step makes are not there.

        Raises ``InputError`` where an input cannot be made again.
        """
        held = [(p, p.grad) for name, p in model.named_parameters() if name in self._missing]
        try:
            for p, _ in held:
                p.grad = None
            with running_in(self._mode, self._settings):
                yield Call(*unflatten([make() for make in self._leaves], self._spec))
        finally:
            for p, gradient in held:
                p.grad = gradient


def _again(x: Any) -> Callable[[], Any]:
    """What makes something like the input ``x``."""
    if not isinstance(x, torch.Tensor):
        return lambda: x
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or not has_memory(x) or x.is_quantized:
        return _refused
    shape, strides, dtype, device, wanted = x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if x.numel() else 0
    exact: bytes | None = None  # in Python's memory, which is none of the step's
    if not (wanted or dtype.is_complex or (x.dim() and dtype.is_floating_point)):
        exact = x.detach().as_strided((size,), (1,)).to("cpu").view(torch.uint8).numpy().tobytes()

    def make() -> torch.Tensor:
        if exact:
            return torch.frombuffer(bytearray(exact), dtype=dtype).to(device).as_strided(shape, strides)
        numbers = torch.rand(size, generator=torch.Generator().manual_seed(0))
        return numbers.to(device, dtype).as_strided(shape, strides).requires_grad_(wanted)

    return make


def _refused() -> Any:
    raise InputError(
        "an input of the last step is no plain tensor, and is not there any more: use rockmate.frontier(model, sample)"
    )
