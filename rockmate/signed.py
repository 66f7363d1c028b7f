"""The signature of a module's forward, on what stands in its place."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any


def signed(function: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the signature of the bound method ``forward``, which trainers ask for."""

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    # What ``inspect.signature`` follows; an attribute ``__signature__`` would go on to whatever wraps the bound method.
    called.__wrapped__ = forward.__func__ if isinstance(forward, MethodType) else _with_self(forward)  # type: ignore[attr-defined]
    called.__doc__ = forward.__doc__
    return called


def _with_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose signature is that of ``function`` behind ``self``."""

    def described(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    with contextlib.suppress(ValueError, TypeError):  # functions in C have none
        signature = inspect.signature(function)
        parameters = [first, *signature.parameters.values()]
        described.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return described
