"""Detection of random draws from Python's and NumPy's generators during a run.

All threads share these generators. A thread that loads data may draw from them while a plan is made; its draws must be
neither lost nor repeated, and must not count as the module's.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

from rkgb.trace.code import Draws, Watch

PYTHON, NUMPY = "Python's random module", "NumPy's random module"


@contextlib.contextmanager
def other_draws(watch: Watch, *, refuse: bool = False) -> Iterator[list[str]]:
    """A context whose list names, at its end, the generators that this thread has drawn from. ``watch`` is active.

    The generators are then restored, unless another thread may have drawn from them, too. Draws from Python's generator
    show as calls of this thread. NumPy's do not; other threads wait for NumPy's lock meanwhile, if this thread can take
    it twice. If no other thread runs, the states decide. ``refuse``: raise ``Draws`` at the first draw from Python's
    generator that could not be restored.
    """
    drawn_from: list[str] = []
    alone = threading.active_count() == 1
    with contextlib.nullcontext() if alone else _numpy_lock():
        before = random.getstate(), _numpy_state(), _numpy_generator() and _numpy_generator().get_state()
        watch.drawn, watch.refuses = False, refuse and not alone
        try:
            yield drawn_from
        except Draws:
            drawn_from.append(PYTHON)
            return
        alone = alone and threading.active_count() == 1
        if (alone or watch.drawn) and random.getstate() != before[0]:
            drawn_from.append(PYTHON)
            if alone:
                random.setstate(before[0])
        if before[1] and _numpy_state() != before[1]:  # its first import meanwhile is no draw
            drawn_from.append(NUMPY)
            _set_numpy_state(before[2])


def _numpy_generator() -> Any:
    """The generator of ``numpy.random.rand`` and its kind; None if ``numpy.random`` is not imported."""
    draw = getattr(sys.modules.get("numpy.random"), "random_sample", None)
    return getattr(draw, "__self__", None)


def _set_numpy_state(state: Any) -> None:
    _numpy_generator().set_state(state)


def _numpy_lock() -> contextlib.AbstractContextManager[Any]:
    """The lock of NumPy's generator, if it is one that the same thread can take again to draw."""
    lock = getattr(getattr(_numpy_generator(), "_bit_generator", None), "lock", None)
    return lock if isinstance(lock, type(threading.RLock())) else contextlib.nullcontext()


def _numpy_state() -> str:
    generator = _numpy_generator()
    if generator is None:
        return ""
    return repr([x.tolist() if hasattr(x, "tolist") else x for x in generator.get_state()])
