"""Around a forward whose operations a tape notes."""

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
from rockmate.follow.exposed import telling_of_memory
from rockmate.follow.tape import Tape


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
