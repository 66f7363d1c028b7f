"""Changes to PyTorch and to libraries that hold only while a module is traced."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

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
"""Held while a module is traced or measured, since both replace parts of torch for that time."""

_tracing = threading.local()


def is_traced() -> bool:
    """Whether this thread runs a module within ``traceable``."""
    return getattr(_tracing, "depth", 0) > 0


@contextlib.contextmanager
def _in_this_thread() -> Iterator[None]:
    _tracing.depth = getattr(_tracing, "depth", 0) + 1
    try:
        yield
    finally:
        _tracing.depth -= 1


@contextlib.contextmanager
def traceable() -> Iterator[None]:
    """A context in which the tracer records all that a module does in eager mode. One thread at a time."""
    with (
        TRACING,
        _in_this_thread(),
        _plain_checkpoint(),
        _scripts_as_python(),
        _stateless_as_eager(),
        _sizes_checked(),
        _no_inner_gradients(),
        _libraries_as_eager(),
    ):
        yield


@contextlib.contextmanager
def _plain_checkpoint() -> Iterator[None]:
    """Reentrant checkpoints run their function directly, since the plan decides what is recomputed."""
    cls = torch.utils.checkpoint.CheckpointFunction
    cls.apply = staticmethod(lambda function, preserve, *args: function(*args))  # type: ignore[method-assign]
    try:
        yield
    finally:
        del cls.apply


@contextlib.contextmanager
def _scripts_as_python() -> Iterator[None]:
    """Scripted functions run as their Python source, to be recorded; scripted modules have none, and are refused."""
    function: Any = torch.jit.ScriptFunction
    module: Any = torch.jit.ScriptModule
    original = function.__call__

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"a scripted module ({self.original_name}) has no operations that a graph could show: give the Python "
            "module, unscripted, instead"
        )

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        python = getattr(self, "_torchdynamo_inline", None)
        return original(self, *args, **kwargs) if python is None else python(*args, **kwargs)

    function.__call__ = call
    module.__call__ = refuse
    try:
        yield
    finally:
        function.__call__ = original
        del module.__call__


class _Untraced:
    """Takes the place of ``torch`` in modules that ask whether they are traced; it answers no."""

    def __init__(self, original: Any, **answers: Any) -> None:
        self._original = original
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@contextlib.contextmanager
def _stateless_as_eager() -> Iterator[None]:
    """``functional_call`` and ``parametrize.cached`` run under the tracer, which they would otherwise refuse."""
    untraced = _Untraced(
        torch,
        jit=_Untraced(torch.jit, is_tracing=lambda: False),
        _C=_Untraced(torch._C, _get_tracing_state=lambda: None),
    )
    asking: tuple[Any, ...] = (torch.nn.utils.stateless, torch.nn.utils.parametrize)
    for module in asking:
        module.torch = untraced
    try:
        yield
    finally:
        for module in asking:
            module.torch = torch


@contextlib.contextmanager
def _sizes_checked() -> Iterator[None]:
    """``torch._check`` takes a tensor as its condition: under the tracer, sizes in torch's functions are tensors."""
    library: Any = torch
    original = library._check_with

    def check(error: type[Exception], condition: Any, message: Any) -> Any:
        return original(error, bool(condition) if is_traced() else condition, message)

    library._check_with = check
    try:
        yield
    finally:
        library._check_with = original


@contextlib.contextmanager
def _no_inner_gradients() -> Iterator[None]:
    """``torch.func`` refuses to compute derivatives, forward and reverse, and names the user's line."""
    places: tuple[tuple[Any, str], ...] = (
        (torch.autograd.graph, "disable_saved_tensors_hooks"),  # the first call of reverse mode
        (torch._functorch.eager_transforms, "jvp_increment_nesting"),
    )
    originals = [getattr(module, name) for module, name in places]

    def refusing(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_traced():  # another thread's
                return original(*args, **kwargs)
            raise UnsupportedError(
                f"the call at {user_line()} computes derivatives inside forward (torch.func), which no plan can "
                "foresee. Plan the submodules that do not, instead of the whole module."
            )

        return call

    for (module, name), original in zip(places, originals, strict=True):
        setattr(module, name, refusing(original))
    try:
        yield
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)


@contextlib.contextmanager
def _libraries_as_eager() -> Iterator[None]:
    """transformers and torchvision take the paths of eager mode, though a tracer is active."""
    questions = (("transformers.utils.import_utils", "is_jit_tracing"), ("torchvision", "_is_tracing"))
    asked = [(sys.modules[module], name) for module, name in questions if hasattr(sys.modules.get(module), name)]
    originals = [getattr(module, name) for module, name in asked]
    for module, name in asked:
        setattr(module, name, lambda: False)
    try:
        yield
    finally:
        for (module, name), original in zip(asked, originals, strict=True):
            setattr(module, name, original)
