"""The handle of an attached model: its plans, its budget, and what is told of them."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Self

import torch

from rkgb.sample import Call
from rockmate.budget import UNLIMITED, Budget, parse_budget, show_bytes
from rockmate.calls.capture import Capture
from rockmate.calls.captured_calls import CapturedCalls
from rockmate.calls.free import RememberedCall
from rockmate.calls.front import Front
from rockmate.calls.look import end_look
from rockmate.calls.others import unwatch_layers
from rockmate.calls.roomy import RoomyCalls
from rockmate.calls.runnable import Runnable
from rockmate.calls.surroundings import Hooks
from rockmate.calls.terms import Terms
from rockmate.errors import InfeasibleBudgetError, InputError
from rockmate.follow.engine import Followed
from rockmate.follow.known import Known
from rockmate.follow.plan import FollowedPlan
from rockmate.memory import Memory, StepBytes, memory_of, step_of
from rockmate.planning.artefact import SavedPlan
from rockmate.planning.options import PlanOptions
from rockmate.planning.plan import Plan
from rockmate.planning.planner import Planner
from rockmate.planning.report import line_of_call
from rockmate.planning.wrappers import take_call
from rockmate.tell import SILENT
from solvers import Frontier


@dataclass(frozen=True)
class PlannedCall:
    """A kind of call, in a few words for each of its inputs, and its plan; None if the budget does not bind for it.

    ``name``: the words of ``call`` in one text. Where they do not tell kinds apart, as in two calls that differ in what
    the model's Python reads, those after the first are numbered: "x float32[8, 64], train (2)".
    """

    call: tuple[str, ...] = field(repr=False)
    plan: Plan | FollowedPlan | None
    name: str


def named(kinds: Iterable[tuple[float, tuple[str, ...], Plan | FollowedPlan | None]]) -> list[PlannedCall]:
    """Kinds of calls in the order in which they are given; those of the same words are numbered as the number before
    them rises.
    """
    kinds = list(kinds)
    found = [PlannedCall(call, plan, ", ".join(call)) for _, call, plan in kinds]
    known: Counter[str] = Counter()
    for k in sorted(range(len(found)), key=lambda k: kinds[k][0]):
        name = found[k].name
        known[name] += 1
        if known[name] > 1:
            found[k] = replace(found[k], name=f"{name} ({known[name]})")
    return found


_IN_PLACE = "attach works in place, and returns no model: keep the model, handle = rockmate.attach(model, budget)"


class Handle(Front):
    """The plans of a model, and what can be asked of them."""

    follows = True
    last: CapturedCalls | None

    def __init__(self, model: torch.nn.Module, terms: Terms) -> None:
        super().__init__(type(model).__name__, terms, model)
        self.before = model.__dict__.get("_compiled_call_impl")  # what model.compile() has made
        self._capture = Capture(self)
        self._roomy = RoomyCalls(self)
        self._free: RememberedCall | None = None  # the last one for which the budget did not bind
        self._probe: Handle | None = None  # which knows its frontier
        self._followed: Followed | None = None  # where no plan of a captured graph will do
        self._hooks: Hooks = []  # that the model had then
        self._begun = 1  # times that one graph was tried
        self.reason = ""
        self.called = False  # whether any call came
        self._refused = self._detached = False
        terms.users.add(self)
        self._run_before: set[Hashable] = set()  # kinds of calls that ran while another one was looked at
        self._failing: set[Hashable] = set()  # kinds of calls that the model itself refused
        self._lazy = True  # whether there may be layers that have no sizes yet

    # ----------------------------------------------------------------- what users ask

    def is_around(self, part: torch.nn.Module) -> bool:
        """Whether calls of the model run under a plan, and ``part`` is one of its submodules."""
        model = None if self._detached or self._refused else self.known_model
        return model is not None and any(m is part for m in model.modules())

    @property
    def runnable(self) -> Runnable | None:
        """The plan of the last call, ready to run."""
        return self.last.ran if self.last is not None else None

    @property
    def plan(self) -> Plan | FollowedPlan | None:
        """The plan of the last call, or the one that replaced it after its backward; None if none was needed so far, if
        none fits the budget, or if the call was followed and computed something new.
        """
        if self._followed is not None:
            return self._followed.plan
        return None if (runnable := self.runnable) is None else runnable.plan

    @property
    def planned(self) -> Planner | Known:
        """What the plan of the last call was made of."""
        if self._followed is not None:
            assert self._followed.last is not None
            return self._followed.last
        assert self.runnable is not None
        return self.runnable.planner

    @property
    def plans_made(self) -> int:
        """How many kinds of calls were planned."""
        return self._made if self._followed is None else len(self._followed.plans)

    @property
    def plans_dropped(self) -> int:
        """Plans that went because more than ``runnable.MAX_PLANS`` kinds of calls came."""
        return self.cache.dropped

    @property
    def plans(self) -> list[PlannedCall]:
        """All kinds of calls so far, each under a name of its own, those of the last call first."""
        made: list[tuple[float, tuple[str, ...], Plan | FollowedPlan | None]]
        if self._followed is not None:
            made = [(k, call, plan) for k, (call, plan) in enumerate(self._followed.plans)]
        else:
            made = [(v.number, v.plan.call, v.plan) for v in self.cache.plans()]
        return named([*made, *((inf, rough.call, None) for rough in self._roomy.measured())])

    @property
    def budget(self) -> int:
        """As in ``Front``."""
        return super().budget

    @budget.setter
    def budget(self, budget: int | float | str) -> None:
        if self._detached:
            raise InputError(f"{self.name} was detached, and has no budget: rockmate.attach(model, {budget!r})")
        wanted = parse_budget(budget)
        self.terms.ask_device()
        try:
            self._set_budget(wanted)
        except InfeasibleBudgetError as error:
            raise self.explained(error, wanted.is_auto) from None

    def _set_budget(self, wanted: Budget) -> None:
        before = self.terms.budget
        end_look()  # what it is to say is for the budget of before
        if self._followed is not None:
            self._followed.set_budget(wanted)
        elif self.last is None:
            self.terms.budget = wanted
        else:
            self.last.set_budget(wanted)
        if self.terms.budget == before:
            return
        self._roomy.begin_budget()
        for other in list(self.terms.users):
            if other is not self:
                other.plan_anew()

    def _begin_step(self, inputs: list[torch.Tensor]) -> None:
        """The step before may be over. With the budget "auto", the device may have more or less left for one than
        before.
        """
        terms, device = self.terms, self.device(inputs)
        terms.steps.begin()
        if not terms.is_auto or terms.steps.waiting() or not terms.begin_step(device):
            return
        try:
            self._set_budget(Budget())
        except InfeasibleBudgetError:  # raised again where the call is planned, unless the terms want the least
            terms.budget = Budget()
            self.plan_anew()
        terms.begin_step(device)

    def step_bytes(self) -> StepBytes | None:
        """Of a step of the last plan; where there is none, of the largest step that was planned for or measured; None
        if none was.
        """
        if isinstance(plan := self.plan, Plan):
            return step_of(plan.problem, plan.schedule, plan.predicted_peak, plan.graph.gradient_bytes)
        steps = [] if self._followed is None else self._followed.step_bytes()
        steps = steps or [StepBytes(r.alone.backward, r.alone.kept, made=r.made) for r in self._roomy.measured()]
        return max(steps, key=lambda step: step.peak, default=None)

    def plan_anew(self) -> None:
        """The budget was set by another module that shares it."""
        self._roomy.begin_budget()
        self.cache.clear()
        self._run_before.clear()
        self.last = None

    def frontier(self) -> Frontier:
        """Time against memory, as ``rockmate.frontier``: for the last kind of call that was planned, which it names
        where there are others, or, where the budget does not bind, that ran first.
        """
        if self._detached:
            raise InputError(f"{self.name} was detached, and its plans are gone: use rockmate.frontier(model, sample)")
        followed = self._followed if self._followed is not None and self._followed.last is not None else None
        if (plans := followed or self.last) is not None:
            found = plans.frontier()
            return replace(found, call=line_of_call(self.planned.call)) if len(self.plans) > 1 else found
        if self._free is not None:
            with self._free.again(self.model) as call:
                if self._probe is None:
                    self._probe = self.probe(self.model, self.terms.options, self.terms.progress)
                    self._probe.plan_for(call)
                return self._probe.frontier()
        raise InputError(
            f"{self.name} cannot be planned and runs as it is, as a warning said, so it has no frontier"
            if self._refused
            else f"no step of {self.name} was seen yet, so there is no frontier. Call the model with gradients once, "
            "in the main thread and outside of profilers, then ask again; or give a sample of its arguments: "
            "rockmate.frontier(model, sample)"
        )

    @classmethod
    def probe(cls, model: torch.nn.Module, options: PlanOptions, progress: bool | None) -> Self:
        """One whose plans run nothing again, apart from all else that is planned for ``model``."""
        made = cls(model, Terms(Budget(UNLIMITED), options, progress, always=True))
        made.log = SILENT
        return made

    def note_free_call(self) -> None:
        self._free, self._probe = RememberedCall(self.model, self.inside.call), None

    def detach(self) -> None:
        """The model runs as it did before ``attach``."""
        if (model := self.known_model) is not None:
            if model.__dict__.get("_compiled_call_impl") is self:
                take_call(model)
                if self.before is not None:
                    model._compiled_call_impl = self.before
            unwatch_layers(model, self)
        self._detached = True
        self._forget()

    def __repr__(self) -> str:
        budget = self.terms.budget
        size = show_bytes(budget) if isinstance(budget, int) else budget
        count = sum(known.plan is not None for known in self.plans)
        return f"<rockmate.attach: {self.name}, budget {size}, {count} plan{'s' * (count != 1)}{self._no_plan()}>"

    def _no_plan(self) -> str:
        """Why ``plan`` is None, where it is."""
        if self._detached or self._refused:
            return ": detached" if self._detached else ": runs as it is, as a warning said"
        if self.plan is not None:
            return ""
        if self._followed is not None and not self.ran_freely:
            return "; none for what the last call computed, which is new or fits no plan"
        if self._roomy.has_measured_binding:
            return ": a step was measured, and the next one like it is planned"
        trained = self.known_model is None or any(p.requires_grad for p in self.model.parameters())
        none = f": no step with gradients yet{'' if trained else ', as no parameter needs one'}"
        return ": the budget does not bind" if self._free is not None else none

    def _forget(self) -> None:
        """No plan is known, nor a way in which calls run."""
        self._capture.clear()
        self.cache.clear()
        self.families.clear()
        self._run_before.clear()
        self.terms.steps.forget(self)
        self._roomy.clear()
        self._followed = self.last = self._free = self._probe = None

    def __getattr__(self, name: str) -> Any:
        """Raises ``AttributeError``, of the model's names with what was mistaken."""
        more = f": {_IN_PLACE}" if hasattr(torch.nn.Module, name) else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{more}")

    # ------------------------------------------------------------- the device where it lies

    @property
    def model(self) -> torch.nn.Module:
        """The model. Raises ``InputError`` when it is gone."""
        model = self._model()
        if model is None:
            raise InputError(f"the model that this plan was for is gone: {_IN_PLACE}")
        return model

    def memory(self) -> Memory:
        """Where the device's memory goes in the worst moment of a step of the last plan; ask between steps."""
        return self._memory(self.step_bytes())

    def _memory(self, step: StepBytes | None) -> Memory:
        device = self.device()
        return memory_of(self.terms.rest(device), step, device, with_margin=self.terms.is_auto)

    def explained(self, error: InfeasibleBudgetError, auto: bool) -> InfeasibleBudgetError:
        """``error`` with the model's name, without its frames. With the budget "auto", it says where the memory of the
        device goes.
        """
        said = f"{self.name}: {error}{self.terms.steps.of_one(error)}"
        if True in self.said_checkpoints:
            said += " Parts of it keep checkpoints of their own (torch.utils.checkpoint): remove those first."
        if auto:
            self.terms.ask_device()
            table = self._memory(StepBytes(error.min_budget, made=self.terms.rest(self.device()).missing))
            said = f"{self.name} cannot be trained on this device, whatever runs again:\n\n{table}\n\n{error}"
        return InfeasibleBudgetError(said, error.min_budget)

    @abstractmethod
    def plan_for(self, call: Call, saved: SavedPlan | None = None) -> None:
        """Plan such calls; nothing runs. ``saved``: this plan is taken."""
