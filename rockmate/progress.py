"""Progress of planning: one line with the phase and how much of it is done, which goes when planning ends."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from tqdm import tqdm

from solvers.interrupts import check

Report = Callable[[str, float], None]
"""Is told the phase and which part of it is done (0 to 1), by whoever works."""

DELAY = 1.0
"""Seconds after which the line appears, unless it was asked for."""


def silent(phase: str, part: float) -> None:
    """The ``Report`` that tells nobody."""


def part_of(report: Report, what: str) -> Report:
    """A ``Report`` that says before each phase what it is of."""
    return lambda phase, part: report(f"{what}, {phase}", part)


class _Line(tqdm):  # type: ignore[misc]  # tqdm publishes no types
    monitor_interval = 0  # no thread: reports come often enough


_HERE = threading.local()
"""``shown``: the ``Progress`` that this thread is in, if there is one."""


class Progress:
    """A ``Report`` that writes to the terminal; a context that clears the line at its end. Within another one, as where
    several sizes are planned, it is a part of what that one shows.

    ``show``: True writes at once, wherever standard error goes; False never; None only to a terminal, not where
    ``CI`` is set, and only when planning takes longer than ``DELAY``. ``instead``: one line for who sees none then.
    """

    def __init__(self, show: bool | None = None, instead: str = "") -> None:
        terminal = sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("CI")
        self.wanted = terminal if show is None else show
        self.start = time.time()
        self.visible_from = self.start + (DELAY if show is None else 0.0)
        self.said = self.phase = ""
        self.instead = "" if self.wanted or show is False or sys.stderr is None else instead
        self.line: _Line | None = None
        self.outer: Progress | None = None

    def __call__(self, phase: str, part: float) -> None:
        """Show that ``part`` of ``phase`` is done; raises again what came of Ctrl-C, if that was lost."""
        check()
        self.said = phase
        self._show(phase, part)

    def _show(self, phase: str, part: float) -> None:
        if self.outer is not None:
            self.outer._show(f"{self.outer.said}, {phase}" if self.outer.said else phase, part)
            return
        if time.time() < self.visible_from:
            return
        if self.instead:
            sys.stderr.write(f"{self.instead}\n")
            self.instead = ""
        if not self.wanted:
            return
        if self.line is None:
            form = "Rockmate plans: {desc} {percentage:3.0f} % {bar:20} {elapsed}"
            self.line = _Line(total=1.0, bar_format=form, leave=False, file=sys.stderr, delay=1e-9)
            self.line.start_t = self.start
        if phase == self.phase:
            self.line.update(part - self.line.n)
            return
        self.phase, self.line.n = phase, part
        self.line.set_description_str(f"{phase:20}")

    def __enter__(self) -> Progress:
        self.outer, _HERE.shown = getattr(_HERE, "shown", None), self
        return self

    def __exit__(self, *_: object) -> None:
        _HERE.shown = self.outer
        if self.line is not None:
            self.line.close()
