"""Memory on the CPU: the allocator's events in a session of torch's profiler, replayed in the order of their times.

The profiler does not report the release of a block that was allocated before the session.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler
from torch.autograd.profiler import profile

from rkgb.device.kind import Moment, Timeline

# The profiler announces each session on stderr; it reads this level at its first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

_MARK, _PAUSE, _RESUME = _MARKS = tuple(f"rockmate: {what}" for what in ("mark", "pause", "resume"))
"""Events of these names mark moments among those of the allocator. They take no memory, and no dispatcher sees them."""


_C: Any = torch._C


def _mark(name: str = _MARK) -> None:
    _C._autograd._record_function_with_args_exit(_C._autograd._record_function_with_args_enter(name))


class _WarmUp:
    """A session of the user's that was prepared and has not begun, as ``torch.profiler.schedule`` has them. If another
    one begins meanwhile, torch crashes: so it is ended before, and prepared again behind the other one.
    """

    def __init__(self) -> None:
        """From now on, what torch's profilers call is noted."""
        module: Any = profiler
        self._prepares, self._begins = module._prepare_profiler, module._enable_profiler
        self._ends = module._disable_profiler
        self._waiting: partial[None] | None = None
        module._prepare_profiler, module._enable_profiler = self.prepare, self.begin

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        self._waiting = partial(self.prepare, *args, **kwargs)
        self._prepares(*args, **kwargs)

    def begin(self, *args: Any, **kwargs: Any) -> None:
        self._waiting = None
        self._begins(*args, **kwargs)

    def end(self) -> Callable[[], None]:
        """End the session that waits, if there is one; what prepares it again."""
        if (waiting := self._waiting) is None:
            return lambda: None
        self.begin(*waiting.args)
        self._ends()
        return waiting


_WARM_UP = _WarmUp()


class _OfMemory(profile):
    """A session that records memory and marks: operations, which it does not, take longer than all else."""

    def _start_trace(self) -> None:
        self.entered = True
        profiler._run_on_profiler_start()
        scopes = {_C._profiler.RecordScope.USER_SCOPE}
        _WARM_UP.begin(self.config(create_trace_id=False), self.kineto_activities, scopes)
        self.profiling_start_time_ns = time.perf_counter_ns()


class ProfiledTimeline(Timeline):
    """A timeline by a profiler session.

    The session must not end inside a backward: autograd would start it again when the backward ends.
    """

    def __init__(self) -> None:
        self.marks, self.prepare_again = 0, _WARM_UP.end()
        self.session = _OfMemory(use_cpu=True, profile_memory=True)
        self.session.__enter__()

    def mark(self) -> None:
        self.marks += 1
        _mark()

    def pause(self) -> None:
        self.marks += 1
        _mark(_PAUSE)

    def resume(self) -> None:
        _mark(_RESUME)

    def close(self) -> list[Moment] | None:
        self.session.__exit__(None, None, None)
        self.prepare_again()
        moments = _moments(events(self.session))
        return moments if len(moments) == self.marks else None


def _moments(recorded: list[tuple[int, int, int]]) -> list[Moment]:
    """The moments that marks stand for among ``recorded`` events.

    Blocks that were allocated in a pause do not count, whenever they are released.
    """
    blocks: dict[int, tuple[int, bool]] = {}  # bytes, and whether they are new
    moments: list[list[int]] = []
    level = new = 0
    paused = False
    for _, address, size in recorded:
        if size:
            before, counted = blocks.pop(address, (0, False))
            level, new = level - before, new - before * counted
            if size > 0 and not paused:
                blocks[address] = size, bool(moments)
                level, new = level + size, new + size * bool(moments)
        elif _MARKS[address] == _RESUME:
            paused = False
        else:
            paused = paused or _MARKS[address] == _PAUSE
            moments.append([level, level, new])
        if moments:
            moments[-1][1] = max(moments[-1][1], level)
    first = moments[0][0] if moments else 0
    return [Moment(level - first, peak - first, new) for level, peak, new in moments]


def events(prof: profile) -> list[tuple[int, int, int]]:
    """(time, address, bytes) of every allocation and release on the CPU, by time; bytes of a release are negative.

    A mark has no bytes, and in the place of an address its position in ``_MARKS``.
    """
    recorded: list[tuple[int, int, int]] = []
    results: Any = prof.kineto_results
    stack = list(results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            recorded.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name in _MARKS:
            recorded.append((event.start_time_ns, _MARKS.index(event.name), 0))
    recorded.sort(key=lambda e: e[0])
    return recorded
