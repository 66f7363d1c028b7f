"""A step for which the budget does not bind: what is remembered of it, so that its frontier can be asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from rkgb.settings import settings
from rkgb.trace.capture import current_mode
from rkgb.trace.patches import TRACING
from rkgb.trace.written import has_memory
from rockmate.calls.captured import Captured
from rockmate.calls.surroundings import running_in
from rockmate.calls.terms import Terms
from rockmate.errors import InputError
from rockmate.planning.planner import Planner
from rockmate.progress import Progress, Report
from solvers import Frontier
from solvers.interrupts import Heeded


class CalledGraph(Protocol):
    """What is asked of the graph that ran: see ``rockmate.calls.captured_calls.CapturedCalls``."""

    module: Captured
    terms: Terms

    def planner_of(self, inputs: Sequence[Any], report: Report) -> Planner:
        """A planner for the call with ``inputs``."""


class FreeStep:
    """A call that ran without a plan, and the modes and settings in which it did.

    No tensor of the caller's is held: parameters and buffers are the model's, when they are asked for. Inputs are made
    anew in the same form: with random numbers, or with the values that they had where these may be indices.
    """

    def __init__(self, calls: CalledGraph, inputs: Sequence[Any], missing: frozenset[str]) -> None:
        """``missing``: parameters whose gradients the step makes."""
        self._calls, self._missing, self._planner = calls, missing, None
        self._mode, self._settings = current_mode(), settings()
        given = set(calls.module.given)
        self._inputs = [_again(x) if k in given else _still(x) for k, x in enumerate(inputs)]

    _planner: Planner | None

    def frontier(self) -> Frontier:
        """Time against memory for such steps, which are traced and measured when it is first asked for.

        Raises ``InputError`` where an input cannot be made again, or the model has other parameters now.
        """
        with TRACING, Heeded(), Progress(self._calls.terms.progress) as report, running_in(self._mode, self._settings):
            if self._planner is None:
                inputs = [make() for make in self._inputs]
                with self._without_gradients(inputs):
                    self._planner = self._calls.planner_of(inputs, report)
            self._planner.report = report
            return self._planner.frontier()

    @contextmanager
    def _without_gradients(self, inputs: Sequence[Any]) -> Iterator[None]:
        """As when the step began: the gradients that it makes are not there."""
        made = [inputs[k] for name, k in self._calls.module.trained if name in self._missing]
        gradients = [p.grad for p in made]
        try:
            for p in made:
                p.grad = None
            yield
        finally:
            for p, gradient in zip(made, gradients, strict=True):
                p.grad = gradient


def _still(x: Any) -> Callable[[], Any]:
    """What gives ``x``, of the model's own, as long as it is there."""
    if not isinstance(x, torch.Tensor):
        return lambda: x
    found = weakref.ref(x)

    def get() -> torch.Tensor:
        tensor = found()
        if tensor is None:
            raise InputError(
                "the model has other parameters or buffers than in its last step: call it once more, then ask for the "
                "frontier"
            )
        return tensor

    return get


def _again(x: Any) -> Callable[[], Any]:
    """What makes something like the input ``x``."""
    if not isinstance(x, torch.Tensor):
        return lambda: x
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or not has_memory(x):
        return _refused
    shape, strides, dtype, device, wanted = x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    exact = None if x.dim() and (dtype.is_floating_point or dtype.is_complex) else x.detach().to("cpu", copy=True)
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if x.numel() else 0

    def make() -> torch.Tensor:
        if exact is not None and not wanted:
            return exact.to(device, copy=True)
        numbers = torch.rand(size, generator=torch.Generator().manual_seed(0))
        return numbers.to(device, dtype).as_strided(shape, strides).requires_grad_(wanted)

    return make


def _refused() -> Any:
    raise InputError(
        "an input of the last step is no plain tensor, and is not there any more: use rockmate.frontier(model, sample)"
    )
