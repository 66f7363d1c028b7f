"""Which steps of a kind of call are observed, and what is said where they cannot be."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from rkgb.cost.memory import is_measuring, refuse_within_measurements
from rkgb.warn import warn
from rockmate.calls.look import FAILED, Look
from rockmate.errors import BudgetWarning
from rockmate.follow.observed import FollowedLook
from rockmate.planning.plan import line_of_call

MOST_LOOKS = 16
"""Steps of one kind of call that are observed."""

MOST_UNSEEN = 3
"""Steps without a plan that could not be observed, after which that is said."""

_THREAD = "they run in another thread than the main one"
_ELSEWHERE = "they begin within a backward, or while another step is observed"
_NO_RECORD = "the memory of the process cannot be recorded now"


@dataclass(eq=False)
class Watch:
    """``name`` of the model, and the ``call`` in a few words. ``looks``: steps that were observed. ``unseen``: those in
    a row that were to be, and could not be to their end; ``why``: the reasons. ``failed``: steps in a row whose
    backward raised an error.
    """

    name: str
    call: tuple[str, ...]
    looks: int = 0
    unseen: int = 0
    failed: int = 0
    why: dict[str, None] = field(default_factory=dict)
    _last: FollowedLook | None = None
    _said: set[str] = field(default_factory=set)

    def look(self, device: torch.device, planned: bool) -> FollowedLook | None:
        """A look at the step that begins; None if there can be none. ``planned``: there is a plan for such steps."""
        if self.looks >= MOST_LOOKS or (Look.current is not None and (Look.current.in_gap or Look.current.whole)):
            return None  # where another call of the step is observed, this one is later
        if is_measuring():
            if not planned and not self.looks and not self.unseen:
                refuse_within_measurements()  # it runs once as it is, to be observed, and is measured the next time
            if not planned:
                self._say(
                    f"{self.name} has no plan for such steps yet. For a plan, this step is to be observed, but its "
                    "memory is measured: it may exceed the budget. Run it twice before you measure it"
                )
            return None
        if self._last is not None and self._last.why_not in FAILED:
            self.unseen -= 1  # it was no step
            self.failed += self._last.why_not == FAILED[1]  # that of a forward is seen
            if self.failed == MOST_UNSEEN and not planned:
                self._say(
                    f"{self.name} has no plan for calls with {line_of_call(self.call)}: each of {MOST_UNSEEN} steps "
                    f"raised an error ({self._last.why_not}), and a plan is made of a step that ends. What they keep "
                    "is decided as they run, and the budget does not hold"
                )
        elif self._last is not None and self._last.why_not:
            self.why[self._last.why_not] = None
        if self.unseen >= MOST_UNSEEN and not planned:
            self._say(
                f"{self.name} has no plan for calls with {line_of_call(self.call)}: {MOST_UNSEEN} steps could not be "
                f"observed from their forward to the end of one backward ({'; '.join(self.why)}). What they keep is "
                "decided as they run, and the budget does not hold"
            )
        self.unseen += 1
        self._last = None
        if not Look.possible():
            main = threading.current_thread() is threading.main_thread()
            self.why[_ELSEWHERE if main else _THREAD] = None
            return None
        look = FollowedLook(device)
        if look.window is None:
            look.close()
            self.why[_NO_RECORD] = None
            return None
        self.looks += 1
        self._last = look
        return look

    def saw(self) -> None:
        """A step was observed to its end."""
        self.unseen, self.failed, self._last = 0, 0, None
        self.why.clear()

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warn(message, BudgetWarning)
