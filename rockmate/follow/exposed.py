"""What a followed forward does beside operations of torch's: it hands memory to other libraries, which may write into
it, and gives tensors other memory (``t.data = …``)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rockmate.follow.tape import Tape

_METHODS = ("numpy", "__dlpack__")
_DATA: Any = torch._C.TensorBase.data
_LOCK = threading.Lock()
_entered: list[None] = []


class _Here(threading.local):
    told: Tape | None = None


_here = _Here()


@contextlib.contextmanager
def telling_of_memory(told: Tape) -> Iterator[None]:
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
    before, _here.told = _here.told, told
    try:
        yield
    finally:
        _here.told = before
        with _LOCK:
            _entered.pop()
            if not _entered:
                for name in _METHODS:
                    _put_back(name)
                del torch.Tensor.data


def is_followed() -> bool:
    """Whether a forward is followed in this thread."""
    return _here.told is not None


def _give(self: torch.Tensor, memory: torch.Tensor) -> None:
    if _here.told is not None:
        _here.told.give(self)
    _DATA.__set__(self, memory)


def _telling(original: Callable[..., Any], own: bool) -> Callable[..., Any]:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _here.told is not None:
            _here.told.expose(self)
        return original(self, *args, **kwargs)

    method.replaces = original if own else None  # type: ignore[attr-defined]
    return method


def _put_back(name: str) -> None:
    method: Any = vars(torch.Tensor).get(name)
    if not hasattr(method, "replaces"):  # others have replaced it since
        return
    if method.replaces is None:
        delattr(torch.Tensor, name)
    else:
        setattr(torch.Tensor, name, method.replaces)
