"""The calls of one module under a budget: a plan for each kind of call, made when the first one comes."""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch

from rkgb.cost.measure import Known, check_costs
from rkgb.cost.memory import refuse_within_measurements
from rkgb.device import kind_of
from rkgb.graphs import S_graph, Structure
from rkgb.probe.resize import Point, resized, sizes_of
from rkgb.program import source_values
from rkgb.trace.capture import current_mode
from rkgb.trace.guards import GuardFailed
from rkgb.trace.patches import TRACING
from rkgb.trees import flatten, tensors_of, unflatten
from rockmate.budget import Budget
from rockmate.calls.families import Families, Family
from rockmate.calls.observe import abandoned
from rockmate.calls.python_state import PythonState, in_key
from rockmate.calls.surroundings import settings, undisturbed
from rockmate.calls.variants import (
    PlanCache,
    Variant,
    adapted,
    as_before,
    carried_variant,
    make_first,
    make_variant,
    reads_more,
)
from rockmate.errors import BudgetWarning, InfeasibleBudgetError, InputError, VariantLimitError
from rockmate.planning.artefact import SavedPlan
from rockmate.planning.disk import Disk
from rockmate.planning.kept import KeptCosts
from rockmate.planning.planner import CARRIED, Planner, check_solver, checked_loss, make_planner
from rockmate.progress import Progress, Report
from rockmate.run.executor import CallState
from rockmate.tell import LOG, described, planned_line
from solvers import Frontier
from solvers.interrupts import Heeded

MAX_VARIANTS = 16
"""Plans for calls that differ only in what the module's Python reads from tensors."""


