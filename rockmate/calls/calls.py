"""The calls of one module under a budget: a plan for each kind of call, made when the first one comes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from rkgb.cost.measure import Known
from rkgb.cost.memory import refuse_within_measurements
from rkgb.cost.usage import Usage, supposed
from rkgb.graphs import D_graph, S_graph, Structure
from rkgb.probe.resize import has_operations_of
from rkgb.program import source_values
from rkgb.sample import Call
from rkgb.trace.guards import GuardFailed
from rkgb.trace.patches import TRACING
from rkgb.trees import unflatten
from rockmate.budget import Budget
from rockmate.calls.families import Family, resized_in
from rockmate.calls.front import Front
from rockmate.calls.look import Look, abandoned, check_no_look, end_look
from rockmate.calls.observe import Observer
from rockmate.calls.shown import Shown
from rockmate.calls.surroundings import undisturbed
from rockmate.calls.turns import Turn
from rockmate.calls.variants import (
    Variant,
    adapted,
    as_before,
    carried_variant,
    make_first,
    make_variant,
    reads_more,
    solved_again,
)
from rockmate.calls.ways import PlannedWays, waits_of, with_gradients
from rockmate.errors import InfeasibleBudgetError, InputError, VariantLimitError
from rockmate.planning.artefact import SavedPlan
from rockmate.planning.kept import KeptCosts
from rockmate.planning.places import places_of
from rockmate.planning.planner import Planner
from rockmate.planning.prepare import make_planner
from rockmate.progress import Progress, Report
from rockmate.run.executor import CallState
from solvers import Frontier
from solvers.interrupts import Heeded


class HasPlanner(Protocol):
    """What was planned for one kind of call."""

    @property
    def planner(self) -> Planner:
        """What it was planned with."""


L = TypeVar("L", bound=HasPlanner)

UsageOf = Callable[[D_graph], Usage]

MOST_PLACES = 4
"""Of the calls of a step, so many are observed apart after the first."""

MAX_VARIANTS = 16
"""Plans for calls that differ only in what the module's Python reads from tensors."""


