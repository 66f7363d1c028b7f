"""Peaks of parts of a longer program: of the steps that a training library runs by itself."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import profile

from rkgb.device.profiled import events

# Bytes of blocks that mark a moment among the allocator's events; nothing else has these sizes.
BEGIN, END = 1_000_003, 1_000_033


class Sections:
    """One profiler session over a program; ``peaks``: bytes above the level at each ``begin()``, until its ``end()``.

    What is released between the two counts as released whenever in the session it was allocated. Planning
    measures memory too, and cannot happen in the session.
    """

    def __init__(self) -> None:
        self.peaks: list[int] = []

    def __enter__(self) -> Sections:
        gc.collect()
        self._profile = profile(use_cpu=True, profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        found = events(self._profile)
        begins = [k for k, event in enumerate(found) if event[2] == BEGIN]
        ends = [k for k, event in enumerate(found) if event[2] == END]
        for begin, end in zip(begins, ends, strict=True):
            before = replay(found[:begin])[1]
            self.peaks.append(replay(found[:begin] + found[begin + 2 : end], begin)[0] - before)

    def begin(self) -> None:
        """A section starts."""
        torch.empty(BEGIN, dtype=torch.uint8)

    def end(self) -> None:
        """It ends."""
        torch.empty(END, dtype=torch.uint8)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, each of its calls a section."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        return measured


def replay(recorded: list[tuple[int, int, int]], start: int = 0) -> tuple[int, int]:
    """(peak, level at the end) in bytes; the peak counts from event ``start`` on."""
    blocks: dict[int, int] = {}
    level = peak = 0
    for k, (_, address, size) in enumerate(recorded):
        level -= blocks.pop(address, 0) if size else 0
        if size > 0:
            blocks[address] = size
            level += size
        if k >= start:
            peak = max(peak, level)
    return peak, level
