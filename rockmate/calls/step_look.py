"""Looks at whole steps, from the forward of a call to the end of its backward, without what others take meanwhile."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rkgb.cost.memory import timeline
from rkgb.device.kind import Moment
from rockmate.calls.look import FAILED, Look


class StepLook(Look):
    """The memory of a whole step: from now to the end of the next backward in this thread that reaches the call.

    ``reached``: it has. ``window`` is marked when it is over.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(timeline(device))
        self.reached = False
        self._gaps: list[_Gap] = []
        self.arrives = 0  # bytes of the gradients of its outputs, which the backwards of others may make
        self.before_gaps: list[tuple[Before, str]] = []  # while it waits for others, and for what

    def mark(self) -> None:
        """A moment is now."""
        if not self.in_gap:
            self._mark()

    def _mark(self) -> None:
        if self.window is not None:
            self.window.mark()

    @property
    def _marks(self) -> int:
        return 0 if self.window is None else self.window.marks

    def gap_begins(self) -> None:
        self._gap_begins("forward" if torch._C._current_graph_task_id() == -1 else "part of a backward")

    def _gap_begins(self, of: str) -> None:
        self._gaps.append(_Gap(of, not self.reached, self._marks))
        self._mark()

    def gap_ends(self) -> None:
        self._gaps[-1].ends = self._marks
        self._mark()

    def reach(self) -> None:
        """The backward comes to this call, with gradients that those of other calls may have made."""
        in_gap = self.in_gap
        self.resume()
        if in_gap and not self.reached:
            self._gaps[-1].arrived = self.arrives
        self.reached = True

    def close(self) -> list[Moment] | None:
        """The moments of this step; None if nothing was recorded."""
        seen = super().close()
        if seen is None:
            return None
        found, self.before_gaps = _without(seen, self._gaps)
        return found

    @abstractmethod
    def ended(self, moments: list[Moment], stays: bool) -> None:
        """The step is over; the last of ``moments`` is its end. ``stays``: its graph does."""

    def watched(self, run: Callable[[], Any], ends: Sequence[Any], stays: bool) -> Any:
        if not (self.reached or self.in_gap or self.whole):  # at first it may make what is for another call
            self._gap_begins("backward")
            self.gap_ends()
        try:
            result = run()
        except BaseException:  # it may have come from a hook before the backward came to the call
            self.abandon(FAILED[1])
            raise
        if not self.reached:
            self.resume()
            self.another()
        else:
            self.mark()
            seen = self.close()
            if seen is not None:
                self.ended(seen, stays)
        return result


@dataclass
class _Gap:
    """``of`` what it is. ``waits``: the backward of the call is to come. ``begins``, ``ends``: moments; -1 before.
    ``arrived``: bytes that it made for this step.
    """

    of: str
    waits: bool
    begins: int
    ends: int = -1
    arrived: int = 0


class Before(NamedTuple):
    """Where a gap begins: the ``level`` of the step, how many of its ``moments`` were before, and the ``peak`` since
    the last of these.
    """

    level: int
    moments: int
    peak: int


def _without(moments: list[Moment], gaps: list[_Gap]) -> tuple[list[Moment], list[tuple[Before, str]]]:
    """``moments`` without those of gaps, and where gaps begin while the call waits.

    Later levels are less by what each gap left, but for the bytes that arrived. A gap that does not end is the end.
    """
    found: list[Moment] = []
    levels: list[tuple[Before, str]] = []
    begins, ends = {gap.begins: gap for gap in gaps}, {gap.ends: gap for gap in gaps}
    beside, before = 0, 0
    for k, (level, peak, _) in enumerate(moments):
        if gap := begins.get(k):
            before = level
            if gap.waits:
                levels.append((Before(level - beside, len(found), found[-1].peak if found else 0), gap.of))
            if gap.ends < 0:
                found.append(Moment(level - beside, level - beside))
                break
        elif gap := ends.get(k):
            beside += level - before - gap.arrived
            if found:
                found[-1] = Moment(found[-1].level, max(found[-1].peak, peak - beside))
        else:
            found.append(Moment(level - beside, peak - beside))
    return found, levels
