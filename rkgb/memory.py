"""Exact allocator measurements: the largest sum of bytes allocated while a function runs.

CUDA: the caching allocator's own statistics. CPU: the allocator's events in a profiler session,
replayed in time order (releases of blocks older than the session are left out).
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.autograd.profiler import profile

from rkgb.errors import MeasureError

# The profiler announces every session on stderr unless it is told not to before its first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


# Bytes that an allocator's blocks are multiples of; the CPU's counts what was asked for.
_GRAIN = {"cuda": 512}


def taken(size: int, device: torch.device) -> int:
    """Bytes that the allocator of ``device`` counts for a block of ``size`` bytes: CUDA's rounds up."""
    grain = _GRAIN.get(device.type, 1)
    return -(-size // grain) * grain


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes that the memory of ``tensor`` takes, of which it may be a part; of a sparse one, indices and values."""
    if tensor.layout == torch.sparse_coo:
        return storage_bytes(tensor._indices()) + storage_bytes(tensor._values())
    return taken(tensor.untyped_storage().nbytes(), tensor.device)


_MEASURING = threading.Lock()
_measurers: list[int] = []  # the thread that measures
_PATIENCE = 60.0  # seconds that another thread waits for it


@contextlib.contextmanager
def _measuring(device: torch.device) -> Iterator[None]:
    """One measurement at a time: a second one would end what the first one counts, which then comes out too small."""
    me = threading.get_ident()
    if me in _measurers or not _MEASURING.acquire(timeout=_PATIENCE):
        raise MeasureError(
            "memory is being measured already, so that no plan can be made meanwhile for a "
            "new kind of call (other shapes; gradients that are there, or not, when the call begins). Call the "
            "function once before, just as it will be measured"
        )
    _measurers.append(me)
    try:
        if device.type != "cuda" and torch._C._autograd._profiler_enabled():
            warnings.warn(
                "the running profiler session ends: memory is measured by another one. Start the profiler when plans "
                "are made, after a first call of each kind",
                RuntimeWarning,
                stacklevel=3,
            )
        yield
    finally:
        _measurers.clear()
        _MEASURING.release()


def measure_memory(function: Callable[[], Any], device: torch.device) -> tuple[Any, int, int]:
    """(result, peak, net): bytes above the level at the call, at the worst moment and at the end."""
    with _measuring(device):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            result = function()
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device) - before
            return result, peak, torch.cuda.memory_allocated(device) - before
        with profile(use_cpu=True, profile_memory=True) as prof:
            result = function()
        return result, *_replay(_events(prof))


# Bytes of a block that marks a moment among the events: nothing else is likely to have this size.
_MARK = 1_000_003


def measure_after(prepare: Callable[[], Any], function: Callable[[Any], Any], device: torch.device) -> tuple[Any, int]:
    """(result, peak) of ``function(prepare())``: bytes above the level between the two, at the worst moment of the
    second.

    What ``prepare`` allocated and ``function`` releases counts, which ``measure_memory`` cannot see on the CPU.
    """
    if device.type == "cuda":
        return measure_memory(partial(function, prepare()), device)[:2]
    with _measuring(device), profile(use_cpu=True, profile_memory=True) as prof:
        made = prepare()
        torch.empty(_MARK, dtype=torch.uint8)
        result = function(made)
    events = _events(prof)
    mark = next(k for k, event in enumerate(events) if event[2] == _MARK)
    _, before = _replay(events[:mark])
    peak, _ = _replay(events[:mark] + events[mark + 2 :], mark)
    return result, max(0, peak - before)


class Window:
    """What other people's code allocates and releases between two moments, ``begin`` and ``mark``.

    It is opened before what may be released meanwhile is allocated: the CPU's allocator reports the release of a block
    only if it reported the allocation. ``close`` must follow in the thread that opened it, and outside of a backward,
    which would restore a profiler that was ended inside it. On CUDA ``begin`` resets the peak statistics.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.profile: profile | None = None
        self.seen: tuple[int, int] | None = None
        self.before, self.marked = 0, False
        if device.type != "cuda":
            self.profile = profile(use_cpu=True, profile_memory=True)
            self.profile.__enter__()

    @staticmethod
    def possible(device: torch.device) -> bool:
        """Whether one can be opened: nothing else measures, nor profiles."""
        return not _measurers and (device.type == "cuda" or not torch._C._autograd._profiler_enabled())

    def begin(self) -> None:
        """The first moment is now."""
        if self.profile is None:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        else:
            torch.empty(_MARK, dtype=torch.uint8)

    def mark(self) -> None:
        """The second moment is now."""
        self.marked = True
        if self.profile is None:
            peak = torch.cuda.max_memory_allocated(self.device) - self.before
            self.seen = max(0, peak), max(0, torch.cuda.memory_allocated(self.device) - self.before)
        else:
            torch.empty(_MARK + 1, dtype=torch.uint8)

    def close(self) -> tuple[int, int] | None:
        """(peak, new): the most bytes above the level of the first moment, and at the second moment those of what was
        allocated since (on CUDA, less what was released). None if there was no second moment.
        """
        if self.profile is not None:
            finished, self.profile = self.profile, None
            finished.__exit__(None, None, None)
            if self.marked:
                self.seen = _between_marks(_events(finished))
        return self.seen


def _between_marks(events: list[tuple[int, int, int]]) -> tuple[int, int] | None:
    sizes = [size for _, _, size in events]
    if _MARK not in sizes or _MARK + 1 not in sizes:
        return None
    start, end = sizes.index(_MARK), sizes.index(_MARK + 1)
    _, before = _replay(events[:start])
    peak, _ = _replay(events[:start] + events[start + 2 : end], start)  # without the mark and its release
    blocks: dict[int, int] = {}
    for _, address, size in events[start + 2 : end]:
        blocks.pop(address, None)
        if size > 0:
            blocks[address] = size
    return max(0, peak - before), sum(blocks.values())


def measure_peak(function: Callable[[], Any], device: torch.device | str | None = None) -> int:
    """Bytes that ``function`` allocates above the level at the call, at its worst moment.

    ``device``: where to look; by default the current CUDA device if CUDA has been used, else the CPU.
    Call the function once before: the first use of a kernel allocates workspaces that stay, and a plan cannot be made
    while it is measured (``MeasureError``).
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    gc.collect()
    return measure_memory(function, torch.device(device))[1]


def _events(prof: profile) -> list[tuple[int, int, int]]:
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


def _replay(events: list[tuple[int, int, int]], start: int = 0) -> tuple[int, int]:
    """(peak, level at the end); the peak from event ``start`` on."""
    blocks: dict[int, int] = {}
    level = peak = 0
    for k, (_, address, size) in enumerate(events):
        level -= blocks.pop(address, 0)
        if size > 0:
            blocks[address] = size
            level += size
        if k >= start:
            peak = max(peak, level)
    return peak, level
