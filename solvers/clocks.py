"""Two clocks along a schedule: that of the device, and that of the host, whose Python launches what the device runs.

A kernel waits for its launch and for the kernel before it. A launch waits for none, until so many wait in the queue
that it is full. Each run of a node, and each backward, counts as one kernel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from solvers.schedule import Bwd, Run, Schedule

QUEUE = 1000
"""Launches that the queue of a device takes, about."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Nanoseconds of the ``forward`` and the ``backward`` of each node: what the host takes to launch it, and what the
    device takes to run it. ``again``: what the host takes beside that for each node that runs again.
    """

    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int], ...]
    again: int = 0


@dataclass(frozen=True, slots=True)
class Clocks:
    """Nanoseconds of a step: its ``time``, and of that what the ``device`` and the ``host`` are busy."""

    time: int
    device: int
    host: int

    @property
    def waiting(self) -> float:
        """The part of the step in which the device waits for the host."""
        return 1 - self.device / self.time if self.time else 0.0

    def __str__(self) -> str:
        part = f"{100 * self.waiting:.0f} % of the step"
        if self.host < self.device:
            return f"the device, which waits for Python in {part}"
        return f"the device waits for Python: {part}; a larger batch makes recomputation cheaper"


def two_clocks(steps: Iterable[tuple[int, int]], queue: int = QUEUE) -> Clocks:
    """A step of kernels in order: for each the nanoseconds of its launch, and those that the device runs it."""
    begun: deque[int] = deque(maxlen=queue)  # when the last kernels begin: then they leave the queue
    host = device = launching = busy = 0
    for launch, run in steps:
        if len(begun) == queue:
            host = max(host, begun[0])
        host += launch
        begun.append(max(device, host))
        device = begun[-1] + run
        launching, busy = launching + launch, busy + run
    return Clocks(device, busy, launching)


def clocks(schedule: Schedule, kernels: Kernels) -> Clocks:
    """Those of a planned step, the loss left out."""
    ran: set[int] = set()
    steps = []
    for step in schedule:
        if isinstance(step, Run):
            launch, run = kernels.forward[step.node]
            steps.append((launch + kernels.again * (step.node in ran), run))
            ran.add(step.node)
        elif isinstance(step, Bwd):
            steps.append(kernels.backward[step.node])
    return two_clocks(steps)
