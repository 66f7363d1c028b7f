"""Detection of random draws from Python's and NumPy's generators during a run.

All threads share these generators. A thread that loads data may draw from them while a plan is made; its draws must be
neither lost nor repeated, and must not count as the module's.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import random
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from rkgb.trace.code import not_compiled

PYTHON, NUMPY = "Python's random module", "NumPy's random module"

_DRAW = frozenset({"random", "getrandbits", "seed", "setstate"})


@contextlib.contextmanager
def other_draws() -> Iterator[list[str]]:
    """A context whose list names, at its end, the generators that this thread has drawn from.

    The generators are then restored, unless another thread may have drawn from them, too. Draws from Python's generator
    show as calls of this thread. NumPy's do not; other threads wait for NumPy's lock meanwhile, if this thread can take
    it twice. If no other thread runs, the states decide.
    """
    drawn_from: list[str] = []
    alone = _alone()
    with contextlib.nullcontext() if alone else _numpy_lock():
        before = random.getstate(), _numpy_state(), _numpy_generator() and _numpy_generator().get_state()
        with _watched() as calls:
            yield drawn_from
        alone = alone and _alone()
        if (alone or calls) and random.getstate() != before[0]:
            drawn_from.append(PYTHON)
            if alone:
                random.setstate(before[0])
        if before[1] and _numpy_state() != before[1]:  # its first import meanwhile is no draw
            drawn_from.append(NUMPY)
            _numpy_generator().set_state(before[2])


@contextlib.contextmanager
def draws_put_back() -> Iterator[None]:
    """A context that restores both generators at its end, as operators of the user's may draw from them unseen; not
    where another thread may have drawn from them, too.
    """
    alone = _alone()
    before = random.getstate(), _numpy_generator() and _numpy_generator().get_state()
    try:
        yield
    finally:
        if alone and _alone():
            random.setstate(before[0])
            if before[1]:
                _numpy_generator().set_state(before[1])


def _alone() -> bool:
    """Whether no other thread runs that may draw; tqdm's, which is there once a bar was shown, draws nothing."""
    return all(t is threading.current_thread() or type(t).__name__ == "TMonitor" for t in threading.enumerate())


@contextlib.contextmanager
def _watched() -> Iterator[set[str]]:
    """A context that sees by which calls this thread draws from Python's generator. Profilers see nothing meanwhile.

    Garbage collection is off, since it would call finalizers and callbacks that are no part of the forward.
    """
    calls: set[str] = set()
    generator = random.random.__self__  # type: ignore[attr-defined]

    @not_compiled
    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and getattr(argument, "__self__", None) is generator and argument.__name__ in _DRAW:
            calls.add(argument.__name__)

    before: Any = sys.getprofile()
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
        if callable(before):
            sys.setprofile(before)
        elif before is not None:
            before.enable()  # cProfile's


def other_states() -> tuple[Any, bytes]:
    """The states of both generators, to compare."""
    return random.getstate(), _numpy_state()


def _numpy_generator() -> Any:
    """The generator of ``numpy.random.rand`` and its kind; None if ``numpy.random`` is not imported."""
    draw = getattr(sys.modules.get("numpy.random"), "random_sample", None)
    return getattr(draw, "__self__", None)


def _numpy_lock() -> contextlib.AbstractContextManager[Any]:
    """The lock of NumPy's generator, if it is one that the same thread can take again to draw."""
    lock = getattr(getattr(_numpy_generator(), "_bit_generator", None), "lock", None)
    return lock if isinstance(lock, type(threading.RLock())) else contextlib.nullcontext()


def _numpy_state() -> bytes:
    generator = _numpy_generator()
    return b"" if generator is None else pickle.dumps(generator.get_state(legacy=False))
