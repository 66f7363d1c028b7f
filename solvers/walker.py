"""The reference semantics of schedules: a walk that checks each step and counts the bytes in use.

All claims of solvers are checked by the walk, so this file shares no code with the solvers. Memory while a step
executes is

- ``Run(i)``: live data before it (the copies it replaces included) + gradients + ``nodes[i].peak``;
- ``Loss()``: live data, ``problem.returned`` among them, + ``problem.loss``;
- ``Bwd(i)``: live data + ``nodes[i].backward.peak`` (gradients included);
- ``Del(d)``: live data + gradients after it;

each plus ``rng`` bytes for every random node between its first run and its last rerun. A rerun takes ``warm`` where all
that it reads was made since the last backward, else ``time``. Gradients are 0 until the loss,
then ``before`` of the next backward, and ``after`` of the last one behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

from solvers.errors import ProblemError, ScheduleError
from solvers.problem import Problem
from solvers.schedule import Bwd, Del, Loss, Run, Schedule, Step


@dataclass(frozen=True, slots=True)
class Walk:
    """The costs of a schedule: bytes in use at each step (``timeline``), their maximum and its step; nanoseconds."""

    peak: int
    peak_step: int
    time: int
    eager_time: int
    timeline: tuple[int, ...]

    @property
    def recompute(self) -> int:
        """Nanoseconds spent on reruns."""
        return self.time - self.eager_time

    @property
    def overhead(self) -> float:
        """Recompute time as a fraction of the step without recomputation."""
        return self.recompute / self.eager_time if self.eager_time else 0.0


def step_name(problem: Problem, step: Step) -> str:
    """A short name of ``step`` for messages, such as ``bwd.lin1``."""
    match step:
        case Run(i):
            return f"fwd.{problem.nodes[i].name}"
        case Bwd(i):
            return f"bwd.{problem.nodes[i].name}"
        case Del(d):
            return f"del {problem.data[d].name}"
        case Loss():
            return "loss"


def walk(problem: Problem, schedule: Schedule) -> Walk:
    """Check ``schedule`` and return its costs.

    Raises ``ScheduleError``, which names the first step that is not allowed and says why, and ``ProblemError`` if
    ``problem`` is not a ``Problem`` (``walk_graph`` is for a ``GraphProblem``).
    """
    if not isinstance(problem, Problem):
        raise ProblemError(f"walk takes a Problem; for a {type(problem).__name__} there may be another: walk_graph")
    state = _State(problem, schedule)
    timeline = tuple(state.step(at, step) for at, step in enumerate(schedule))
    state.finish(len(schedule))
    peak = max(timeline, default=0)
    return Walk(peak, timeline.index(peak) if timeline else 0, state.time, problem.eager_time, timeline)


class _State:
    """The state of the walk: live data and their bytes, and which steps may come next."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem = problem
        self.live: set[int] = set()
        self.made: set[int] = set()  # by reruns since the last backward
        self.live_bytes = 0
        self.gradients = 0
        self.rng_bytes = 0
        self.time = 0
        self.next_forward = 0
        self.in_forward = True
        self.left = problem.backward_order()[::-1]  # backwards, the next one last
        self.last_run = {s.node: at for at, s in enumerate(schedule) if isinstance(s, Run)}
        self.at = 0
        self.now: Step = Loss()

    @property
    def what(self) -> str:
        """The step being executed, for messages."""
        return f"step {self.at} ({step_name(self.problem, self.now)})"

    def step(self, at: int, step: Step) -> int:
        """Execute ``step``; return the bytes in use while it executes (after it, for ``Del``)."""
        if isinstance(step, Run | Bwd) and not 0 <= step.node < len(self.problem.nodes):
            raise ScheduleError(f"step {at}: no node {step.node}")
        if isinstance(step, Del) and not 0 <= step.data < len(self.problem.data):
            raise ScheduleError(f"step {at}: no data {step.data}")
        self.at, self.now = at, step
        match step:
            case Run(i):
                return self._run(at, i)
            case Bwd(i):
                return self._bwd(i)
            case Del(d):
                return self._del(d)
            case Loss():
                return self._loss()
            case _:
                raise ScheduleError(f"step {at} is {step!r}: a schedule has Run, Del, Loss and Bwd steps only")

    def finish(self, end: int) -> None:
        """Raise unless the forward phase, the loss and every backward have been executed."""
        if self.in_forward:
            raise ScheduleError(f"step {end} (end): the schedule ends before the loss")
        if self.left:
            raise ScheduleError(f"step {end} (end): bwd.{self.problem.nodes[self.left[-1]].name} is missing")

    def _check_reads(self, reads: tuple[int, ...]) -> None:
        for d in reads:
            if d not in self.live:
                raise ScheduleError(f"{self.what} reads {self.problem.data[d].name}, which is not live")

    def _run(self, at: int, i: int) -> int:
        node = self.problem.nodes[i]
        if self.in_forward:
            if i < self.next_forward:
                raise ScheduleError(f"{self.what} reruns before the loss")
            if i > self.next_forward:
                expected = self.problem.nodes[self.next_forward].name
                raise ScheduleError(f"{self.what} is out of order: the forward phase is at {expected}")
            self.next_forward += 1
            if self.last_run[i] > at:
                self.rng_bytes += node.rng
        elif not node.rerun:
            raise ScheduleError(f"{self.what} reruns a node that may run only once")
        elif node.within and not (self.left and node.within[1] <= self.left[-1] <= node.within[0]):
            raise ScheduleError(f"{self.what} reruns a node outside of the backwards before which it may")
        self._check_reads(node.reads)
        used = self.live_bytes + self.gradients + self.rng_bytes + node.peak
        for d in node.makes:
            if d not in self.live:
                self.live.add(d)
                self.live_bytes += self.problem.data[d].size
        if not self.in_forward and self.last_run[i] == at:
            self.rng_bytes -= node.rng
        just_made = not self.in_forward and bool(node.reads) and self.made.issuperset(node.reads)
        self.time += node.time if node.warm is None or not just_made else node.warm
        self.made.update(node.makes)
        return used

    def _bwd(self, i: int) -> int:
        if self.in_forward:
            raise ScheduleError(f"{self.what} comes before the loss")
        backward = self.problem.nodes[i].backward
        if backward is None:
            raise ScheduleError(f"{self.what}: this node has no backward")
        if self.left[-1:] != [i]:
            expected = f"bwd.{self.problem.nodes[self.left[-1]].name}" if self.left else "the end"
            raise ScheduleError(f"{self.what} is out of order: expected {expected}")
        self._check_reads(backward.reads)
        self.left.pop()
        self.made.clear()
        self._set_gradients(backward.after)
        self.time += backward.time
        return self.live_bytes + self.rng_bytes + backward.peak

    def _set_gradients(self, at_end: int) -> None:
        """Set the bytes of gradients until the next backward: its ``before``, or ``at_end`` if there is none."""
        following = self.problem.nodes[self.left[-1]].backward if self.left else None
        self.gradients = following.before if following else at_end

    def _del(self, d: int) -> int:
        name = self.problem.data[d].name
        if d in self.problem.held:
            raise ScheduleError(f"{self.what} deletes {name}, which the caller holds")
        if d not in self.live:
            raise ScheduleError(f"{self.what} deletes {name}, which is not live")
        self.live.remove(d)
        self.live_bytes -= self.problem.data[d].size
        return self.live_bytes + self.gradients + self.rng_bytes

    def _loss(self) -> int:
        if not self.in_forward:
            raise ScheduleError(f"{self.what}: there is only one loss")
        if self.next_forward < len(self.problem.nodes):
            missing = self.problem.nodes[self.next_forward].name
            raise ScheduleError(f"{self.what} comes before the forward phase is complete: fwd.{missing} is missing")
        self._check_reads(tuple(sorted(self.problem.returned)))
        self.in_forward = False
        self.made.clear()
        self._set_gradients(0)
        return self.live_bytes + self.rng_bytes + self.problem.loss
