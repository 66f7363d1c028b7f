"""Tasks in threads, while the main thread waits for them and reacts to Ctrl-C.

Signals reach the main thread only, between two steps of Python. The waits of ``threading`` and ``concurrent.futures``
are written in Python. Ctrl-C within one may leave a lock acquired for ever, and a worker that needs it would never end.
Workers here need no such lock: they append to lists.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from solvers.interrupts import check

T = TypeVar("T")

LOOK = 0.2
"""Seconds after which the waiting thread checks for a lost interrupt."""


class Work(Generic[T]):
    """Runs ``tasks`` in ``threads`` threads, each once, begun in order."""

    def __init__(self, tasks: Sequence[Callable[[], T]], threads: int = 1) -> None:
        self._tasks = tasks
        self._threads = min(threads, len(tasks))
        self._waiting = [*range(len(tasks))][::-1]
        self._begun: list[None] = []
        self._results: dict[int, T] = {}
        self._errors: list[BaseException] = []
        self._wake: SimpleQueue[None] = SimpleQueue()

    def start(self) -> None:
        """Start the threads."""
        for _ in range(self._threads):
            # A daemon: the interpreter does not wait at its end for a thread whose start Ctrl-C interrupted.
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._begun.append(None)
            try:
                k = self._waiting.pop()
            except IndexError:
                self._begun.pop()
                return
            try:
                self._results[k] = self._tasks[k]()
            except BaseException as error:  # noqa: BLE001 - ``results`` raises it again
                self._errors.append(error)
            self._wake.put(None)

    @property
    def ended(self) -> int:
        """How many tasks have returned or raised."""
        return len(self._results) + len(self._errors)

    def look(self) -> bool:
        """Wait until a task ends, ``LOOK`` seconds at most. Whether all have ended; if not, raise a lost Ctrl-C."""
        self._pause()
        if self.ended == len(self._tasks):
            return True
        check()
        return False

    def _pause(self) -> None:
        # Ctrl-C may lose an item of the queue on its way, so that only the lists say what has ended.
        if self.ended < len(self._tasks):
            with suppress(Empty):
                self._wake.get(timeout=LOOK)

    def stop(self) -> None:
        """Begin no more tasks, and wait for those that have begun."""
        self._waiting.clear()
        while self.ended < len(self._begun):
            self._pause()

    def results(self) -> list[T]:
        """The results of all tasks, in order, once all have ended; raises the first error of a task."""
        if self._errors:
            raise self._errors[0]
        return [self._results[k] for k in range(len(self._tasks))]
