"""What a followed forward does beside operations of torch's: it hands memory to other libraries, which may write into
it, and gives tensors other memory (``t.data = …``)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

_METHODS = ("numpy", "__dlpack__")
_DATA: Any = torch._C.TensorBase.data
_LOCK = threading.Lock()
_told = threading.local()
_entered: list[None] = []


class Told(Protocol):
    """Who is told of it."""

    def expose(self, t: torch.Tensor) -> None:
        """Another library gets the memory of ``t``."""

    def give(self, t: torch.Tensor) -> None:
        """``t`` is about to get other memory."""


@contextlib.contextmanager
def telling_of_memory(told: Told) -> Iterator[None]:
    """``told`` hears of this thread's tensors. Several threads may enter.

    The methods are replaced for that time only: TorchDynamo, which captures nothing meanwhile, takes replaced ones for
    the user's code.
    """
    with _LOCK:
        if not _entered:
            for name in _METHODS:
                setattr(torch.Tensor, name, _telling(getattr(torch.Tensor, name), name in vars(torch.Tensor)))
            torch.Tensor.data = property(_DATA.__get__, _give)  # type: ignore[assignment]
        _entered.append(None)
    before, _told.told = getattr(_told, "told", None), told
    try:
        yield
    finally:
        _told.told = before
        with _LOCK:
            _entered.pop()
            if not _entered:
                for name in _METHODS:
                    _put_back(name)
                del torch.Tensor.data


def give_memory(t: torch.Tensor, memory: torch.Tensor) -> None:
    """``t`` gets other memory, and nobody is told."""
    _DATA.__set__(t, memory)


def is_followed() -> bool:
    """Whether a forward is followed in this thread."""
    return getattr(_told, "told", None) is not None


def _give(self: torch.Tensor, memory: torch.Tensor) -> None:
    told = getattr(_told, "told", None)
    if told is not None:
        told.give(self)
    give_memory(self, memory)


def _telling(original: Callable[..., Any], own: bool) -> Callable[..., Any]:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        told = getattr(_told, "told", None)
        if told is not None:
            told.expose(self)
        return original(self, *args, **kwargs)

    method.replaces = (original, own)  # type: ignore[attr-defined]
    return method


def _put_back(name: str) -> None:
    original, own = getattr(vars(torch.Tensor).get(name), "replaces", (None, True))
    if original is not None and own:
        setattr(torch.Tensor, name, original)
    elif original is not None:
        delattr(torch.Tensor, name)
