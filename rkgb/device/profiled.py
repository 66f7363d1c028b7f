"""The CPU allocator's events in a profiler session, replayed in time order.

Releases of blocks older than the session are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import profile

from rkgb.device.kind import Moment, Timeline, Window

# The profiler announces every session on stderr unless it is told not to before its first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

# Bytes of a block that marks a moment among the events: nothing else is likely to have this size.
_MARK = 1_000_003


def profiled(function: Callable[[], Any]) -> tuple[Any, int, int]:
    """(result, peak, net): bytes above the level at the call, at the worst moment and at the end."""
    with profile(use_cpu=True, profile_memory=True) as prof:
        result = function()
    return result, *replay(events(prof))


def profiled_after(prepare: Callable[[], Any], function: Callable[[Any], Any]) -> tuple[Any, int]:
    """(result, peak) of ``function(prepare())``, above the level between the two."""
    with profile(use_cpu=True, profile_memory=True) as prof:
        made = prepare()
        torch.empty(_MARK, dtype=torch.uint8)
        result = function(made)
    found = events(prof)
    mark = next(k for k, event in enumerate(found) if event[2] == _MARK)
    _, before = replay(found[:mark])
    peak, _ = replay(found[:mark] + found[mark + 2 :], mark)
    return result, max(0, peak - before)


class ProfiledWindow(Window):
    """By a profiler session. The allocator reports the release of a block only if it reported the allocation.

    Ended inside a backward, the session would be restored when the backward ends.
    """

    def __init__(self) -> None:
        self.marked = False
        self.session = profile(use_cpu=True, profile_memory=True)
        self.session.__enter__()

    def begin(self) -> None:
        torch.empty(_MARK, dtype=torch.uint8)

    def mark(self) -> None:
        self.marked = True
        torch.empty(_MARK + 1, dtype=torch.uint8)

    def close(self) -> tuple[int, int, int] | None:
        self.session.__exit__(None, None, None)
        return _between_marks(events(self.session)) if self.marked else None


class ProfiledTimeline(Timeline):
    """By a profiler session, as ``ProfiledWindow``. A moment is an allocation of ``_MARK`` bytes."""

    def __init__(self) -> None:
        self.marks = 0
        self.session = profile(use_cpu=True, profile_memory=True)
        self.session.__enter__()

    def mark(self) -> None:
        self.marks += 1
        torch.empty(_MARK, dtype=torch.uint8)

    def close(self) -> list[Moment] | None:
        self.session.__exit__(None, None, None)
        found = _moments(events(self.session))
        return found if len(found) == self.marks else None


def _moments(found: list[tuple[int, int, int]]) -> list[Moment]:
    """The moments among events; an event of a mark, and that of its release, are no memory."""
    blocks: dict[int, int] = {}
    moments: list[list[int]] = []
    level = 0
    for _, address, size in found:
        if size == _MARK:
            moments.append([level, level])
        elif size > 0:
            level += size - blocks.pop(address, 0)
            blocks[address] = size
        else:
            level -= blocks.pop(address, 0)
        if moments:
            moments[-1][1] = max(moments[-1][1], level)
    first = moments[0][0] if moments else 0
    return [Moment(level - first, peak - first) for level, peak in moments]


def _between_marks(found: list[tuple[int, int, int]]) -> tuple[int, int, int] | None:
    sizes = [size for _, _, size in found]
    if _MARK not in sizes or _MARK + 1 not in sizes:
        return None
    start, end = sizes.index(_MARK), sizes.index(_MARK + 1)
    between = found[start + 2 : end]  # without the mark and its release
    _, before = replay(found[:start])
    peak, _ = replay(found[:start] + between, start)
    later = found[end + 2 :]
    return max(0, peak - before), replay(between)[1], replay(between + later)[1]


def events(prof: profile) -> list[tuple[int, int, int]]:
    """(time, address, signed bytes) of every allocation and release on the CPU."""
    found: list[tuple[int, int, int]] = []
    results: Any = prof.kineto_results
    stack = list(results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    found.sort(key=lambda e: e[0])
    return found


def replay(found: list[tuple[int, int, int]], start: int = 0) -> tuple[int, int]:
    """(peak, level at the end); the peak from event ``start`` on."""
    blocks: dict[int, int] = {}
    level = peak = 0
    for k, (_, address, size) in enumerate(found):
        level -= blocks.pop(address, 0)
        if size > 0:
            blocks[address] = size
            level += size
        if k >= start:
            peak = max(peak, level)
    return peak, level
