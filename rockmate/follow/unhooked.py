"""Parts of a followed forward that switch hooks of saved tensors off, as transforms of torch.func do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def giving_way(pack: Callable[..., Any], unpack: Callable[..., Any]) -> Iterator[None]:
    """The hooks ``pack`` and ``unpack`` leave while this thread's code switches hooks off, which torch refuses where
    there are some. What is saved meanwhile stays, as in eager mode.
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
