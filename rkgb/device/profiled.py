"""Memory on the CPU: the allocator's events in a session of torch's profiler, replayed in the order of their times.

The profiler does not report the release of a block that was allocated before the session.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.profiler import profile

from rkgb.device.kind import Moment, Timeline, Window

# The profiler announces each session on stderr; it reads this level at its first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

_BEGIN, _MARK, _PAUSE, _RESUME = (f"rockmate: {what}" for what in ("begin", "mark", "pause", "resume"))
"""Events of these names mark moments among those of the allocator. They take no memory, and no dispatcher sees them."""
_MARKS = (_BEGIN, _MARK, _PAUSE, _RESUME)


def _mark(name: str = _MARK) -> None:
    with torch._C._profiler._RecordFunctionFast(name):
        return


class _Profiled:
    """A session of the profiler, and how often it was marked.

    The session must not end inside a backward: autograd would start it again when the backward ends.
    """

    def __init__(self) -> None:
        self.marks = 0
        self.session = profile(use_cpu=True, profile_memory=True)
        self.session.__enter__()

    def mark(self) -> None:
        self.marks += 1
        _mark()

    def end(self) -> list[tuple[int, int, int]]:
        self.session.__exit__(None, None, None)
        return events(self.session)


class ProfiledWindow(_Profiled, Window):
    at_pauses = 0

    def begin(self) -> None:
        _mark(_BEGIN)

    def pause(self) -> None:
        _mark(_PAUSE)

    def resume(self) -> None:
        _mark(_RESUME)

    def close(self) -> tuple[int, int, int] | None:
        found, self.at_pauses = _between_marks(_without_pauses(self.end()))
        return found


class ProfiledTimeline(_Profiled, Timeline):
    def close(self) -> list[Moment] | None:
        moments = _moments(self.end())
        return moments if len(moments) == self.marks else None


def _moments(recorded: list[tuple[int, int, int]]) -> list[Moment]:
    """The moments that marks stand for among ``recorded`` events."""
    moments: list[list[int]] = []
    for (_, _, size), level in zip(recorded, _levels(recorded), strict=True):
        if size == 0:
            moments.append([level, level])
        if moments:
            moments[-1][1] = max(moments[-1][1], level)
    first = moments[0][0] if moments else 0
    return [Moment(level - first, peak - first) for level, peak in moments]


def _without_pauses(recorded: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The events without those of blocks that were allocated in a pause."""
    found: list[tuple[int, int, int]] = []
    made: set[int] = set()  # addresses of blocks that pauses made
    pauses = False
    for event in recorded:
        _, address, size = event
        if size == 0:
            pauses = _MARKS[address] == _PAUSE if _MARKS[address] in (_PAUSE, _RESUME) else pauses
            found.append(event)
        elif size > 0 and pauses:
            made.add(address)
        elif size < 0 and address in made:
            made.discard(address)
        else:
            found.append(event)
    return found


def _between_marks(recorded: list[tuple[int, int, int]]) -> tuple[tuple[int, int, int] | None, int]:
    """What ``Window.close`` returns, and ``Window.at_pauses``, from the ``recorded`` events."""
    marks = [(k, address) for k, (_, address, size) in enumerate(recorded) if size == 0]
    start, end = (next((k for k, which in marks if _MARKS[which] == mark), -1) for mark in (_BEGIN, _MARK))
    if start < 0 or end < 0:
        return None, 0
    pauses = (k for k, which in marks if _MARKS[which] == _PAUSE and start < k < end)
    at_pauses = max((replay(recorded[start + 1 : k])[1] for k in pauses), default=0)
    between, later = recorded[start + 1 : end], recorded[end + 1 :]
    _, before = replay(recorded[:start])
    peak, _ = replay(recorded[:start] + between, start)
    return (max(0, peak - before), replay(between)[1], replay(between + later)[1]), at_pauses


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


def replay(recorded: list[tuple[int, int, int]], start: int = 0) -> tuple[int, int]:
    """(peak, level at the end) in bytes; the peak counts from event ``start`` on."""
    levels = list(_levels(recorded))
    return max([0, *levels[start:]]), levels[-1] if levels else 0


def _levels(recorded: list[tuple[int, int, int]]) -> Iterator[int]:
    """The level in bytes after each event."""
    blocks: dict[int, int] = {}
    level = 0
    for _, address, size in recorded:
        level -= blocks.pop(address, 0) if size else 0
        if size > 0:
            blocks[address] = size
            level += size
        yield level
