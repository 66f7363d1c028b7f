"""Looks at whole steps, from the forward of a call to the end of its backward, without what others take meanwhile."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rkgb.cost.memory import timeline
from rkgb.device.kind import Moment, Timeline
from rkgb.storages import has_memory, memory_of
from rockmate.calls.look import FAILED, InGraph, Look


class StepLook(Look):
    """The memory of a whole step: from now to the end of the next backward in this thread that reaches the call.

    ``reached``: it has. ``window`` is marked when it is over.
    """

    window: Timeline | None

    def __init__(self, device: torch.device) -> None:
        super().__init__(timeline(device))
        self.reached = False
        self._marks = 0
        self._gaps: list[int] = []  # moments at which gaps begin and end, in turns
        self._of: list[str] = []  # what each gap is for
        self._waiting = 0  # of these, before its own backward
        self._arrived: list[int] = []  # bytes that each gap made for this step
        self.arrives = 0  # bytes of the gradients of its outputs, which the backwards of others may make
        self.before_gaps: list[tuple[Before, str]] = []  # while it waits for others, and for what

    def mark(self) -> None:
        """A moment is now."""
        if not self.in_gap:
            self._mark()

    def _mark(self) -> None:
        if self.window is not None:
            self.window.mark()
            self._marks += 1

    def gap_begins(self) -> None:
        """As in ``Look``."""
        self._gap_begins("forward" if torch._C._current_graph_task_id() == -1 else "part of a backward")

    def _gap_begins(self, of: str) -> None:
        self._gaps.append(self._marks)
        self._of.append(of)
        self._waiting += not self.reached
        self._mark()

    def gap_ends(self) -> None:
        """As in ``Look``."""
        self._gaps.append(self._marks)
        self._arrived.append(0)
        self._mark()

    def reach(self) -> None:
        """The backward comes to this call, with gradients that those of other calls may have made."""
        in_gap = self.in_gap
        self.resume()
        if in_gap and not self.reached:
            self._arrived[-1] = self.arrives
        self.reached = True

    def close(self) -> list[Moment] | None:
        """The moments of this step; None if nothing was recorded."""
        seen: list[Moment] | None = super().close()
        if seen is None:
            return None
        found, levels = _without(seen, self._gaps, self._arrived)
        self.before_gaps = list(zip(levels, self._of, strict=False))[: self._waiting]
        return found

    @abstractmethod
    def ended(self, moments: list[Moment], stays: bool) -> None:
        """The step is over; the last of ``moments`` is its end. ``stays``: its graph does."""

    def watched(self, run: Callable[[], Any], ends: Sequence[Any], stays: bool) -> Any:
        """As in ``Look``."""
        done = False
        if not (self.reached or self.in_gap or self.whole):  # at first it may make what is for another call
            self._gap_begins("backward")
            self.gap_ends()
        try:
            result = run()
            done = True
            return result
        finally:
            if not done:  # it may have come from a hook before the backward came to the call
                self.abandon(FAILED[1])
            elif not self.reached:
                self.resume()
                self.another()
            else:
                self.mark()
                seen = self.close()
                if seen is not None:
                    self.ended(seen, stays)


class Before(NamedTuple):
    """Where a gap begins: the ``level`` of the step, and how many of its ``moments`` were before."""

    level: int
    moments: int


def _without(moments: list[Moment], gaps: list[int], arrived: list[int]) -> tuple[list[Moment], list[Before]]:
    """``moments`` without those of gaps, and where gaps begin.

    Later levels are less by what each gap left, but for the bytes that ``arrived``. A gap that does not end is the end.
    """
    found: list[Moment] = []
    levels: list[Before] = []
    begins, ends = gaps[::2], gaps[1::2]
    beside, before = 0, 0
    for k, (level, peak) in enumerate(moments):
        if k in begins:
            before = level
            levels.append(Before(level - beside, len(found)))
            if begins.index(k) == len(ends):
                found.append(Moment(level - beside, level - beside))
                break
        elif k in ends:
            beside += level - before - arrived[ends.index(k)]
            if found:
                found[-1] = Moment(found[-1].level, max(found[-1].peak, peak - beside))
        else:
            found.append(Moment(level - beside, peak - beside))
    return found, levels


class WholeLook(StepLook):
    """A look at a step that runs without a plan."""

    def __init__(
        self, device: torch.device, forward_measured: Callable[[int], None], measured: Callable[[int, int], None]
    ) -> None:
        """``forward_measured`` is called with what the call keeps, ``measured`` with the peak of the step, bytes above
        the level at the beginning, and the bytes of outputs that went before the backward, which a caller may hold. The
        first is known where another forward comes before the backward, too.
        """
        super().__init__(device)
        self.forward_measured, self.measured = forward_measured, measured
        self._outputs: list[tuple[StorageWeakRef, int]] = []  # their memory, and its bytes
        self._gone = 0
        self.mark()

    def follow(self, outputs: Sequence[Any]) -> None:
        """These are what the call returns."""
        self.mark()
        hook = InGraph(self).hook(self._reach)
        storages = {id(s): s for t in outputs if isinstance(t, torch.Tensor) and has_memory(t) for s in [memory_of(t)]}
        self._outputs = [(StorageWeakRef(s), s.nbytes()) for s in storages.values()]
        for t in outputs:
            if isinstance(t, torch.Tensor) and t.grad_fn is not None:
                self.arrives += t.nbytes
                t.grad_fn.register_prehook(hook)

    def _reach(self, _: Any) -> None:
        if not self.reached:
            self._gone = sum(size for memory, size in self._outputs if memory.expired())
        self.reach()

    def ended(self, moments: list[Moment], stays: bool) -> None:
        """As in ``StepLook``."""
        self.measured(max(moment.peak for moment in moments), self._gone)

    def close(self) -> list[Moment] | None:
        """As in ``Look``."""
        seen: list[Moment] | None = super().close()
        if seen is not None and len(seen) > 1:
            self.forward_measured(seen[1].level)
        return seen
