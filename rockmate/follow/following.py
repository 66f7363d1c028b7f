"""Around a forward whose operations a tape notes: what it does beside operations of torch's is told, too. It may hand
memory to other libraries, which may write into it, and give tensors other memory (``t.data = …``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from rkgb.sample import Call
from rkgb.storages import has_memory
from rockmate.calls.surroundings import modes_again
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


@contextlib.contextmanager
def following(tape: Tape, modes: list[Any]) -> Iterator[None]:
    """What runs within is noted on ``tape``, which is closed when it is over. ``modes``: the caller's, which are in
    force within.
    """
    saved, way = saved_tensors_hooks(tape.pack, tape.unpack), giving_way(tape.pack, tape.unpack)
    with modes_again(modes), telling_of_memory(tape), saved, way, tape:
        yield
    tape.close()


def lasting_of(model: torch.nn.Module, call: Call) -> frozenset[int] | None:
    """Storages that are there in forward and backward, where ``fully_shard`` gathers and frees others; None where all
    are.
    """
    if not any(c.__name__ == "FSDPModule" for m in model.modules() for c in type(m).__mro__):
        return None
    tensors = (t for source in (model.buffers(), call.tensors) for t in source if has_memory(t))
    return frozenset(t.untyped_storage()._cdata for t in tensors)


@contextlib.contextmanager
def giving_way(pack: Callable[..., Any], unpack: Callable[..., Any]) -> Iterator[None]:
    """The hooks ``pack`` and ``unpack`` leave while this thread's code switches hooks of saved tensors off, as
    transforms of torch.func do, which torch refuses where there are some. What is saved meanwhile stays, as in eager
    mode.
    """
    autograd: Any = torch._C._autograd
    disable, enable = autograd._saved_tensors_hooks_disable, autograd._saved_tensors_hooks_enable
    here, left = threading.get_ident(), False

    def off(*args: Any) -> Any:
        nonlocal left
        top = autograd._top_saved_tensors_default_hooks(True) if threading.get_ident() == here else None
        if top is not None and top[0] == pack:
            autograd._pop_saved_tensors_default_hooks()
            left = True
        return disable(*args)

    def on() -> Any:
        nonlocal left
        result = enable()
        if left and threading.get_ident() == here:
            autograd._push_saved_tensors_default_hooks(pack, unpack)
            left = False
        return result

    autograd._saved_tensors_hooks_disable, autograd._saved_tensors_hooks_enable = off, on
    try:
        yield
    finally:
        autograd._saved_tensors_hooks_disable, autograd._saved_tensors_hooks_enable = disable, enable
