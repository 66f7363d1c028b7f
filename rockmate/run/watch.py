"""Planned steps that are measured: the memory of each operation, by marks, or the time of the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rkgb.device import kind_of
from rkgb.device.kind import Moment, Timeline
from rkgb.errors import MeasureError
from rockmate.run.backward import Backward
from rockmate.run.program import Program
from rockmate.run.recorder import Recorder
from rockmate.run.store import Store
from solvers.schedule import Bwd, Loss, Run

Watched = Run | Loss | Bwd
"""What is watched of a step: runs, the loss between the phases, and backwards; deletions take no memory."""


@dataclass(frozen=True, repr=False)
class MeasuredStep:
    """The memory of one planned step, operation by operation.

    ``steps``: the runs, the loss and the backwards, in the order in which they came. ``bytes``: for each the most that
    was allocated while it ran, above the level when forward was called. ``nodes``: the names of the operations, by the
    numbers that ``steps`` has.
    """

    steps: tuple[Watched, ...]
    bytes: tuple[int, ...]
    nodes: tuple[str, ...]

    @property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        return max(self.bytes)

    def __repr__(self) -> str:
        return f"<MeasuredStep: {len(self.steps)} operations, peak {self.peak} bytes>"


class Watch:
    """Marks the moments of the step that is being measured, at most one in a process.

    ``current``: that of the step. ``came``: what began at each mark; None where nothing of the plan did, behind the
    last backward. ``programs``: of the calls that ran so far.
    """

    current: ClassVar[Watch | None] = None

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.came: list[Watched | None] = []
        self.programs: list[Program] = []

    def begin(self, step: Watched | None) -> None:
        """``step`` begins now. A node of several operations has a hook for each result: the first one counts."""
        if not self.came or self.came[-1] != step:
            self.came.append(step)
            self.timeline.mark()

    def measured(self, moments: Sequence[Moment]) -> MeasuredStep:
        """What was seen. Raises ``MeasureError`` unless it was one forward under a plan, and its whole backward."""
        if len(self.programs) != 1:
            raise MeasureError(
                f"{len(self.programs) or 'no'} forwards under a plan ran within the step, and one is measured at a "
                "time: let the step call the planned model once, with gradients, under a budget that binds, and "
                "captured as one graph (a followed step cannot be measured so: rk.reason says why it is followed, and "
                "rockmate.measure_peak measures any step)"
            )
        seen = [(step, m.peak) for step, m in zip(self.came, moments, strict=True) if step is not None]
        steps, peaks = zip(*seen, strict=True)
        if not any(isinstance(step, Bwd) for step in steps):
            raise MeasureError("no backward of the planned model ran within the step: let it call backward on the loss")
        return MeasuredStep(steps, peaks, tuple(node.label for node in self.programs[0].s.nodes))


class WatchedRecorder(Recorder):
    """Marks the beginning of each run, and has each backward mark its own."""

    def run(self, start: int, stop: int) -> None:
        for i in range(start, stop):
            _begin(Run(i))
            super().run(i, i + 1)
            made = [self.env[v] for v in self.program.s.nodes[i].makes if v in self.env]
            for function in dict.fromkeys(t.grad_fn for t in made):
                if function is not None:  # its hooks come after those that take the schedule's steps
                    function.register_prehook(lambda _, i=i: _begin(Bwd(i)))
        if stop == len(self.program.nodes) and Watch.current is not None:
            Watch.current.programs.append(self.program)
            _begin(Loss())


class WatchedBackward(Backward):
    """Marks the beginning of each second run, and the end."""

    def _run(self, i: int, k: int) -> None:
        _begin(Run(i))
        super()._run(i, k)

    def over(self) -> None:
        _begin(None)
        super().over()


def _begin(step: Watched | None) -> None:
    if Watch.current is not None:  # a graph may outlive the measurement of its step
        Watch.current.begin(step)


class TimedBackward(Backward):
    """``told`` is called when the first backward is over: with the nanoseconds since the forward began, and those of
    them in which operations ran again, with what was done for these.
    """

    def __init__(self, store: Store, told: Callable[[int, int], None]) -> None:
        super().__init__(store)
        self._device, self._told = store.program.s.device, told
        self._kind = kind_of(self._device)
        self._began = self._kind.mark(self._device)
        self._stages: list[tuple[Any, Any]] = []

    def reach(self, i: int, k: int, _gradients: Any = None) -> None:
        start = self._kind.mark(self._device)
        super().reach(i, k)
        self._stages.append((start, self._kind.mark(self._device)))

    def over(self) -> None:
        super().over()
        if self._stages:
            total = self._kind.between(self._began, self._kind.mark(self._device))
            again = sum(self._kind.between(start, end) for start, end in self._stages)
            self._stages = []
            self._told(total, again)
