"""Changes to PyTorch and to libraries that hold only while a module is traced."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.eager_transforms
import torch.nn.utils.parametrize
import torch.nn.utils.stateless
import torch.utils.checkpoint

from rkgb.collector import COLLECTING_RARELY
from rkgb.errors import UnsupportedError
from rkgb.trace.lines import user_line


class _Tracing:
    """A lock that its thread may take again, and within which the garbage collector runs rarely."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()
        COLLECTING_RARELY.__enter__()

    def __exit__(self, *_: object) -> None:
        COLLECTING_RARELY.__exit__()
        self._lock.release()


TRACING = _Tracing()
"""Held while a module is traced or measured, since both replace parts of torch for that time, and while TorchDynamo
captures a call, which must not meet these.
"""

_tracing = threading.local()


def is_traced() -> bool:
    """Whether this thread runs a module within ``traceable``."""
    return getattr(_tracing, "here", False)


@contextlib.contextmanager
def traceable() -> Iterator[None]:
    """A context in which the tracer records all that a module does in eager mode. One thread at a time."""
    with TRACING, contextlib.ExitStack() as changes:
        changes.enter_context(patch.object(_tracing, "here", True, create=True))
        for owner, name, new in _changes():
            changes.enter_context(patch.object(owner, name, new))
        yield


def _changes() -> Iterator[tuple[Any, str, Any]]:
    """What is another one meanwhile: its owner, its name there, and what it is."""
    # Reentrant checkpoints run their function directly, since the plan decides what is recomputed.
    yield torch.utils.checkpoint.CheckpointFunction, "apply", staticmethod(lambda run, preserve, *args: run(*args))
    # Scripted functions run as their Python source, to be recorded; scripted modules have none.
    yield torch.jit.ScriptFunction, "__call__", _run_source
    yield torch.jit.ScriptModule, "__call__", _refuse_scripted
    # ``functional_call`` and ``parametrize.cached`` refuse to run under the tracer.
    jit, c = _Other(torch.jit, is_tracing=lambda: False), _Other(torch._C, _get_tracing_state=lambda: None)
    for module in (torch.nn.utils.stateless, torch.nn.utils.parametrize):
        yield module, "torch", _Other(torch, jit=jit, _C=c)
    yield torch, "_check_with", partial(_check_with, torch._check_with)
    # Derivatives by torch.func: the first call of reverse mode, and of forward mode.
    for owner, name in (
        (torch.autograd.graph, "disable_saved_tensors_hooks"),
        (torch._functorch.eager_transforms, "jvp_increment_nesting"),
    ):
        yield owner, name, partial(_refuse_derivatives, getattr(owner, name))
    # transformers and torchvision take other paths under a tracer.
    for library, name in (("transformers.utils.import_utils", "is_jit_tracing"), ("torchvision", "_is_tracing")):
        if hasattr(sys.modules.get(library), name):
            yield sys.modules[library], name, lambda: False


_SCRIPT_CALL: Any = torch.jit.ScriptFunction.__call__


def _run_source(self: Any, *args: Any, **kwargs: Any) -> Any:
    python = getattr(self, "_torchdynamo_inline", None)
    return _SCRIPT_CALL(self, *args, **kwargs) if python is None else python(*args, **kwargs)


def _refuse_scripted(self: Any, *_: Any, **__: Any) -> Any:
    raise UnsupportedError(
        f"a scripted module ({self.original_name}) has no operations that a graph could show: give the Python module, "
        "unscripted, instead"
    )


class _Other:
    """Takes the place of a module in those that ask whether they are traced: as ``original``, with these answers."""

    def __init__(self, original: Any, **answers: Any) -> None:
        self._original = original
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _check_with(original: Any, error: type[Exception], condition: Any, message: Any) -> Any:
    """``torch._check`` takes a tensor as its condition: under the tracer, sizes in torch's functions are tensors."""
    return original(error, bool(condition) if is_traced() else condition, message)


def _refuse_derivatives(original: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_traced():  # another thread's
        return original(*args, **kwargs)
    raise UnsupportedError(
        f"the call at {user_line()} computes derivatives inside forward (torch.func), which no plan can foresee. Plan "
        "the submodules that do not, instead of the whole module."
    )
