"""Signatures: that of a module's forward, on what stands in its place, and calls that do not fit those of ours."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, ParamSpec, TypeVar

from rockmate.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")


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


def called_right(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, which raises ``InputError`` where it is called with other arguments than it has."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        check_arguments(function, *args, **kwargs)
        return function(*args, **kwargs)

    return called


def check_arguments(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Raise ``InputError``, which says how ``function`` is called, where these are other arguments than it has."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        named = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
        name = function.__qualname__.removesuffix(".__init__")
        how = signature.replace(parameters=named, return_annotation=signature.empty)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        others = [] if takes_any else sorted(kwargs.keys() - signature.parameters.keys())
        problem = f"there is no argument {', '.join(map(repr, others))}" if others else str(error)
        raise InputError(f"{name}: {problem}. Call it as {name}{how}") from None
