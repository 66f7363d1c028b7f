"""Interception of backwards, where Python hands them to autograd's engine.

``torch.compiler`` replaces the same function for its tracers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Intercept = Callable[..., Any]
"""Is called with what runs the backward, and its arguments (the ends first); returns what that returns."""

_NAME = "_engine_run_backward"


class _Engine:
    """Stands in the place of ``torch.autograd._engine_run_backward`` while somebody intercepts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.active: tuple[Intercept, ...] = ()
        self.original: Callable[..., Any] | None = None
        self.placed: Callable[..., Any] | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward through all that intercept; who came last is the outermost."""
        run = self.original
        assert run is not None
        for by in self.active:
            run = partial(by, run)
        return run(*args, **kwargs)


_ENGINE = _Engine()


def can_intercept() -> bool:
    """Whether torch has the function that is replaced."""
    return hasattr(torch.autograd, _NAME)


def intercept(by: Intercept) -> None:
    """Backwards go through ``by`` until ``release``.

    TorchDynamo captures nothing in them meanwhile: where a backward runs in code that it captures, it would take the
    hooks of this package for code of the model's, and break them up.
    """
    with _ENGINE.lock:
        if not _ENGINE.active:
            _ENGINE.original = getattr(torch.autograd, _NAME)
            known = "torch._dynamo" in sys.modules
            _ENGINE.placed = torch._dynamo.disable(_ENGINE.run) if known else _ENGINE.run
            setattr(torch.autograd, _NAME, _ENGINE.placed)
        _ENGINE.active = (*_ENGINE.active, by)


def release(by: Intercept) -> None:
    """Backwards do not go through ``by`` any more."""
    with _ENGINE.lock:
        before, _ENGINE.active = _ENGINE.active, tuple(x for x in _ENGINE.active if x != by)
        if before and not _ENGINE.active and getattr(torch.autograd, _NAME) is _ENGINE.placed:
            setattr(torch.autograd, _NAME, _ENGINE.original)