@dataclass
class Terms:
    """What is asked of plans. ``budget``: bytes, from the first plan on; ``time_limit``: seconds; ``least``: where no
    plan fits the budget, the one of least memory is made; ``always``: plan also where the budget does not bind;
    ``disk``: where plans are kept, if anywhere; the rest as for ``Rockmate``.
    """

    budget: int | Budget
    costs: str = "measured"
    loss_memory: int | None = None
    time_limit: float = inf
    progress: bool | None = None
    least: bool = False
    always: bool = False
    solver: str = "auto"
    disk: Disk | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be used when it is given, not at the first call that is planned."""
        check_costs(self.costs, InputError)
        self.loss_memory = checked_loss(self.loss_memory)
        check_solver(self.solver)
        if not (self.progress is None or isinstance(self.progress, bool)):
            raise InputError(f"progress={self.progress!r}: give True, False, or None for terminals only")

    def settle(self, planner: Planner) -> int:
        """The budget in bytes, the same for all kinds of calls from now on: shares are of the step of ``planner``."""
        if isinstance(self.budget, Budget):
            self.budget = self.budget.bytes(planner)
        return self.budget

    def bytes_known(self, device: torch.device) -> int | None:
        """The budget in bytes, if that does not depend on the model."""
        if isinstance(self.budget, Budget):
            if self.budget.share is not None:
                return None
            self.budget = self.budget.size or kind_of(device).free_for_budgets(device)
        return self.budget


def is_least(on_infeasible: object) -> bool:
    """What ``on_infeasible`` asks for: ``Terms.least``."""
    if on_infeasible not in ("error", "least"):
        raise InputError(f'on_infeasible={on_infeasible!r}: give "error" or "least"')
    return on_infeasible == "least"


class Front:
    """What captured graphs have in common: the plans, and what is said of them.

    ``name``: of what is planned. ``terms``: what is asked of plans. ``last``: whose plan ran last. ``saved``: a plan
    that is to be taken.
    """

    def __init__(self, name: str, terms: Terms) -> None:
        self.name, self.terms, self.cache, self.families = name, terms, PlanCache(), Families()
        self.last: Calls | None = None
        self.saved: SavedPlan | None = None
        self._made = 0
        self._before: tuple[str, ...] | None = None
        self.inside = threading.local()  # what is known of the call that this thread is in

    @property
    def budget(self) -> int:
        """Bytes that one forward and its backward may allocate. It is set as it is given to ``attach``: shares are of
        the last call. When it is set, only the solver runs again.
        """
        if not isinstance(self.terms.budget, int):
            raise InputError(
                "the budget is a share, or what is free, whose bytes are known when a call was planned; a copy plans "
                "at its first call"
            )
        return self.terms.budget

    @property
    def only_plans(self) -> bool:
        """Whether this thread plans, and runs nothing."""
        return False

    def described(self, names: list[str], values: list[Any]) -> tuple[str, ...]:
        """A call in a few words."""
        return described(names, values, None)

    def tell(self, variant: Variant) -> None:
        """Say that a plan was made."""
        if variant.planner.scaled and (variant.plan.solver == CARRIED or not variant.plan.recomputed):
            LOG.debug("%s: the plan is carried over to %s", self.name, ", ".join(variant.call))
            return
        self._made += variant.planner.saved is None
        LOG.info("%s", planned_line(self.name, variant.call, variant.plan, self._made, self._before))
        self._before = variant.call


class Calls(ABC):
    """Runs calls of ``module`` under plans.

    The module is a pure program of tensors (``CapturedCalls``), or one whose Python reads and changes other things
    (``WatchedCalls``). ``last``: the plan of the last call, or the one that replaced it after its backward.
    """

    def __init__(self, module: torch.nn.Module, front: Front) -> None:
        self.module, self.front, self.terms, self.cache = module, front, front.terms, front.cache
        self.last: Variant | None = None

    # ------------------------------------------------- what a subclass knows better

    @abstractmethod
    def kind(self, leaves: list[Any], spec: Any, sized: bool = True) -> tuple[Hashable, frozenset[str]]:
        """(key, parameters without gradient that need one): see ``call_key``."""

    def names(self, leaves: list[Any]) -> list[str]:
        """What arguments are called in what is said of a call."""
        return [f"input {k}" for k in range(len(leaves))]

    def module_ready(self) -> AbstractContextManager[None]:
        """While the module is looked at: it has its parameters and buffers."""
        return nullcontext()

    def sources(self, variant: Variant, inputs: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The tensors that the program starts from, for a call with ``inputs``."""
        return source_values(variant.program.s.d.sources, self.module, inputs)

    def fitting(self, found: list[Variant], leaves: list[Any]) -> list[Variant]:
        """Those of the plans for one kind of call that Python outside of tensors allows."""
        return found

    @contextmanager
    def planning(self, leaves: list[Any]) -> Iterator[None]:
        """Around the making of a plan."""
        with undisturbed():
            yield

    def state_of(self, planner: Planner, leaves: list[Any]) -> PythonState | None:
        """What the module's Python read when it was traced."""
        return None

    # ------------------------------------------------------------------- calls

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns, computed under the plan for such calls."""
        inputs = tensors_of((args, kwargs))
        variants = self.variants(args, kwargs)
        failed: list[str] = []
        for variant in variants:
            try:
                return self._run_under(self._adapted(variant, inputs), args, kwargs)
            except GuardFailed as guard:
                failed.append(str(guard))
        if len(variants) >= MAX_VARIANTS:
            raise VariantLimitError(
                f"{MAX_VARIANTS} plans were made for calls of this kind, and none is for the values that the "
                "module's Python reads from tensors now, or for the shapes that follow from values (torch.where, "
                f"x[mask]): {failed[0]}. Attach the submodules around that line instead, or compute with masks of "
                "one shape."
            )
        try:
            return self._run_under(self._make_variant(args, kwargs), args, kwargs)
        except GuardFailed as guard:
            raise VariantLimitError(
                f"what the module's Python reads from a tensor changed between two runs on the same input: {guard}"
            ) from guard

    def _run_under(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run under this plan; raises ``GuardFailed`` where it is not for these values."""
        look = variant.look()
        with abandoned(look):
            result, program_outputs, state = self.computed(variant, args, kwargs)
        self.cache.used(variant)
        self.last = variant
        if variant.observer is not None:
            if look is not None:
                look.then = self.learner(variant, tensors_of((args, kwargs)))
            arrived = variant.observer.watch(variant.program, program_outputs, look)
            if state is not None:
                state.backward.arrived = arrived
        return result

    def computed(
        self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[torch.Tensor], CallState | None]:
        """What the module returns; the outputs of the program; what the plan keeps of the call."""
        state = CallState(variant.program, self.sources(variant, tensors_of((args, kwargs))))
        outputs = state.forward()
        return self._returned(variant.structure, outputs), outputs, state

    def _adapted(self, variant: Variant, inputs: list[torch.Tensor]) -> Variant:
        """The variant for what earlier calls have shown."""
        if variant.observer is None or not (variant.observer.news or reads_more(self.last, variant)):
            return variant
        with TRACING, Heeded(), self._progress_of(variant.planner), undisturbed(), self.module_ready():
            new = adapted(variant, self.last, self.module, inputs)
        self.cache.adapt(variant, new)
        return new

    def learner(self, variant: Variant, inputs: list[torch.Tensor]) -> Callable[[], None]:
        """What is to be done when the call's backward is over."""
        return partial(self._learn, variant, inputs)

    def _learn(self, variant: Variant, inputs: list[torch.Tensor]) -> None:
        """A step has been looked at: plan again at once, so that the next step is as it will stay."""
        try:
            new = self._adapted(variant, inputs)
        except Exception:  # noqa: BLE001 - parameters may be sharded now, a warning an error: the next forward tries again
            assert variant.observer is not None
            variant.observer.news = True
            return
        if self.last is variant:
            self.last = new

    def _returned(self, structure: Structure, outputs: list[torch.Tensor]) -> Any:
        """What forward returns, from the program's outputs; buffers and attributes that it assigns are assigned."""
        results = iter(outputs)
        constants = dict(structure.output_constants)
        leaves = [constants[k] if k in constants else next(results) for k in range(structure.outputs.num_leaves)]
        for name, tensor in zip(structure.assigned, results, strict=True):
            module, _, key = name.rpartition(".")
            self.module.get_submodule(module)._buffers[key] = tensor
        for name, value in structure.sets.items():
            module, _, key = name.rpartition(".")
            vars(self.module.get_submodule(module))[key] = value
        return unflatten(leaves, structure.outputs)

    # ------------------------------------------------------------------- plans

    def variants(self, args: tuple[Any, ...], kwargs: dict[str, Any], saved: SavedPlan | None = None) -> list[Variant]:
        """The variants for calls of this kind, the last one used first; one is made if there is none."""
        leaves, spec = flatten((args, kwargs))
        if found := self.fitting(self.cache.find(*self.kind(leaves, spec)), leaves):
            return found
        with TRACING:  # another thread may have planned for such calls while this one waited
            found = self.fitting(self.cache.find(*self.kind(leaves, spec)), leaves)
            return found or [self._make_variant(args, kwargs, saved)]

    def _make_variant(self, args: tuple[Any, ...], kwargs: dict[str, Any], saved: SavedPlan | None = None) -> Variant:
        refuse_within_measurements()
        with TRACING, Heeded(), Progress(self.terms.progress) as report:
            leaves, spec = flatten((args, kwargs))
            key, kind = (self.kind(leaves, spec, sized)[0] for sized in (True, False))
            variant = None
            if saved is None:
                variant = self._at_other_sizes(args, kwargs, leaves, kind, report)
            if variant is None:
                variant = self._traced(args, kwargs, leaves, kind, report, saved)
            variant = replace(variant, call=self.front.described(self.names(leaves), leaves))
            self.cache.add(key, variant.planner.missing, variant)
        self.front.tell(variant)
        return variant

    def _traced(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        kind: Hashable,
        report: Report,
        saved: SavedPlan | None,
    ) -> Variant:
        """Trace the call and plan for it. Costs are measured if the graph is new."""
        terms, families, inputs = self.terms, self.front.families, tensors_of((args, kwargs))

        def known_of(s: S_graph) -> Known:
            return self._known_of(s, families.of(s))

        with self.planning(leaves), self.module_ready():
            asked = terms.costs, terms.loss_memory, report, saved, terms.time_limit, known_of, terms.disk
            planner = make_planner(self.module, args, kwargs, *asked)
            planner.solver = terms.solver
            s, point = planner.graphs.S, Point(sizes_of(inputs), planner.graphs.S)
            family = families.of(s)
            like = None if family is None else self._latest(family)
            if like is not None:
                planner = like.planner.at_other_sizes(s, planner.graphs.known, self.module, inputs)
            planners = [as_before(planner, self.last, self.module, inputs), planner]
        state = self.state_of(planner, leaves)
        if like is not None:
            variant = self._carried(planner, replace(like, state=state))
        else:
            variant = self._first(list(dict.fromkeys(planners)), state)
        if family is None:
            family = families.new(planner, point)
        else:
            family.add(point)
        family.kinds.add(kind)
        family.learn(variant.planner, variant.plan)
        return replace(variant, family=family)

    def _at_other_sizes(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], kind: Hashable, report: Report
    ) -> Variant | None:
        """The plan for a call that runs a known graph at sizes that did not come before, without a trace; None if that
        graph does not compute what the module computes there.
        """
        inputs = tensors_of((args, kwargs))
        for family in self.front.families.running(kind):
            like = self._latest(family)
            if like is None or not self.fitting([like], leaves):
                continue
            report("resize", 0.0)
            with self.planning(leaves), self.module_ready():
                s = resized(family.points, family.skeleton, self.module, (args, kwargs))
                if s is None:
                    continue
                like.planner.report = report
                planner = like.planner.at_other_sizes(s, self._known_of(s, family), self.module, inputs)
            return self._carried(planner, replace(like, state=self.state_of(planner, leaves)))
        return None

    def _known_of(self, s: S_graph, family: Family | None) -> Known:
        """What is known of the costs of ``s``, by other sizes of it and by earlier processes."""
        known = Known() if family is None else family.known_of(s)
        if self.terms.disk is not None:
            known.kept = KeptCosts(self.terms.disk, s, self.terms.costs)
        return known

    def _latest(self, family: Family) -> Variant | None:
        """The plan of this graph that was used last."""
        return next((v for v in self.cache.variants() if v.family is family), None)

    def _carried(self, planner: Planner, like: Variant) -> Variant:
        """See ``carried_variant``; if no plan fits, and the terms say so, the plan of least memory."""
        try:
            return carried_variant(planner, self.terms.settle(planner), like)
        except InfeasibleBudgetError as error:
            if not self.terms.least:
                raise
            warnings.warn(f"{error} The plan of least memory runs instead.", BudgetWarning, stacklevel=4)
            return carried_variant(replace(planner, solver="auto"), error.min_budget, like)

    def _first(self, planners: list[Planner], state: PythonState | None) -> Variant:
        """The plan for the budget; if none fits, and the terms say so, the plan of least memory."""
        try:
            return make_first(planners, self.terms.settle(planners[-1]), state)
        except InfeasibleBudgetError as error:
            if not self.terms.least:
                raise
            warnings.warn(f"{error} The plan of least memory runs instead.", BudgetWarning, stacklevel=4)
            return make_variant(replace(planners[-1], solver="auto"), error.min_budget, state)

    def set_budget(self, budget: Budget) -> None:
        """Plan the last kind of call for another budget, which only the solver works for; others when they come."""
        if self.last is None:
            self.terms.budget = budget
            return
        with TRACING:  # no other thread plans for the old one meanwhile
            last = self.last
            size = budget.bytes(last.planner)
            with Heeded(), self._progress_of(last.planner):
                variant = make_variant(last.planner, size, last.state, last.observer)
            self.cache.replace(last, variant)
            self.last, self.terms.budget = variant, size

    def frontier(self) -> Frontier:
        """Time against memory for the last kind of call."""
        if self.last is None:
            raise InputError("a copy plans at its first call: call it before you ask for its frontier")
        with Heeded(), self._progress_of(self.last.planner):
            return self.last.planner.frontier()

    @contextmanager
    def _progress_of(self, planner: Planner) -> Iterator[None]:
        with Progress(self.terms.progress) as planner.report:
            yield


def _value(x: Any) -> tuple[Hashable, ...]:
    """What distinguishes a leaf that is no tensor; of objects more is seen by ``find``."""
    if not in_key(x):
        return ()
    return (x.dtype.str, x.shape, x.tobytes()) if isinstance(x, (np.ndarray, np.generic)) else (x,)


def _described(x: Any, sized: bool) -> tuple[Hashable, ...]:
    if type(x) is int and not sized:
        return (int,)
    if not isinstance(x, torch.Tensor):
        return (type(x), *_value(x))
    if x.layout != torch.strided:
        lies: Hashable = x.layout
    else:
        lies = x.stride() if sized else x.is_contiguous()
    return tuple(x.shape) if sized else x.dim(), lies, x.dtype, x.device, x.requires_grad


def call_key(leaves: list[Any], spec: Any, sized: bool = True) -> Hashable:
    """Calls of a pure program with equal keys run the same graph; if not ``sized``, perhaps at other sizes."""
    described = tuple(_described(x, sized) for x in leaves)
    mode = current_mode()
    cached = bool(mode.autocast) and torch.is_autocast_cache_enabled()  # whether a weight used twice is cast once
    return spec, described, mode, cached, settings()