class Calls(ABC):
    """Runs calls of ``module`` under plans.

    The module is a pure program of tensors: see ``CapturedCalls``. ``last``: the plan of the last call, or the one that
    replaced it after its backward.
    """

    def __init__(self, module: torch.nn.Module, front: Front) -> None:
        self.module, self.front, self.terms, self.cache = module, front, front.terms, front.cache
        self.last: Variant | None = None
        self._places: dict[tuple[int, int], Variant] = {}  # see ``_at_place``
        self._placed: tuple[Variant, Variant] | None = None  # a plan, and that for its share of a step's budget
        self.needs_data = self.needs_a_run = False  # for the program at other sizes, or for its graph

    @property
    def ran(self) -> Variant | None:
        """``last``, or where the call shared its step's budget, the plan for its share."""
        return self._placed[1] if self._placed is not None and self._placed[0] is self.last else self.last

    # ------------------------------------------------- what a subclass knows better

    @abstractmethod
    def kind(self, call: Call) -> tuple[Hashable, frozenset[str]]:
        """(key, parameters without gradient that need one): see ``call_key``."""

    @abstractmethod
    def sizeless(self, call: Call) -> Hashable:
        """The key of calls that differ from this one in sizes at most."""

    def names(self, call: Call) -> list[str]:
        """What arguments are called in what is said of a call."""
        return [f"input {k}" for k in range(len(call.leaves))]

    def said_of_pieces(self) -> str:
        """How many pieces are compiled, in words; empty if none was to be."""
        return ""

    @abstractmethod
    def shown(self) -> Shown:
        """What of the call that this thread is in shows without data."""

    def module_ready(self) -> AbstractContextManager[None]:
        """While the module is looked at: it has its parameters and buffers."""
        return nullcontext()

    def sources(self, variant: Variant, inputs: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The tensors that the program starts from, for a call with ``inputs``."""
        return source_values(variant.program.s.d.sources, self.module, inputs)

    @contextmanager
    def planning(self, call: Call) -> Iterator[None]:
        """Around the making of a plan."""
        with undisturbed():
            yield

    def traced_on(self, call: Call) -> Call:
        """What is traced in the place of ``call``."""
        return call

    # ------------------------------------------------------------------- calls

    def run(self, call: Call, key: Hashable, missing: frozenset[str]) -> Any:
        """What the module returns, computed under the plan for such calls; ``key``, ``missing``: their ``kind``."""
        variants = self.variants(call, key, missing)
        failed: list[str] = []
        for variant in variants:
            try:
                return self._run_under(variant, call, key)
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
            return self._run_under(self._make_variant(call, failed=failed), call, key)
        except GuardFailed as guard:
            raise VariantLimitError(
                f"what the module's Python reads from a tensor changed between two runs on the same input: {guard}"
            ) from guard

    def _run_under(self, variant: Variant, call: Call, key: Hashable) -> Any:
        """Run under this plan; raises ``GuardFailed`` where it is not for these values."""
        place = self.terms.steps.place()
        if place == 0:
            base = variant = self._adapted(variant, call.tensors)
        else:
            base, variant = variant, self._at_place(variant, place, call.tensors)
        turn, ran = self._turn(variant, call, key)
        look = variant.look()
        try:
            with abandoned(look):
                state = CallState(ran.program, self.sources(ran, call.tensors))
                outputs = state.forward()
                result = self.returned(ran.structure, outputs)
        except BaseException:
            self.terms.steps.undo(turn)
            raise
        turn.held_by(state.backward)
        state.backward.arrived = turn.begin
        self.cache.used(base)
        self.last, self._placed = base, (base, ran)
        if variant.is_provisional and variant.family is not None:
            variant.family.spent[variant.number] += variant.plan.rerun_time
        if variant.observer is not None:
            if look is not None:
                look.then = self.learner(variant, call.tensors)
            kept = state.store.warn_unplanned if ran.is_tight else None
            observed = variant.observer.watch(ran.program, outputs, look, kept)
            if observed is not None:
                observed.turn = turn
                turn.held_by(observed)
                state.backward.arrived = observed.begin
        return result

    def _at_place(self, variant: Variant, place: int, inputs: list[torch.Tensor]) -> Variant:
        """``variant`` for calls that come after so many others of their step: what these do with outputs is observed
        apart.
        """
        place = min(place, MOST_PLACES)
        found = self._places.get((variant.number, place))
        if found is None:
            observer = variant.observer and Observer(variant.plan.graph, variant.planner.options.loss_memory is None)
            found = replace(variant, observer=observer)
            there = {v.number for v in self.cache.variants()}  # plans that were dropped have no places any more
            self._places = {at: other for at, other in self._places.items() if at[0] in there}
        elif found.plan.budget != variant.plan.budget:
            made = make_variant(found.planner, variant.plan.budget, found.observer)
            found = replace(made, number=found.number, family=found.family)
        found = self._places[variant.number, place] = self._adapted(found, inputs)
        return found

    def _turn(self, variant: Variant, call: Call, key: Hashable) -> tuple[Turn, Variant]:
        """The turn of a call under this plan in its step, and the variant that runs in it."""
        steps = self.terms.steps
        after = bool(variant.planner.missing) and steps.follows_a_backward(key)
        after = after and ("after" in variant.derived or Look.current is None)
        if after:
            if "after" not in variant.derived:
                with TRACING, undisturbed(), self.module_ready():
                    variant.derived["after"] = with_gradients(variant, self.module, call.tensors)
            variant = variant.derived["after"]
        ways: PlannedWays | None = variant.derived.get("ways")
        if ways is None or ways.seen != waits_of(variant):
            ways = variant.derived["ways"] = PlannedWays(variant, self.front, self.terms.progress)
        turn = steps.take(key, ways, self.front.name, self.terms, after)
        return turn, ways.placed(turn.way)

    def _adapted(self, variant: Variant, inputs: list[torch.Tensor]) -> Variant:
        """The variant for what earlier calls have shown."""
        news = variant.observer is not None and (variant.observer.news or reads_more(self.last, variant))
        family = variant.family if variant.is_provisional else None
        if not news and not (family is not None and family.is_worth_solving(variant.number)):
            return variant
        if Look.current is not None:
            return variant  # at a later call: see ``check_no_look``
        with TRACING, Heeded(), self._progress_of(variant.planner), undisturbed(), self.module_ready():
            if news:
                new = adapted(variant, self.last, self.module, inputs, self.terms)
            else:
                new = solved_again(variant, self._known_of(variant.plan.graph.s, None), self.module, inputs)
                self.front.tell_again(variant, new)
        self.cache.adapt(variant, new)
        self._places.update((at, new) for at, other in list(self._places.items()) if other is variant)
        return new

    def learner(self, variant: Variant, inputs: list[torch.Tensor]) -> Callable[[], None]:
        """What is to be done when the call's backward is over."""
        return partial(self._learn, variant, inputs)

    def _learn(self, variant: Variant, inputs: list[torch.Tensor]) -> None:
        """A step has been looked at: plan again at once, so that the next step is as it will stay."""
        began = time.perf_counter()
        try:
            new = self._adapted(variant, inputs)
        except Exception:  # noqa: BLE001 - parameters may be sharded now, a warning an error: the next forward tries again
            if variant.observer is not None:
                variant.observer.news = True
            return
        if self.last is variant:
            self.last = new
        if new is not variant:
            self.front.tell_learned(new, time.perf_counter() - began)

    def returned(self, structure: Structure, outputs: list[torch.Tensor]) -> Any:
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

    def variants(
        self, call: Call, key: Hashable, missing: frozenset[str], saved: SavedPlan | None = None
    ) -> list[Variant]:
        """The variants for calls of this ``kind``, the last one used first; one is made if there is none."""
        if found := self.cache.find(key, missing):
            return found
        with TRACING:  # another thread may have planned for such calls while this one waited
            found = self.cache.find(*self.kind(call))
            return found or [self._make_variant(call, saved)]

    def _make_variant(self, call: Call, saved: SavedPlan | None = None, failed: Sequence[str] = ()) -> Variant:
        """``failed``: the guards for which the plans for such calls are none for this one."""
        refuse_within_measurements()
        check_no_look()
        capture = self.front.capture_seconds()
        with TRACING, Heeded(), Progress(self.terms.progress) as report:
            (key, missing), latest = self.kind(call), self._latest
            before = self.cache.for_another_budget(key, missing) if saved is None and not failed else None
            known = None if saved or before else self.resized_planner(call, latest, report)
            if before is not None:
                variant = replace(self._first([before.planner], before.observer), family=before.family)
            elif known is not None:
                planner, like = known
                variant = self._carried(planner, like)
            else:
                variant = self._traced(call, report, saved)
            variant.planner.pieces = self.said_of_pieces()
            said = variant.planner.call = self.front.described(self.names(call), call.leaves)
            variant.planner.seconds = {**capture, **variant.planner.seconds}
            seconds = {**capture, **variant.plan.setup_seconds}
            plan = replace(variant.plan, call=said, pieces=self.said_of_pieces(), setup_seconds=seconds)
            variant = replace(variant, plan=plan, number=next(self.cache.numbers))
            self.cache.add(key, variant.planner.missing, variant)
        self.front.tell(variant, failed[0] if failed else "")
        return variant

    def _traced(self, call: Call, report: Report, saved: SavedPlan | None) -> Variant:
        """Trace the call and plan for it; as at other sizes, where the graph came at other sizes."""
        planner, family = self.traced_planner(call, report, saved)
        like, inputs = self._latest(family), call.tensors
        with self.planning(call), self.module_ready():
            if like is not None:
                graphs = planner.graphs
                planner = like.planner.at_other_sizes(graphs.S, graphs.known, self.module, inputs, family.options)
            planners = [as_before(planner, self.last, self.module, inputs), planner]
        variant = self._first(list(dict.fromkeys(planners))) if like is None else self._carried(planner, like)
        family.learn(variant.planner, variant.plan)
        return replace(variant, family=family)

    def traced_planner(
        self, call: Call, report: Report, saved: SavedPlan | None = None, usage_of: UsageOf = supposed
    ) -> tuple[Planner, Family]:
        """Trace the call: a planner for it, and the family of its graph. Costs are measured if the graph is new."""
        families, options = self.front.families, self.terms.options

        def known_of(s: S_graph) -> Known:
            return self._known_of(s, families.of(s))

        with self.planning(call), self.module_ready():
            planner = make_planner(self.module, self.traced_on(call), options, report, saved, known_of, usage_of)
        family = families.of(planner.graphs.S)
        if family is None:
            family = families.new(planner, self.shown())
        return planner, family

    def resized_planner(
        self, call: Call, latest: Callable[[Family], L | None], report: Report
    ) -> tuple[Planner, L] | None:
        """A planner for a call that runs a known graph at sizes that did not come before; and the ``latest`` that was
        planned for that graph, which it is like.

        None if the call runs no known graph, or if that takes a trace on the call itself.
        """
        known = self.front.families.known()
        if not known or self.needs_data:
            return None
        report("resize", 0.0)
        start = time.perf_counter()
        with self.planning(call):
            found = self._shown_at(call, known)
        if found is None or (like := latest(found[0])) is None:
            return None
        family, s = found
        seconds = time.perf_counter() - start
        with self.planning(call), self.module_ready():
            like.planner.report = report
            costs = self._known_of(s, family)
            planner = like.planner.at_other_sizes(s, costs, self.module, call.tensors, family.options)
        planner.seconds["trace"] = seconds
        return planner, like

    def _shown_at(self, call: Call, known: Sequence[Family]) -> tuple[Family, S_graph] | None:
        """The one of the ``known`` graphs that the call runs, with its sizes; None where even the program takes data.

        Where the graph took a run at one size, it does so at each.
        """
        shown = self.shown()
        found = None if self.needs_a_run else resized_in(known, shown.graph)
        if found is not None and found[0].is_shown:
            return found
        known = [f for f in known if shown.graph is None or has_operations_of(f.traced.S, shown.graph)]
        if shown.program is not None and known:
            with self.module_ready():
                found = resized_in(known, shown.graph_of_a_run(self.traced_on(call)))
            if found is not None and found[0].is_traced_without_data:
                self.needs_a_run = True
                return found
        self.needs_data = shown.program is None or found is not None
        if self.needs_data:
            self.front.tell_needs_data()
        return None

    def _known_of(self, s: S_graph, family: Family | None) -> Known:
        """What is known of the costs of ``s``, by other sizes of it and by earlier processes."""
        known = Known() if family is None else family.known_of(s)
        if family is None or family.is_much_larger(s) or known.anew:
            end_look()  # measuring runs backwards, and watches memory itself
        places = places_of(self.terms.options.disk)
        if places is not None:
            known.kept = KeptCosts(places, s, self.terms.options.costs)
        return known

    def _latest(self, family: Family) -> Variant | None:
        """The plan of this graph that was used last."""
        return next((v for v in self.cache.variants() if v.family is family), None)

    def _carried(self, planner: Planner, like: Variant) -> Variant:
        """See ``carried_variant``; if no plan fits, and the terms say so, the plan of least memory."""
        try:
            with self.terms.settling(planner) as budget:
                return carried_variant(planner, budget, like)
        except InfeasibleBudgetError as error:
            return carried_variant(_with_auto_solver(planner), self.terms.least_instead(error, planner), like)

    def _first(self, planners: list[Planner], observer: Observer | None = None) -> Variant:
        """The plan for the budget; if none fits, and the terms say so, the plan of least memory.

        That runs for one step, too, where the loss may read less of the outputs than is supposed. ``observer``: of an
        earlier plan for such calls.
        """
        planner = planners[-1]
        try:
            with self.terms.settling(planner) as budget:
                return make_first(planners, budget, observer)
        except InfeasibleBudgetError as error:
            supposed = len(planner.graphs.K.usage.roots) > 1 and planner.saved is None
            least = self.terms.least_instead(error, planner, until_seen=supposed)
            return make_variant(_with_auto_solver(planner), least, observer)

    def set_budget(self, budget: Budget) -> None:
        """Plan the last kind of call for another budget, which only the solver works for; others when they come."""
        if self.last is None:
            self.terms.budget = budget
            return
        with TRACING:  # no other thread plans for the old one meanwhile
            last = self.last
            size = self.terms.bytes_of(budget, last.planner)
            if size == last.plan.budget == self.terms.budget:
                return
            with Heeded(), self._progress_of(last.planner):
                made = make_variant(last.planner, size, last.observer)
                variant = replace(made, number=last.number, family=last.family)
            self.cache.replace(last, variant)
            self.last, self.terms.budget, self.terms.settled = variant, size, (budget, last.planner.eager_peak)

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


def _with_auto_solver(planner: Planner) -> Planner:
    """The same planner with a solver that finds the plan of least memory."""
    return replace(planner, options=planner.options.with_auto_solver())
