"""PyTorch's tracer: its scopes, what it knows of tensors, and the names of what it is called for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch.overrides import resolve_name

_C: Any = torch._C

# Operations that return what they are given, if it is of the right kind.
_SAME = frozenset("aten::" + name for name in "to lift_fresh resolve_conj resolve_neg detach alias".split())


def uses(value: Any) -> int:
    return len(list(value.uses()))


def is_constant(value: Any) -> bool:
    """Whether a value of the trace is a tensor that came from nowhere, as torch's constructors and NumPy make them."""
    constant: bool = _origin(value).kind() == "prim::Constant"
    return constant


def constant_of(value: Any) -> torch.Tensor:
    """The tensor that such a value is."""
    made: torch.Tensor = _origin(value).t("value").clone()
    return made


def _origin(value: Any) -> Any:
    while value.node().kind() in _SAME:
        value = next(value.node().inputs())
    return value.node()


@functools.cache
def without_override(func: Any) -> Callable[..., Any] | None:
    """``func``, if it is a function in Python of torch's, without its own question whether a mode overrides it.

    So the recorder sees each call in it: those under ``no_grad``, and what Python reads from tensors.
    """
    if not isinstance(func, FunctionType) or func.__module__ not in ("torch.nn.functional", "torch.functional"):
        return None
    asks = {name: lambda *_: False for name in func.__code__.co_names if name.startswith("has_torch_function")}
    if not asks or "_get_tracing_state" in func.__code__.co_names:  # it does otherwise where sizes are traced
        return None
    made = FunctionType(func.__code__, {**func.__globals__, **asks}, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def outside_vmap(t: torch.Tensor) -> torch.Tensor:
    """The tensor outside of ``vmap`` to which a tensor inside belongs."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


@functools.lru_cache(4096)
def call_name(func: Any) -> str:
    return ".".join((resolve_name(func) or getattr(func, "__name__", str(func))).split(".")[-2:])


@contextlib.contextmanager
def scoped(tracing: Any, name: str) -> Iterator[None]:
    """A context in which what the tracer records is in the scope ``name``."""
    tracing.push_scope(name)
    try:
        yield
    finally:
        tracing.pop_scope()


@contextlib.contextmanager
def untraced(tracing: Any) -> Iterator[None]:
    """A context in which the tracer records nothing."""
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]
