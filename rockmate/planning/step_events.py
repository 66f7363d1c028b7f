"""A schedule as what it takes from an allocator and gives back, in order.

A problem has bytes, not blocks. Where nothing better is known, each datum is one block; what a run or a backward
takes beyond its data is one block more, for as long as it runs; and gradients are a stack of blocks, of which a
backward that ends with fewer gives back the topmost. Then the bytes asked for are those of ``solvers.walk``, at
every step. Blocks, and with them what is allocated and held, are as exact as their sizes: ``NodeEvents`` replaces
them, for any number of nodes, by what was recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rkgb.device.allocator_trace import Alloc, EmptyCache, Event, Free
from rockmate.errors import InputError
from solvers import Del, Loss, Problem, Run, Schedule, Step, walk


class Part(NamedTuple):
    """The name, in events, of one block of the datum ``data``, which may have several."""

    data: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class NodeEvents:
    """What one node takes and gives back, in order, where that is known; None: by the problem's figures.

    A ``run`` leaves the ``Part``s of what the node makes. A ``backward`` may give parts back before the schedule does.
    What it leaves under other names are gradients, which later backwards give back by these names.
    """

    run: tuple[Event, ...] | None = None
    backward: tuple[Event, ...] | None = None


def step_events(
    problem: Problem,
    schedule: Schedule,
    events: Mapping[int, NodeEvents] | None = None,
    loss: tuple[Event, ...] | None = None,
) -> tuple[Event, ...]:
    """All that a step takes and gives back; each ``Alloc`` has a name of its own, a number.

    ``events``: by node. ``loss``: what the loss takes and gives back, but for the gradients of the outputs, which it
    leaves; needed if, and only if, ``events`` has backwards, and then it must have those of all nodes.
    """
    walk(problem, schedule)
    known = dict(events or {})
    backwards = {i for i in problem.backward_order() if i in known and known[i].backward is not None}
    if (loss is not None or backwards) and (loss is None or len(backwards) < len(problem.backward_order())):
        raise InputError("gradients go from the loss through all backwards: give the events of every one, or of none")
    composer = _Composer(problem, schedule, known, loss)
    for at, step in enumerate(schedule):
        composer.step(at, step)
    return tuple(composer.events)


class _Composer:
    """The walk of a schedule as events. What is live has a name here and a number in the events, which are unique."""

    def __init__(
        self, problem: Problem, schedule: Schedule, known: Mapping[int, NodeEvents], loss: tuple[Event, ...] | None
    ) -> None:
        self.problem, self.known, self.loss = problem, known, loss
        self.events: list[Event] = []
        self.taken = 0
        self.live: dict[Hashable, tuple[int, int]] = {}  # name -> (number, bytes)
        self.parts: dict[int, set[Part]] = defaultdict(set)  # live ones
        self.stack: list[Hashable] = []  # gradients that no list of events names
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
            if self.loss is None:
                self.during(
                    self.problem.loss - min(self.target, self.problem.loss), min(self.target, self.problem.loss)
                )
            else:
                self.follow("the loss", self.loss)
        else:
            self.hold(self.target)
            self.run(at, step.node) if isinstance(step, Run) else self.backward(step.node)

    def take(self, size: int, name: Hashable) -> None:
        self.events.append(Alloc(size, self.taken))
        self.live[name] = (self.taken, size)
        self.taken += 1
        if isinstance(name, Part):
            self.parts[name.data].add(name)

    def give(self, name: Hashable) -> int:
        number, size = self.live.pop(name)
        self.events.append(Free(number))
        if isinstance(name, Part):
            self.parts[name.data].remove(name)
        return size

    def forget(self, d: int) -> list[Event]:
        """All parts of datum d are live no longer; what gives them back."""
        return [Free(self.live.pop(part)[0]) for part in sorted(self.parts.pop(d, ()))]

    def follow(self, where: str, events: tuple[Event, ...]) -> None:
        for event in events:
            if isinstance(event, EmptyCache):
                self.events.append(event)
            elif isinstance(event, Alloc) == (event.name in self.live):
                raise InputError(
                    f"{where}: {event}, but that name is {'' if event.name in self.live else 'not '}in use"
                )
            elif isinstance(event, Alloc):
                self.take(event.size, event.name)
            else:
                self.give(event.name)

    def hold(self, level: int) -> None:
        """Bring the stack of gradients to ``level`` bytes; never more than before and ``level`` on the way."""
        if self.loss is not None:
            return
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
        events = self.known[i].run if i in self.known else None
        if events is None:
            for d in dict.fromkeys(node.makes):
                self.take(self.problem.data[d].size, Part(d))
            extra = node.peak - sum(self.problem.data[d].size for d in dict.fromkeys(node.makes))
            self.during(extra, self.gradients)
        else:
            self.follow(f"the run of {node.name}", events)
            for name in [e.name for e in events if isinstance(e, Alloc) and e.name in self.live]:
                if not isinstance(name, Part) or name.data not in node.makes:
                    raise InputError(f"the run of {node.name} leaves {name}, which is no part of what it makes")
        self.events += replaced
        if self.last_run[i] == at and ("rng", i) in self.live:
            self.give(("rng", i))

    def backward(self, i: int) -> None:
        node, backward = self.problem.nodes[i], self.problem.nodes[i].backward
        events = self.known[i].backward if i in self.known else None
        self.following.pop(0)
        if events is not None:
            self.follow(f"the backward of {node.name}", events)
        elif backward:
            self.during(backward.peak - max(backward.before, backward.after), backward.after)
            self.turn(backward.after)
