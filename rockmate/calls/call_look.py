"""A close look at one planned call, until its backward begins."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from rkgb.cost.memory import window
from rkgb.device.kind import Window
from rockmate.calls.look import Look


class Seen(Protocol):
    """The call that is looked at: see ``rockmate.calls.observe.ObservedCall``."""

    observer: Any
    look: Any

    def roots_of(self, ends: Sequence[Any]) -> tuple[int, ...]:
        """The outputs that a backward from ``ends`` comes to first."""

    def note(self, roots: tuple[int, ...] | None, seen: tuple[int, int, int] | None) -> None:
        """The backward is over."""


class CallLook(Look):
    """Of one call that is planned: the memory between its phases, and the ends that its backward starts from."""

    window: Window | None

    def __init__(self, device: torch.device | None) -> None:
        """``device``: whose memory is to be recorded, None for none."""
        super().__init__(None if device is None else window(device))
        self.arrived = False  # the gradients of the outputs may have come in a gap
        self.call: weakref.ref[Seen] | None = None
        self.then: Callable[[], None] | None = None  # is called when the backward is over and was noted

    def begin(self, call: Seen) -> None:
        """Forward returns now."""
        self.call = weakref.ref(call)
        if self.window is not None:
            self.window.begin()

    def reach(self) -> None:
        """The backward has come to the outputs, with gradients that those of other calls may have made."""
        self.arrived = self.in_gap
        self.resume()
        if self.window is not None:
            self.window.mark()

    def close(self) -> tuple[int, int, int] | None:
        """As in ``Look``; see ``Window.close``."""
        self.then = None
        seen: tuple[int, int, int] | None = super().close()
        return seen

    def watched(self, run: Callable[[], Any], ends: Sequence[Any], stays: bool) -> Any:
        """As in ``Look``."""
        call = self.call() if self.call is not None else None
        if call is None:
            self.abandon()
            return run()
        roots = call.roots_of(ends)
        if not roots:
            try:
                return run()
            finally:
                self.resume()
                self.another()
        done = False
        try:
            result = run()
            done = True
            return result
        finally:
            then, opened, seen = self.then, self.window, self.close()
            if opened is not None:
                call.observer.waits = max(call.observer.waits, opened.at_pauses)
            call.look = None
            if stays:  # what stays is no loss's
                seen = None
            if seen is not None and self.arrived:
                peak, level, left = seen
                level += sum(call.observer.bytes[k] for k in roots)
                seen = max(peak, level), level, left
            if done:
                call.note(roots, seen)
                if then is not None:
                    then()
