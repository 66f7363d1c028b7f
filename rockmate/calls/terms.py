"""What is asked of the plans of one model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch

from rkgb.warn import warn
from rockmate.budget import Budget, Planned, show_bytes
from rockmate.calls.steps import Steps
from rockmate.errors import BudgetWarning, InfeasibleBudgetError, InputError
from rockmate.memory import MARGIN, Rest, rest_of
from rockmate.optimizers import OPTIMIZERS, local_bytes
from rockmate.planning.least import least_share
from rockmate.planning.options import PlanOptions
from rockmate.planning.planner import Planner


@dataclass
class Terms:
    """What is asked of the plans of one model.

    ``budget``: bytes, from the first plan on. ``least``: where no plan fits the budget, the one of least memory is
    made. ``always``: plan also where the budget does not bind. ``progress``: as for ``Rockmate``. ``made``: with the
    budget "auto", bytes of gradients that were there when the last step began; else 0. It is a part of the keys of
    calls, since such a budget is less by them.
    """

    budget: int | Budget
    options: PlanOptions
    progress: bool | None = None
    least: bool = False
    always: bool = False
    settled: tuple[Budget, int] | None = field(default=None, init=False)  # what it was, of a step of so many bytes
    steps: Steps = field(init=False)  # of the calls under this budget
    users: WeakSet[Any] = field(default_factory=WeakSet, init=False)  # handles of all models under this budget
    made: int = field(default=0, init=False)
    planned: bool = field(default=False, init=False)  # something was, so that a share is none of what comes
    _room: int | None = field(default=None, init=False)  # "auto": bytes for a step that makes all gradients
    _changes: int = field(default=0, init=False)  # of optimizers, when that was found
    _compared: bool = field(default=False, init=False)  # the loss took more than was declared, which was said

    def __post_init__(self) -> None:
        """Refuse what cannot be used when it is given, not at the first call that is planned."""
        if not (self.progress is None or isinstance(self.progress, bool)):
            raise InputError(f"progress={self.progress!r}: give True, False, or None for terminals only")
        self.steps = Steps(self)

    def __getstate__(self) -> dict[str, Any]:
        """Copies know of no step."""
        return {k: v for k, v in vars(self).items() if k not in ("steps", "users")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, users=WeakSet())
        self.steps = Steps(self)

    @contextmanager
    def settling(self, planner: Planner) -> Iterator[int]:
        """The budget in bytes, the same for all kinds of calls from now on if a plan is made within the context: shares
        are of the step of ``planner``.
        """
        before = self.budget, self.settled
        try:  # of what several modules share, or of calls that may be of one step, the largest counts
            yield self.settle(planner, largest=len(self.users) > 1 or self.supposes_one_call)
        except BaseException:
            self.budget, self.settled = before
            raise
        self.planned = True

    def settle(self, planned: Planned, *, largest: bool) -> int:
        """The budget in bytes: a share is of the first step that is ``planned``, or of the ``largest``."""
        if isinstance(self.budget, Budget):
            self.settled, self.budget = (self.budget, planned.eager_peak), self.bytes_of(self.budget, planned)
        elif largest and planned.eager_peak > self._peak:
            self.settle_step(planned.eager_peak)
        return self.budget

    def of_now(self, before: int) -> int:
        """The budget in bytes for what was planned ``before`` for so many: no more, unless it is a share of a step of
        which more is known now.
        """
        if not isinstance(self.budget, int):
            return before
        return self.budget if self.asked.share is not None else min(self.budget, before)

    @property
    def asked(self) -> Budget:
        """The budget as it was given; an empty one where that was bytes."""
        return self.budget if isinstance(self.budget, Budget) else self.settled[0] if self.settled else Budget()

    def settle_again(self, before: Planner, now: Planner) -> None:
        """A step has shown that it takes less than what was supposed, ``before``: a share of that is one of ``now``."""
        if self._peak == before.eager_peak:
            self.settle_step(now.eager_peak)

    def settle_step(self, peak: int) -> None:
        """A step takes ``peak`` bytes if nothing runs again: a share is one of that."""
        asked = self.asked
        if asked.share is not None and isinstance(self.budget, int):
            self.settled, self.budget = (asked, peak), int(peak * asked.share)

    @property
    def _peak(self) -> int:
        """Of the step that the budget was settled for."""
        return self.settled[1] if self.settled else 0

    @property
    def supposes_one_call(self) -> bool:
        """Whether the budget is a share of a step that is not known yet: of one call, though others may follow."""
        return self.asked.share is not None and self.steps.unknown

    def least_instead(self, error: InfeasibleBudgetError, planner: Planner, name: str, *, until_seen: str = "") -> int:
        """The bytes of the plan of least memory, with a warning, if that one is to run where no plan of ``planner``
        fits the budget; else raises ``error``. ``name``: of the model. ``until_seen``: what is supposed until a step
        has shown it; so long it may run.
        """
        asked, peak = self.settled or (Budget(), 0)
        if (
            not until_seen
            and planner.options.solver == "auto"
            and (share := self.as_share(error.min_budget, planner.eager_peak))
        ):
            error = InfeasibleBudgetError(f"{error}{share}", error.min_budget)
        if asked.share is not None and planner.eager_peak > peak:
            error = InfeasibleBudgetError(
                f"{error} The budget is {asked} of the first step that was planned, which takes {show_bytes(peak)}: "
                "give bytes, or plan the largest step first (sample=).",
                error.min_budget,
            )
        if until_seen:
            error = InfeasibleBudgetError(f"{error} {until_seen}", error.min_budget)
        elif not self.least:
            raise error.with_traceback(None) from None  # how the solver came to it tells users nothing
        with self.settling(planner):
            return least_instead(error, name)

    def as_share(self, least: int, eager: int) -> str:
        """What is said of the ``least`` budget of a step that takes ``eager`` bytes: the share that stands for it where
        it is given from the start; nothing if that would be one of another step.
        """
        return "" if self.planned else f' As a share of eager\'s peak, that is "{least_share(least, eager)}".'

    def bytes_known(self, device: torch.device) -> int | None:
        """The budget in bytes, if that does not depend on the model."""
        if isinstance(self.budget, Budget):
            if self.budget.share is not None:
                return None
            self.settled = self.budget, 0
            self.budget = self.budget.size or self._room_on(device)
        return self.budget

    # ------------------------------------------------------------------------- "auto"

    @property
    def is_auto(self) -> bool:
        """Whether the budget is what the device has left for a step."""
        asked = self.budget if isinstance(self.budget, Budget) else self.settled and self.settled[0]
        return bool(asked and asked.is_auto)

    @property
    def declared(self) -> int:
        """Bytes that the loss allocates, as far as the user said so."""
        return self.options.loss_memory or 0

    def compare_loss(self, seen: Planner) -> None:
        """Say once that the loss was ``seen`` to take more than the user said."""
        if self.options.loss_memory is None or not seen.room.seen or self._compared:
            return
        self._compared = True
        warn(
            f"the loss took {show_bytes(seen.room.total - seen.graphs.K.output_bytes)}, more than "
            f"loss_memory={show_bytes(self.declared)}, so that the step may have exceeded the budget: later ones are "
            "planned for what it took. Declare the most that it takes",
            BudgetWarning,
        )

    def bytes_of(self, asked: Budget, planned: Planned) -> int:
        """Bytes of a budget for the step of ``planned``."""
        return asked.bytes(planned, self._room_on)

    def rest(self, device: torch.device) -> Rest:
        """What is on the device beside a step."""
        return rest_of(self._models(), device)

    def _models(self) -> list[torch.nn.Module]:
        """All whose plans are under this budget."""
        return [model for user in self.users if (model := user.known_model) is not None]

    def _room_on(self, device: torch.device) -> int:
        """What a step like the last one may take."""
        if self._room is None:
            self._room, self._changes = self.rest(device).room(device), OPTIMIZERS.changes
        return max(0, self._room - self.made)

    def ask_device(self) -> None:
        """With "auto", what is free is found anew."""
        self._room = None

    def begin_step(self, device: torch.device) -> bool:
        """With "auto", a step begins: whether the last one is to be planned for other bytes.

        What is free is found anew when an optimizer's state was made. Less than half of the margin changes nothing.
        """
        before = self._room
        if before is None or self._changes != OPTIMIZERS.changes:
            self.ask_device()
            self._room_on(device)
            if before is not None and self._room is not None and abs(self._room - before) <= before // (2 * MARGIN):
                self._room = before
            elif isinstance(self.budget, int):
                return True
        own = (p for model in self._models() for p in model.parameters())
        self.made = sum(local_bytes(p) for p in own if p.is_leaf and p.grad is not None)
        if isinstance(self.budget, int):
            self.budget = self._room_on(device)
        return False


ALL_OUTPUTS = (
    "The loss is supposed to read all outputs that can have a gradient, as no step has shown yet which it reads: the "
    "next step is planned for what this one shows."
)

ONE_CALL = (
    "The budget is a share of one call, as no step has shown yet how many come before a backward: the next step is "
    "planned for what this one shows."
)


def least_instead(error: InfeasibleBudgetError, name: str) -> int:
    """The bytes of the plan of least memory of the model ``name``, with a warning that it runs."""
    warn(f"{name}: {error} The plan of least memory runs instead.", BudgetWarning)
    return error.min_budget


def is_least(on_infeasible: object) -> bool:
    """What ``on_infeasible`` asks for: ``Terms.least``."""
    if on_infeasible not in ("error", "least"):
        raise InputError(f'on_infeasible={on_infeasible!r}: give "error" or "least"')
    return on_infeasible == "least"
