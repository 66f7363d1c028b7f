"""Work in threads beside one that waits and hears Ctrl-C.

Signals reach the main thread only, between two steps of Python. Ctrl-C within the waits of ``threading`` and
``concurrent.futures``, which are written in Python, may leave a lock taken that a worker needs, and everything waits
for ever. Nothing here is taken and given back: workers append to lists.
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
"""Seconds after which whoever waits looks for an interrupt that was lost."""


class Work(Generic[T]):
    """``tasks`` run in ``threads`` threads, each task once, in order; they begin with ``start``."""

    def __init__(self, tasks: Sequence[Callable[[], T]], threads: int = 1) -> None:
        self._tasks = tasks
        self._threads = min(threads, len(tasks))
        self._waiting = [*range(len(tasks))][::-1]
        self._begun: list[None] = []
        self._results: dict[int, T] = {}
        self._errors: list[BaseException] = []
        self._wake: SimpleQueue[None] = SimpleQueue()

    def start(self) -> None:
        """Begin."""
        for _ in range(self._threads):
            # At the interpreter's end there is no waiting for a thread whose start Ctrl-C interrupted.
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
            except BaseException as error:  # noqa: BLE001 - raised again by who waits
                self._errors.append(error)
            self._wake.put(None)

    @property
    def ended(self) -> int:
        """How many tasks ended."""
        return len(self._results) + len(self._errors)

    def look(self) -> bool:
        """Wait for a task's end, a moment at most; whether all ended. If not, raises what came of a lost Ctrl-C."""
        self._pause()
        if self.ended == len(self._tasks):
            return True
        check()
        return False

    def _pause(self) -> None:
        # What wakes may get lost, by Ctrl-C between taking it and having it: the lists count.
        if self.ended < len(self._tasks):
            with suppress(Empty):
                self._wake.get(timeout=LOOK)

    def stop(self) -> None:
        """Begin nothing new, and wait for what was begun."""
        self._waiting.clear()
        while self.ended < len(self._begun):
            self._pause()

    def results(self) -> list[T]:
        """Of all tasks, which ended, in order; raises what one of them raised."""
        if self._errors:
            raise self._errors[0]
        return [self._results[k] for k in range(len(self._tasks))]
