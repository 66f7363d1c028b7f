"""Figures of a training run under a budget: what the plan predicts, and what steps take as they run."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from rkgb.cost.memory import timeline
from rkgb.device import kind_of
from rkgb.device.kind import Moment, Timeline
from rockmate.attach import attach, attached
from rockmate.budget import parse_budget
from rockmate.calls.attachment import Attachment
from rockmate.calls.look import Look
from rockmate.errors import InputError
from rockmate.follow.plan import FollowedPlan
from rockmate.planning.plan import Plan
from rockmate.signed import called_right, check_arguments


class Meter:
    """Attaches a model under ``budget``, and measures its steps, each between ``begin`` and ``end``.

    A step is one forward and its backward. Memory is measured in one step of each plan, the third under it at the
    earliest. Results are the same. ``handle``: what ``rockmate.attach`` returned; None before.

    Args:
        budget: Bytes or text, as for ``rockmate.attach``.
        plain_steps: As many steps run without a plan first, after one to warm up, and as many under it are timed. So
            they must fit the device without a plan, and their batches be of one size.
        options: What else ``rockmate.attach`` takes.

    Raises:
        BudgetError: The budget is no amount of memory.
        InputError: ``plain_steps`` is no number of steps.
    """

    @called_right
    def __init__(self, budget: int | float | str, *, plain_steps: int = 0, **options: Any) -> None:
        parse_budget(budget)
        check_arguments(attach, None, budget, **options)
        if not isinstance(plain_steps, int) or isinstance(plain_steps, bool) or plain_steps < 0:
            raise InputError(f"plain_steps={plain_steps!r} is no number of steps: give 0 or more")
        self.plain_steps = plain_steps
        self.handle: Attachment | None = None
        self._budget, self._options = budget, options
        self._model: torch.nn.Module | None = None
        self._forget()

    def _forget(self) -> None:
        self._plain: list[int] = []  # nanoseconds of steps without a plan
        self._planned: list[int] = []  # and of steps under the plan
        self._plan: Plan | FollowedPlan | None = None  # that of the last step
        self._peak: int | None = None  # bytes that one of them took
        self._start: Any = None
        self._made = 0
        self._look: _StepPeak | None = None

    def attach(self, model: torch.nn.Module) -> None:
        """Attach ``model``, now or after ``plain_steps``; one that is attached by this trains on. Raises what
        ``rockmate.attach`` raises.
        """
        self.drop()
        if self._model is model and self.handle is not None and attached(model) is self.handle:
            return
        self._forget()
        self._model, self.handle = model, None if self.plain_steps else attach(model, self._budget, **self._options)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def begin(self) -> None:
        """A forward comes next."""
        if self._model is None:
            raise InputError("no model was attached by this meter: call meter.attach(model) first")
        if self._look is None or not self._look.begin():
            self.drop()
        if self.handle is None and len(self._plain) > self.plain_steps:
            self.handle = attach(self._model, self._budget, **self._options)
        if self.handle is None or (self._peak is not None and len(self._planned) < self.plain_steps):
            self._start = kind_of(self._device).mark(self._device)
        elif self._plan is not None and self._look is None and self._peak is None and Look.possible():
            self._made = self.handle.plans_made
            self._look = _StepPeak(timeline(self._device))

    def end(self) -> None:
        """The backward is over. Without a ``begin``, nothing happens."""
        taken, peak = self._taken(), None
        if self._look is not None and self._look.begun:
            peak = self._look.read()
            self._look = None
        if self.handle is None:
            self._plain += taken
            return
        plan = self.handle.plan
        if plan is not self._plan:
            self._plan, self._peak, self._planned = plan, None, []
            return
        self._planned += taken
        if peak is not None and self.handle.plans_made == self._made:
            self._peak = peak

    def drop(self) -> None:
        """Forget a step that began, and that an error ended."""
        self._start = None
        if self._look is not None:
            self._look.close()
            self._look = None

    def figures(self) -> dict[str, float]:
        """What is known of the last plan: ``rockmate_predicted_peak`` and ``rockmate_measured_peak`` in bytes,
        ``rockmate_predicted_overhead`` and ``rockmate_measured_overhead`` as fractions of a step without a plan. If no
        ``plain_steps`` are timed, the latter is of one step, the 21st under the plan of a captured model. Empty before
        the first plan, and where the budget does not bind.
        """
        plan = self._plan
        if plan is None:
            return {}
        found = {
            "rockmate_predicted_peak": plan.predicted_peak,
            "rockmate_predicted_overhead": plan.predicted_overhead,
        }
        if self._peak is not None:
            found["rockmate_measured_peak"] = self._peak
        if self.plain_steps and len(self._planned) == self.plain_steps:
            found["rockmate_measured_overhead"] = median(self._planned) / median(self._plain[1:]) - 1
        elif self.handle is not None and self.handle.timed_plan and self.handle.timed_plan[0] is plan:
            found["rockmate_measured_overhead"] = self.handle.timed_plan[1]
        return found

    def _taken(self) -> list[int]:
        """Nanoseconds of the step, if it is timed."""
        start, self._start = self._start, None
        kind = kind_of(self._device)
        return [] if start is None else [kind.between(start, kind.mark(self._device))]


def missing(library: str, error: ModuleNotFoundError) -> ImportError:
    """Names what to install; ``error`` itself where it is not ``library`` that is missing."""
    if error.name != library:
        return error
    return ImportError(
        f"rockmate.integrations.{library} is for {library}, which is not installed: pip install {library}"
    )


class _StepPeak(Look):
    """A look at a whole step, forwards and backwards of any graph included. It gives way where a call is planned.

    It is made a step before, so that it knows what the step releases of what that one allocated, such as gradients.
    """

    whole = True

    def __init__(self, opened: Timeline | None) -> None:
        super().__init__(opened)
        atexit.register(self.close)  # torch crashes where a profiler that is open outlives the interpreter
        self.begun = False

    def begin(self) -> bool:
        """The step begins; False where one has begun before, and did not end."""
        if self.begun:
            return False
        self.begun = True
        if self.window is not None:
            self.window.mark()
        return True

    def watched(self, run: Callable[[], Any], ends: Any, stays: bool) -> Any:
        return run()

    def lets_call(self, planned: bool) -> bool:
        """As in ``Look``: all calls are of this step. Where one has to be planned, the look ends."""
        return True

    def read(self) -> int | None:
        """Bytes above the level at the beginning; None if another has taken the profiler."""
        moments = self.close()
        return moments[0].peak if moments else None

    def close(self) -> list[Moment] | None:
        atexit.unregister(self.close)
        return super().close()
