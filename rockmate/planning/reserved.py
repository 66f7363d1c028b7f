"""What a schedule makes torch's caching allocator for CUDA hold: its steps as events, simulated."""

from __future__ import annotations

from collections.abc import Mapping

from rkgb.device.allocator import Allocator
from rkgb.device.allocator_blocks import Levels
from rkgb.device.allocator_trace import Event, replay
from rockmate.planning.step_events import NodeEvents, step_events
from solvers import Problem, Schedule


def predict_reserved(
    problem: Problem,
    schedule: Schedule,
    allocator: Allocator | None = None,
    events: Mapping[int, NodeEvents] | None = None,
    loss: tuple[Event, ...] | None = None,
) -> Levels:
    """The most bytes asked for, allocated and held while ``schedule`` runs, with all that ``allocator`` holds already.

    ``allocator``: a new one by default; parameters, inputs and free memory that is held go into it before
    (``malloc``, ``adopt``). ``events``, ``loss``: as in ``step_events``.
    Raises ``ScheduleError``, ``rkgb.errors.OutOfMemory`` where the allocator has a limit, and ``InputError``.
    """
    allocator = allocator or Allocator()
    allocator.reset_peak()
    return replay(step_events(problem, schedule, events, loss), allocator).peak
