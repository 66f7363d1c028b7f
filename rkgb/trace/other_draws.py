"""Draws from Python's and NumPy's generators: those of a run, and not those of other threads meanwhile.

Both generators belong to all threads: one that loads data may draw from them while a plan is made. Its draws are not
lost, and not repeated.
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
    """Filled at the end: the generators that this thread has drawn from, which are then as before if no other thread
    may have drawn from them; ``watch`` is in force.

    Python's draws are seen as calls, which tell the thread. NumPy's are not, so that other threads wait for its lock
    meanwhile if it has one that this thread can take twice. Where no other thread runs, the states alone decide.
    ``refuse``: what runs ends at its first draw from Python's if that could not be put back.
    """
    found: list[str] = []
    alone = threading.active_count() == 1
    with contextlib.nullcontext() if alone else _numpy_lock():
        before = random.getstate(), _numpy_state(), _numpy_generator() and _numpy_generator().get_state()
        watch.drawn, watch.refuses = False, refuse and not alone
        try:
            yield found
        except Draws:
            found.append(PYTHON)
            return
        alone = alone and threading.active_count() == 1
        if (alone or watch.drawn) and random.getstate() != before[0]:
            found.append(PYTHON)
            if alone:
                random.setstate(before[0])
        if before[1] and _numpy_state() != before[1]:  # its first import meanwhile is no draw
            found.append(NUMPY)
            _set_numpy_state(before[2])


def _numpy_generator() -> Any:
    """What ``numpy.random.rand`` and its kind draw from; None where NumPy is not used."""
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
