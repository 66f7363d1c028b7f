"""What the graphs of one model share: what is asked of their plans, the plans, and what is said of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

import torch

from rockmate.budget import Budget, show_bytes
from rockmate.calls.families import Families
from rockmate.calls.look import Look
from rockmate.calls.runnable import PlanCache, Runnable
from rockmate.calls.terms import Terms
from rockmate.errors import InputError
from rockmate.follow.plan import FollowedPlan
from rockmate.pieces.piece import Piece
from rockmate.planning.artefact import SavedPlan
from rockmate.planning.finder import CARRIED
from rockmate.planning.plan import Plan, line_of_call
from rockmate.tell import LOG, costly, described, planned_line
from solvers import Frontier


class PlannedGraph(Protocol):
    """What is asked of the graph whose plan ran last: see ``rockmate.calls.calls.Calls``."""

    last: Runnable | None

    def frontier(self) -> Frontier:
        """Time against memory for the last kind of call."""

    @property
    def ran(self) -> Runnable | None:
        """The plan that ran: ``last``, or that for its share of a step's budget."""

    def set_budget(self, budget: Budget) -> None:
        """Plan the last kind of call for another budget."""


_MANY = (2, 32, 128, 512)
"""Other sizes than the first one, or numbers, at which it is said what to do about them."""


TIMED = 20
"""Planned steps after which one is timed."""

_AS_IF_NOT = "It is planned as if it did not, with the same results; without these calls the first steps take less time"
_STAY = (
    "Some of them stay as they are, since results may be others without (selective ones, those that write, draw, or "
    "read what changes later, and reentrant ones that share tensors): remove these calls, so that the plan decides "
    "what runs again there"
)

ANOTHER_BUDGET = "the budget of now"
"""Why calls that had a plan are planned again."""

LONG = 1.0
"""Seconds of a step from which on it is said what took them."""


