"""What a schedule makes torch's caching allocator for CUDA hold: its steps as events, simulated.

A problem has bytes, not blocks. Each datum is one block; what a run or a backward takes beyond its data is one block
more, for as long as it runs; and gradients are a stack of blocks, of which a backward that ends with fewer gives back
the topmost. Then the bytes asked for are those of ``solvers.walk``, at every step. What is allocated and held is as
exact as the sizes of blocks.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from rkgb.device.allocator import Allocator, Levels
from solvers import Del, Loss, Problem, Run, Schedule, Step, walk


class Alloc(NamedTuple):
    """``size`` bytes are allocated under ``name``, which no other memory in use has."""

    size: int
    name: Hashable


class Free(NamedTuple):
    """The memory of ``name`` is released."""

    name: Hashable


Event = Alloc | Free


def predict_reserved(problem: Problem, schedule: Schedule, allocator: Allocator | None = None) -> Levels:
    """The most bytes asked for, allocated and held while ``schedule`` runs, with all that ``allocator`` holds already.

    ``allocator``: a new one by default; parameters and inputs go into it before (``malloc``).
    Raises ``ScheduleError``.
    """
    allocator = allocator or Allocator()
    allocator.reset_peak()
    handles: dict[Hashable, int] = {}
    for event in step_events(problem, schedule):
        if isinstance(event, Free):
            allocator.free(handles.pop(event.name))
        else:
            handles[event.name] = allocator.malloc(event.size)
    return allocator.peak


def step_events(problem: Problem, schedule: Schedule) -> tuple[Event, ...]:
    """All that a step takes and gives back; each ``Alloc`` has a name of its own, a number.

    Raises ``ScheduleError``.
    """
    walk(problem, schedule)
    composer = _Composer(problem, schedule)
    for at, step in enumerate(schedule):
        composer.step(at, step)
    return tuple(composer.events)


class _Composer:
    """The walk of a schedule as events. What is live has a name here and a number in the events, which are unique."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem = problem
        self.events: list[Event] = []
        self.taken = 0
        self.live: dict[Hashable, tuple[int, int]] = {}  # name -> (number, bytes); data by their index
        self.stack: list[Hashable] = []  # names of gradients
        self.gradients = 0  # their bytes
        self.target = 0  # bytes of gradients that the next backward begins with
        self.following = [*problem.backward_order()]
        self.last_run = {s.node: at for at, s in enumerate(schedule) if isinstance(s, Run)}

    def step(self, at: int, step: Step) -> None:
        # As in the walk: what the next backward begins with is there in the step after a backward or the loss.
        if isinstance(step, Del):
            self.events += self.forget(step.data)
            self.hold(self.target)
        elif isinstance(step, Loss):
            self.turn(0)
            gradients = min(self.target, self.problem.loss)
            self.during(self.problem.loss - gradients, gradients)
        else:
            self.hold(self.target)
            self.run(at, step.node) if isinstance(step, Run) else self.backward(step.node)

    def take(self, size: int, name: Hashable) -> None:
        self.events.append(Alloc(size, self.taken))
        self.live[name] = (self.taken, size)
        self.taken += 1

    def give(self, name: Hashable) -> int:
        number, size = self.live.pop(name)
        self.events.append(Free(number))
        return size

    def forget(self, d: int) -> list[Event]:
        """Datum d is live no longer; what gives it back."""
        return [Free(self.live.pop(d)[0])] if d in self.live else []

    def hold(self, level: int) -> None:
        """Bring the stack of gradients to ``level`` bytes; never more than before and ``level`` on the way."""
        while self.gradients > level:
            self.gradients -= self.give(self.stack.pop())
        if self.gradients < level:
            self.stack.append(("gradient", self.taken))
            self.take(level - self.gradients, self.stack[-1])
            self.gradients = level

    def during(self, extra: int, level: int) -> None:
        """Bring gradients to ``level`` while ``extra`` bytes more are there."""
        if extra:
            self.take(extra, "temporary")
        self.hold(level)
        if extra:
            self.give("temporary")

    def turn(self, at_end: int) -> None:
        """Gradients until the next backward are what it begins with; ``at_end`` if there is none."""
        backward = self.problem.nodes[self.following[0]].backward if self.following else None
        self.target = backward.before if backward else at_end

    def run(self, at: int, i: int) -> None:
        node = self.problem.nodes[i]
        if node.rng and self.last_run[i] > at and ("rng", i) not in self.live:
            self.take(node.rng, ("rng", i))
        replaced = [event for d in node.makes for event in self.forget(d)]
        extra = node.peak
        for d in dict.fromkeys(node.makes):
            self.take(self.problem.data[d].size, d)
            extra -= self.problem.data[d].size
        self.during(extra, self.gradients)
        self.events += replaced
        if self.last_run[i] == at and ("rng", i) in self.live:
            self.give(("rng", i))

    def backward(self, i: int) -> None:
        backward = self.problem.nodes[i].backward
        self.following.pop(0)
        if backward:
            self.during(backward.peak - max(backward.before, backward.after), backward.after)
            self.turn(backward.after)
