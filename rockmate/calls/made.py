"""The plans for the calls of one graph: found, carried over from other sizes, or made."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from torch import fx

from rkgb.cost.measure import Known
from rkgb.cost.memory import refuse_within_measurements
from rkgb.graphs import B_graph, S_graph
from rkgb.probe.resize import has_names_of, has_operations_of
from rkgb.sample import Call
from rkgb.trace.patches import TRACING
from rockmate.budget import Budget
from rockmate.calls.families import Family, Shown, resized_in
from rockmate.calls.front import ANOTHER_BUDGET, Front
from rockmate.calls.graph import CapturedGraph
from rockmate.calls.keys import call_key
from rockmate.calls.look import check_no_look, end_look
from rockmate.calls.observe import Observer
from rockmate.calls.runnable import Runnable, as_before, carried_runnable, make_first, make_runnable
from rockmate.calls.surroundings import undisturbed
from rockmate.calls.terms import ALL_OUTPUTS, ONE_CALL
from rockmate.errors import InfeasibleBudgetError
from rockmate.planning.artefact import SavedPlan
from rockmate.planning.disk import places_of
from rockmate.planning.kept import KeptCosts
from rockmate.planning.planner import Planner
from rockmate.planning.prepare import make_planner
from rockmate.progress import Progress, Report
from solvers import Frontier
from solvers.interrupts import Heeded


class PlansOfCalls(CapturedGraph):
    """Makes the plans for the calls of a graph. ``last``: the plan of the last call, or the one that replaced it after
    its backward.
    """

    def __init__(self, program: fx.GraphModule, front: Front) -> None:
        super().__init__(program, front)
        self.cache = front.cache
        self.last: Runnable | None = None
        self._places: dict[tuple[int, int], Runnable] = {}  # see ``_at_place``
        self._placed: tuple[Runnable, Runnable] | None = None  # a plan, and that for its share of a step's budget
        self.needs_data = self.needs_a_run = False  # for the program at other sizes, or for its graph
        self.of_any_size: B_graph | None = None  # the program, if it does not have to be traced at each size
        self.asked_of_any_size = False
        self._others: set[Family] = set()  # whose graphs the program at all sizes does not give

    @property
    def ran(self) -> Runnable | None:
        """``last``, or where the call shared its step's budget, the plan for its share."""
        return self._placed[1] if self._placed is not None and self._placed[0] is self.last else self.last

    def runnable(self, call: Call, key: Hashable, missing: frozenset[str], saved: SavedPlan | None = None) -> Runnable:
        """The plan for calls of this ``kind``, which is made if there is none."""
        if found := self.cache.find(key, missing):
            return found
        with TRACING:  # another thread may have planned for such calls while this one waited
            return self.cache.find(*self.kind(call)) or self._make_runnable(call, saved)

    def _make_runnable(self, call: Call, saved: SavedPlan | None) -> Runnable:
        refuse_within_measurements()
        check_no_look()
        early = self.front.capture_seconds()
        with TRACING, Heeded(), Progress(self.terms.progress) as report:
            key, missing = self.kind(call)
            before = self.cache.for_another_budget(key, missing) if saved is None else None
            began = time.perf_counter()
            known = None if saved or before else self._resized_planner(call, report)
            if not (known or saved or before):  # it was tried in vain
                early = _sum(early, {"trace": time.perf_counter() - began})
            if before is not None:
                runnable = replace(self._first([before.planner], before.observer), family=before.family)
            elif known is not None:
                runnable = self._carried(*known)
            else:
                runnable = self._traced(call, report, saved)
            pieces = runnable.planner.pieces = "" if self.pieces is None else str(self.pieces)
            said = runnable.planner.call = self.front.described(self.module.names, call.leaves)
            runnable.planner.seconds = _sum(early, runnable.planner.seconds)
            seconds = _sum(early, runnable.plan.setup_seconds)
            plan = replace(runnable.plan, call=said, pieces=pieces, setup_seconds=seconds)
            runnable = replace(runnable, plan=plan, number=next(self.cache.numbers))
            self.cache.add(key, runnable.planner.missing, runnable)
        self.front.tell(runnable, (id(self), call_key(call.leaves, None)))
        return runnable

    def _traced(self, call: Call, report: Report, saved: SavedPlan | None) -> Runnable:
        """Trace the call and plan for it; as at other sizes, where the graph came at other sizes. Costs are measured if
        the graph is new.
        """
        families, options, shown, inputs = self.front.families, self.terms.options, self.shown(), call.tensors
        with undisturbed(), self.module_ready():
            planner = make_planner(
                *(self.module, self.traced_on(call), options, report, saved),
                known_of=lambda s: self._known_of(s, families.of(s)),
                shown=lambda: shown.graphs,
            )
            graphs = planner.graphs
            family = families.of(graphs.S) or families.new(planner, shown)
            if like := self._latest(family):
                planner = like.planner.at_other_sizes(graphs.S, graphs.known, self.module, inputs)
            wider = planner if like else as_before(planner, self.last, self.module, inputs)
        if like:
            return self._carried(planner, like)
        runnable = self._first(list(dict.fromkeys([wider, planner])))
        family.learn(runnable.planner, runnable.plan)
        return replace(runnable, family=family)

    def _resized_planner(self, call: Call, report: Report) -> tuple[Planner, Runnable] | None:
        """A planner for a call that runs a known graph at sizes that did not come before; and the latest plan for that
        graph, which it is like.

        None if the call runs no known graph, or if that takes a trace on the call itself.
        """
        known = self.front.families.known()
        if not known or self.needs_data:
            return None
        report("resize", 0.0)
        start = time.perf_counter()
        with undisturbed():
            found = self._shown_at(call, known)
        if found is None or (like := self._latest(found[0])) is None:
            return None
        family, s = found
        seconds = time.perf_counter() - start
        with undisturbed(), self.module_ready():
            like.planner.report = report
            costs = self._known_of(s, family)
            planner = like.planner.at_other_sizes(s, costs, self.module, call.tensors)
        planner.seconds["trace"] = seconds
        return planner, like

    def _shown_at(self, call: Call, known: Sequence[Family]) -> tuple[Family, S_graph] | None:
        """The one of the ``known`` graphs that the call runs, with its sizes; None where even the program takes data.

        Where the graph took a run at one size, it does so at each.
        """
        shown = self.shown()
        if not self.asked_of_any_size:
            self._ask_of_any_size(shown, known)
        if self.of_any_size is not None and shown.inputs is not None:
            found = resized_in(known, shown.graph_of(self.of_any_size))
            if found is not None and found[0].is_shown:
                return found
        found = None if self.needs_a_run else resized_in(known, shown.graph)
        if found is not None and found[0].is_shown:
            # Made once, and given up where a trace at the size shows more.
            self.of_any_size = None if self.asked_of_any_size else shown.program_of_any_size(found[1])
            self.asked_of_any_size = True
            return found
        if self.needs_a_run:
            known = [f for f in known if shown.program is not None and has_names_of(f.traced.B, shown.program)]
        else:
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

    def _ask_of_any_size(self, shown: Shown, known: Sequence[Family]) -> None:
        """Trace the program at all sizes, if it gives one of the ``known`` graphs at the sizes at which that ran."""
        for family in [f for f in known if f not in self._others]:
            then = self.shown_as(family.shown)
            if then is None:
                continue
            self._others.add(family)
            program = shown.at_all_sizes
            self.asked_of_any_size = program is None
            if program is not None and then.graph_of_is(program, family.traced.S):
                self.of_any_size, self.asked_of_any_size, family.is_shown = program, True, True
                return

    def _known_of(self, s: S_graph, family: Family | None) -> Known:
        """What is known of the costs of ``s``, by other sizes of it and by earlier processes."""
        known = Known() if family is None else family.known_of(s)
        if family is None or family.is_much_larger(s) or known.anew:
            end_look()  # measuring runs backwards, and watches memory itself
        places = places_of(self.terms.options.disk)
        if places is not None:
            known.kept = KeptCosts(places, s, self.terms.options.costs)
        return known

    def _latest(self, family: Family) -> Runnable | None:
        """The plan of this graph that was used last."""
        return next((v for v in self.cache.plans() if v.family is family), None)

    def _carried(self, planner: Planner, like: Runnable) -> Runnable:

        def make(planners: list[Planner], budget: int) -> Runnable:
            return carried_runnable(planners[0], budget, like)

        return self._fitting([planner], make, self._supposed(planner))

    def _first(self, planners: list[Planner], observer: Observer | None = None) -> Runnable:
        """The plan of the first planner that has one. ``observer``: of an earlier plan for such calls."""
        planner = planners[-1]
        supposed = self._supposed(planner, several=len(planner.graphs.K.usage.roots) > 1)
        return self._fitting(planners, partial(make_first, observer=observer), supposed)

    def _fitting(
        self, planners: list[Planner], make: Callable[[list[Planner], int], Runnable], supposed: str
    ) -> Runnable:
        """What ``make`` makes for the budget; if no plan fits, and the terms say so, the plan of least memory.

        That runs for one step, too, where something is only ``supposed``.
        """
        try:
            with self.terms.settling(planners[-1]) as budget:
                return make(planners, budget)
        except InfeasibleBudgetError as error:
            least = self.terms.least_instead(error, planners[-1], self.front.name, until_seen=supposed)
            return make([planners[-1].with_auto_solver()], least)

    def _supposed(self, planner: Planner, *, several: bool = False) -> str:
        """What a step may show of such calls, in words; nothing if it is known. ``several`` outputs may be read."""
        if planner.saved is not None or planner.options.solver != "auto":  # another solver's plan would run till then
            return ""
        if several:
            return ALL_OUTPUTS
        return ONE_CALL if self.terms.supposes_one_call and not self.front.only_plans else ""

    def set_budget(self, budget: Budget) -> None:
        """Plan the last kind of call for another budget, which only the solver works for; others when they come."""
        with TRACING:  # no other thread plans for the old one meanwhile
            last = self.last
            assert last is not None
            planner = last.wanted  # whose least budget was stated
            size = self.terms.bytes_of(budget, planner)
            if size == last.plan.budget == self.terms.budget:
                return
            began = time.perf_counter()
            with Heeded(), self._progress_of(planner):
                made = make_runnable(planner, size, last.observer)
                runnable = replace(made, number=last.number, family=last.family)
            self.cache.replace(last, runnable)
            self.last, self.terms.budget, self.terms.settled = runnable, size, (budget, planner.eager_peak)
            self.front.tell_anew(runnable.plan, time.perf_counter() - began, ANOTHER_BUDGET)

    def frontier(self) -> Frontier:
        assert self.last is not None
        with Heeded(), self._progress_of(planner := self.last.wanted):
            return planner.frontier()

    @contextmanager
    def _progress_of(self, planner: Planner) -> Iterator[None]:
        with Progress(self.terms.progress) as planner.report:
            yield


def _sum(early: dict[str, float], late: dict[str, float]) -> dict[str, float]:
    """Seconds of all phases."""
    return {k: early.get(k, 0.0) + late.get(k, 0.0) for k in (early | late)}
