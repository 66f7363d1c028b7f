"""What the graphs of one model share: what is asked of their plans, the plans, and what is said of them."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

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
from rockmate.planning.plan import Plan
from rockmate.planning.planner import lacks_gradient
from rockmate.planning.report import line_of_call
from rockmate.tell import ANOTHER_OVERHEAD, LOG, LONG, costly, described, planned_line, shapes_of

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


class Front:
    """What captured graphs have in common: the plans, and what is said of them.

    ``name``: of what is planned. ``terms``: what is asked of plans. ``last``: the ``CapturedCalls`` that planned last.
    ``saved``: a plan that is to be taken. ``follows``: calls are followed whose graph cannot be planned.
    ``timed_plan``: one, and what its overhead was measured to be. ``said_checkpoints``: as in ``say_checkpoints``.
    """

    follows = False

    def __init__(self, name: str, terms: Terms, model: torch.nn.Module | None = None) -> None:
        self._model: Callable[[], torch.nn.Module | None] = (lambda: None) if model is None else weakref.ref(model)
        self.name, self.terms, self.cache, self.families = name, terms, PlanCache(), Families()
        self.log = LOG  # what is said
        self.pieces: dict[Hashable, Piece] = {}  # by their identity: code that is compiled once
        self.last: Any = None
        self.ran_freely = False  # the last call needed no plan
        self.saved: SavedPlan | None = None
        self._made = 0
        self._came: dict[tuple[str, ...], dict[Hashable, set[Hashable]]] = {}  # calls, by what is said and by graphs
        self._others = 0  # sizes and numbers that came after the first
        self._first, self._larger = 0, False  # bytes of the first step that was planned; whether one takes more
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
            said = "checkpoints parts of itself (torch.utils.checkpoint, gradient_checkpointing_enable())"
            self.log.info("%s %s. %s", self.name, said, _STAY if stay else _AS_IF_NOT)

    @property
    def known_model(self) -> torch.nn.Module | None:
        """The model; None when it is gone, or there is none."""
        return self._model()

    def bytes_of_missing_gradients(self) -> dict[str, int]:
        """Bytes of the gradients of the model's parameters that are not there, by name."""
        named = () if (model := self.known_model) is None else model.named_parameters()
        return {name: p.nbytes for name, p in named if lacks_gradient(p)}

    def device(self, others: Iterable[torch.Tensor] = ()) -> torch.device:
        """Where the model lies, or the ``others`` if it has no tensors."""
        own = () if (model := self.known_model) is None else itertools.chain(model.parameters(), model.buffers())
        return next((t.device for t in itertools.chain(own, others)), torch.device("cpu"))

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
        return getattr(self.inside, "planning", False)

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

    @contextmanager
    def telling_capture(self) -> Iterator[None]:
        """Within a call that was captured: say what that took, unless a plan comes of the call, which says so."""
        seconds = time.perf_counter() - self.inside.began
        yield
        if self.capture_seconds():
            self._say(f"TorchDynamo captured another kind of call in {seconds:.1f} s, which needs no new plan", seconds)

    def described(self, names: list[str], values: list[Any]) -> tuple[str, ...]:
        """A call in a few words."""
        return described(names, values, None)

    def _say(self, text: str, seconds: float = inf) -> None:
        """Log ``text``, which is news where it took long."""
        self.log.log(logging.INFO if seconds > LONG else logging.DEBUG, "%s: %s", self.name, text)

    def tell(self, runnable: Runnable, kind: tuple[Hashable, Hashable]) -> None:
        """Say that a plan was made. ``kind``: the graph, and what it is given."""
        plan = runnable.plan
        if runnable.planner.scaled and (plan.solver == CARRIED or not plan.recomputed):
            parts = plan.setup_seconds
            seconds = sum(parts.values())
            capture = f", of which its capture took {parts['capture']:.1f} s" if "capture" in parts else ""
            self._say(f"the plan is carried over in {seconds:.1f} s to {line_of_call(plan.call)}{capture}", seconds)
        else:
            self._made += runnable.planner.saved is None
            like = min(reversed(self._came), key=lambda call: len({*call} ^ {*plan.call}), default=None)
            self.log.info("%s", planned_line(self.name, plan.call, plan, self._made, like))
        self._first = self._first or runnable.planner.eager_peak
        self._larger |= runnable.planner.eager_peak > self._first
        self._tell_others(plan.call, *kind)

    def _tell_others(self, call: tuple[str, ...], graph: Hashable, given: Hashable) -> None:
        """Say how many other sizes and numbers have come. Another ``graph`` of the same calls is none."""
        if self._others == _MANY[-1]:
            return
        self._came.setdefault(call, {}).setdefault(graph, set()).add(given)
        before, self._others = self._others, sum(max(map(len, by.values())) for by in self._came.values()) - 1
        if self._others > before and self._others in _MANY:
            several = len({(*shapes_of(said),) for said in self._came}) > 1
            largest = "give a call of the largest size (sample=), " * self._larger  # if the first was not that
            sizes = f"{largest}pad inputs to fewer lengths, and " * several
            self._say(
                f"{self._others} other {'sizes, or ' * several}numbers with which forward computes, have come so far, "
                f"and the first step of each takes longer: {sizes}keep numbers that change at every step in tensors"
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
            measured = again / max(1, total - again)
            self.timed_plan = plan, measured
            self._say(
                f"what runs again took {100 * measured:.1f} % of the rest of a step (forward, loss and backward), "
                f"measured after {TIMED} planned steps; {100 * plan.predicted_overhead:.1f} % was predicted, of the "
                "model's operations without the loss"
            )

        return told

    def tell_anew(
        self, plan: Plan | FollowedPlan, seconds: float, why: str, before: Plan | None = None, took: int = 0
    ) -> None:
        """Say that calls which had a plan got ``plan`` in ``seconds``, and ``why``. ``before``: that plan, under which
        a step ``took`` so many bytes; another overhead, or more than the budget, is news.
        """
        peak, budget, overhead = show_bytes(plan.predicted_peak), show_bytes(plan.budget), plan.predicted_overhead
        is_news = before is not None and abs(overhead - before.predicted_overhead) > ANOTHER_OVERHEAD
        if before is not None and took > before.budget:
            is_news, why = True, f"{why} (that step took {show_bytes(took)} of {show_bytes(before.budget)})"
        self._say(
            f"planned again in {seconds:.1f} s, for {why}: predicted peak {peak}, budget {budget}, "
            f"{100 * overhead:.1f} % more time{costly(overhead)}",
            inf if is_news else seconds,
        )

    def tell_needs_data(self) -> None:
        """Say once that each new size is traced and run as a whole."""
        if not self._said_needs_data:
            self._said_needs_data = True
            self._say(
                "what its operations make of other sizes does not show without data, so the first step of each new "
                "size takes as long as planning one: pad inputs to fewer lengths"
            )

    def tell_again(self, runnable: Runnable, new: Runnable) -> None:
        """Say that ``new`` was measured and solved for sizes that ran by the costs of others, in ``runnable``."""
        if new is not runnable:
            self._say(
                f"measured and planned anew in {sum(new.plan.setup_seconds.values()):.1f} s for "
                f"{line_of_call(runnable.plan.call)}, whose steps had run nodes again for as long: "
                f"{100 * new.plan.predicted_overhead:.1f} % more time"
            )