class Front:
    """What captured graphs have in common: the plans, and what is said of them.

    ``name``: of what is planned. ``terms``: what is asked of plans. ``last``: whose plan ran last. ``saved``: a plan
    that is to be taken. ``follows``: calls are followed whose graph cannot be planned. ``timed_plan``: one, and what
    its overhead was measured to be. ``said_checkpoints``: as in ``say_checkpoints``.
    """

    follows = False

    def __init__(self, name: str, terms: Terms) -> None:
        self.name, self.terms, self.cache, self.families = name, terms, PlanCache(), Families()
        self.pieces: dict[Hashable, Piece] = {}  # by their identity: code that is compiled once
        self.last: PlannedGraph | None = None
        self.ran_freely = False  # the last call needed no plan
        self.saved: SavedPlan | None = None
        self._made = 0
        self._before: tuple[str, ...] | None = None
        self._came: dict[tuple[str, ...], dict[Hashable, set[Hashable]]] = {}  # calls, by what is said and by graphs
        self._others = 0  # sizes and numbers that came after the first
        self.timed_plan: tuple[Plan, float] | None = None
        self._steps: int | None = 0  # under a plan that runs something again, until one of them was timed
        self.said_checkpoints: set[bool] = set()
        self._said_needs_data = False
        self.rehearses = False  # training steps run that are no training: see rockmate.calls.rehearsal
        self.inside = threading.local()  # what is known of the call that this thread is in

    def note_free_call(self) -> None:
        """The call that this thread is in needs no plan, as far as it is known."""

    def say_checkpoints(self, stay: bool = False) -> None:
        """Say once that the model checkpoints itself. ``stay``: parts that do so still do."""
        if stay not in self.said_checkpoints:
            self.said_checkpoints.add(stay)
            LOG.info(
                "%s checkpoints parts of itself (torch.utils.checkpoint, gradient_checkpointing_enable()). %s",
                *(self.name, _STAY if stay else _AS_IF_NOT),
            )

    def bytes_of_missing_gradients(self) -> dict[str, int]:
        """Bytes of the gradients of the model's parameters that are not there, by name. No model: none."""
        return {}

    def device(self, others: Iterable[torch.Tensor] = ()) -> torch.device:
        """Where the model lies, or the ``others`` if it has no tensors."""
        return next((t.device for t in others), torch.device("cpu"))

    @property
    def budget(self) -> int:
        """Bytes that one forward and its backward may allocate. It is set as it is given to ``attach``: shares are of
        the last call. When it is set, only the solver runs again.
        """
        budget = self.terms.budget
        size = budget.size if isinstance(budget, Budget) else budget
        if size is None:
            raise InputError(
                f"the budget is {budget}, so its bytes are known when a step was planned: call the model with "
                "gradients first (the same holds for a copy of a model, which plans anew)"
            )
        return size

    @property
    def modes(self) -> list[Any]:
        """The caller's modes, which are not in force while a call is captured or planned."""
        return getattr(self.inside, "modes", None) or []

    @property
    def only_plans(self) -> bool:
        """Whether this thread plans, and runs nothing."""
        return False

    def capture_seconds(self) -> dict[str, float]:
        """Seconds from the beginning of this thread's call until now, as the phase "capture" of the set-up;
        those in which pieces were compiled are the phase "compile".

        Empty if TorchDynamo captured nothing in this call, or if that was told already.
        """
        captured, self.inside.captured = getattr(self.inside, "captured", False), False
        compiled = self.inside.__dict__.pop("compiled", 0.0)
        if not captured:
            return {}
        seconds = {"capture": time.perf_counter() - self.inside.began - compiled}
        return {**seconds, "compile": compiled} if compiled else seconds

    def described(self, names: list[str], values: list[Any]) -> tuple[str, ...]:
        """A call in a few words."""
        return described(names, values, None)

    def tell(self, runnable: Runnable, kind: tuple[Hashable, Hashable]) -> None:
        """Say that a plan was made. ``kind``: the graph, and what it is given."""
        if runnable.planner.scaled and (runnable.plan.solver == CARRIED or not runnable.plan.recomputed):
            seconds = runnable.plan.setup_seconds
            LOG.log(
                logging.INFO if sum(seconds.values()) > LONG else logging.DEBUG,
                "%s: the plan is carried over in %.1f s to %s%s",
                *(self.name, sum(seconds.values()), line_of_call(runnable.plan.call)),
                f", of which its capture took {seconds['capture']:.1f} s" if "capture" in seconds else "",
            )
        else:
            self._made += runnable.planner.saved is None
            LOG.info("%s", planned_line(self.name, runnable.plan.call, runnable.plan, self._made, self._before))
            self._before = runnable.plan.call
        self._tell_others(runnable.plan.call, *kind)

    def _tell_others(self, call: tuple[str, ...], graph: Hashable, given: Hashable) -> None:
        """Say how many other sizes and numbers have come. Another ``graph`` of the same calls is none."""
        if self._others == _MANY[-1]:
            return
        self._came.setdefault(call, {}).setdefault(graph, set()).add(given)
        before, self._others = self._others, sum(max(map(len, by.values())) for by in self._came.values()) - 1
        if self._others > before and self._others in _MANY:
            LOG.info(
                "%s: %d other sizes, or numbers that its Python has, have come so far, and the first step of each "
                "takes longer: give a call of the largest size (sample=), pad inputs to fewer lengths, and keep "
                "numbers that change at every step in tensors",
                *(self.name, self._others),
            )

    def timed(self, plan: Plan) -> Callable[[int, int], None] | None:
        """What the times of a step under ``plan`` are told to, if it is the one that is timed."""
        if self._steps is None or self.terms.progress is False or not plan.recomputed or Look.current is not None:
            return None
        self._steps += 1
        if self._steps <= TIMED:
            return None
        self._steps = None

        def told(total: int, again: int) -> None:
            self.timed_plan = plan, again / max(1, total - again)
            LOG.info(
                "%s: what runs again took %.1f %% of the rest of a step, measured after %d planned steps; %.1f %% was "
                "predicted",
                *(self.name, 100 * self.timed_plan[1], TIMED, 100 * plan.predicted_overhead),
            )

        return told

    def tell_anew(self, plan: Plan | FollowedPlan, seconds: float, why: str) -> None:
        """Say that calls which had a plan got ``plan`` in ``seconds``, and ``why``."""
        LOG.log(
            logging.INFO if seconds > LONG else logging.DEBUG,
            "%s: planned again in %.1f s, for %s: predicted peak %s, budget %s, %.1f %% more time%s",
            *(self.name, seconds, why, show_bytes(plan.predicted_peak), show_bytes(plan.budget)),
            *(100 * plan.predicted_overhead, costly(plan.predicted_overhead)),
        )

    def tell_needs_data(self) -> None:
        """Say once that each new size is traced and run as a whole."""
        if not self._said_needs_data:
            self._said_needs_data = True
            LOG.info(
                "%s: what its operations make of other sizes does not show without data, so the first step of each new "
                "size takes as long as planning one: pad inputs to fewer lengths",
                self.name,
            )

    def tell_again(self, runnable: Runnable, new: Runnable) -> None:
        """Say that ``new`` was measured and solved for sizes that ran by the costs of others, in ``runnable``."""
        if new is not runnable:
            LOG.info(
                "%s: measured and planned anew in %.1f s for %s, whose steps had run nodes again for as long: %.1f %% "
                "more time",
                *(self.name, sum(new.plan.setup_seconds.values()), line_of_call(runnable.plan.call)),
                100 * new.plan.predicted_overhead,
            )
