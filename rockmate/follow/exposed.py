"""Memory that a followed forward hands to other libraries: NumPy writes without an operation of torch's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_METHODS = ("numpy", "__dlpack__")
_LOCK = threading.Lock()
_told = threading.local()
_entered: list[None] = []


@contextlib.contextmanager
def telling_of_exposed(expose: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """``expose`` is called with tensors of this thread whose memory others get. Several threads may enter.

    The methods are replaced for that time only: TorchDynamo, which captures nothing meanwhile, takes replaced ones for
    the user's code.
    """
    with _LOCK:
        if not _entered:
            for name in _METHODS:
                setattr(torch.Tensor, name, _telling(getattr(torch.Tensor, name), name in vars(torch.Tensor)))
        _entered.append(None)
    before, _told.expose = getattr(_told, "expose", None), expose
    try:
        yield
    finally:
        _told.expose = before
        with _LOCK:
            _entered.pop()
            if not _entered:
                for name in _METHODS:
                    _put_back(name)


def is_followed() -> bool:
    """Whether a forward is followed in this thread."""
    return getattr(_told, "expose", None) is not None


def _telling(original: Callable[..., Any], own: bool) -> Callable[..., Any]:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        expose = getattr(_told, "expose", None)
        if expose is not None:
            expose(self)
        return original(self, *args, **kwargs)

    method.replaces = (original, own)  # type: ignore[attr-defined]
    return method


def _put_back(name: str) -> None:
    original, own = getattr(vars(torch.Tensor).get(name), "replaces", (None, True))
    if original is not None and own:
        setattr(torch.Tensor, name, original)
    elif original is not None:
        delattr(torch.Tensor, name)
