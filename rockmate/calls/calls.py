"""The calls of one graph under a budget: a plan for each kind of call, made when the first one comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch

from rkgb.graphs import Structure
from rkgb.sample import Call
from rkgb.trace.patches import TRACING
from rkgb.trees import unflatten
from rockmate.calls.adapted import adapted
from rockmate.calls.look import Look, abandoned
from rockmate.calls.made import PlansOfCalls
from rockmate.calls.observe import Observer
from rockmate.calls.runnable import (
    Runnable,
    make_runnable,
    reads_more,
    solved_again,
)
from rockmate.calls.surroundings import undisturbed
from rockmate.calls.turns import Turn
from rockmate.calls.ways import PlannedWays, waits_of, with_gradients
from rockmate.run.executor import CallState
from solvers.interrupts import Heeded

MOST_PLACES = 4
"""Of the calls of a step, so many are observed apart after the first."""


class Calls(PlansOfCalls):
    """Runs the calls of a graph under plans."""

    def run(self, call: Call, key: Hashable, missing: frozenset[str]) -> Any:
        """What the module returns, computed under the plan for such calls; ``key``, ``missing``: their ``kind``."""
        runnable = self.runnable(call, key, missing)
        place = self.terms.steps.place()
        if place == 0:
            base = runnable = self._adapted(runnable, call.tensors)
        else:
            base, runnable = runnable, self._at_place(runnable, place, call.tensors)
        turn, ran = self._turn(runnable, call, key)
        look = None if runnable.observer is None else runnable.observer.look()
        try:
            with abandoned(look):
                state = CallState(ran.program, self.sources(ran, call.tensors), self.front.timed(ran.plan))
                outputs = state.forward()
                result = _returned(ran.program.s.d.structure, outputs)
        except BaseException:
            self.terms.steps.undo(turn)
            raise
        turn.held_by(state.backward)
        state.backward.arrived = turn.begin
        self.cache.used(base)
        self.last, self._placed = base, (base, ran)
        if runnable.is_provisional and runnable.family is not None:
            runnable.family.spent[runnable.number] += runnable.plan.rerun_time
        if runnable.observer is not None:
            if look is not None:
                look.then = self.learner(runnable, call.tensors)
            kept = state.store.warn_unplanned if ran.is_tight else None
            observed = runnable.observer.watch(ran.program, outputs, look, kept)
            if observed is not None:
                observed.turn = turn
                turn.held_by(observed)
                state.backward.arrived = observed.begin
        return result

    def _at_place(self, runnable: Runnable, place: int, inputs: list[torch.Tensor]) -> Runnable:
        """``runnable`` for calls that come after so many others of their step: what these do with outputs is observed
        apart.
        """
        place = min(place, MOST_PLACES)
        found = self._places.get((runnable.number, place))
        if found is None:
            observer = runnable.observer and Observer(runnable.plan.graph, runnable.planner.options.loss_memory is None)
            found = replace(runnable, observer=observer)
            there = {v.number for v in self.cache.plans()}  # plans that were dropped have no places any more
            self._places = {at: other for at, other in self._places.items() if at[0] in there}
        elif found.plan.budget != runnable.plan.budget:
            made = make_runnable(found.planner, runnable.plan.budget, found.observer)
            found = replace(made, number=found.number, family=found.family)
        found = self._places[runnable.number, place] = self._adapted(found, inputs)
        return found

    def _turn(self, runnable: Runnable, call: Call, key: Hashable) -> tuple[Turn, Runnable]:
        """The turn of a call under this plan in its step, and what runs in it."""
        steps = self.terms.steps
        after = bool(runnable.planner.missing) and steps.follows_a_backward(key)
        after = after and ("after" in runnable.derived or Look.current is None)
        if after:
            if "after" not in runnable.derived:
                with TRACING, undisturbed(), self.module_ready():
                    runnable.derived["after"] = with_gradients(runnable, self.module, call.tensors)
            runnable = runnable.derived["after"]
        ways: PlannedWays | None = runnable.derived.get("ways")
        if ways is None or ways.seen != waits_of(runnable):
            ways = runnable.derived["ways"] = PlannedWays(runnable, self.front, self.terms.progress)
        turn = steps.take(key, ways, self.front.name, self.terms, after)
        return turn, ways.placed(turn.way)

    def _adapted(self, runnable: Runnable, inputs: list[torch.Tensor]) -> Runnable:
        """The plan for what earlier calls have shown."""
        news = runnable.observer is not None and (runnable.observer.news or reads_more(self.last, runnable))
        family = runnable.family if runnable.is_provisional else None
        if not news and not (family is not None and family.is_worth_solving(runnable.number)):
            return runnable
        if Look.current is not None:
            return runnable  # at a later call: see ``check_no_look``
        with TRACING, Heeded(), self._progress_of(runnable.planner), undisturbed(), self.module_ready():
            if news:
                new = adapted(runnable, self.last, self.module, inputs, self.terms)
            else:
                new = solved_again(runnable, self._known_of(runnable.plan.graph.s, None), self.module, inputs)
                self.front.tell_again(runnable, new)
        self.cache.adapt(runnable, new)
        self._places.update((at, new) for at, other in list(self._places.items()) if other is runnable)
        return new

    def learner(self, runnable: Runnable, inputs: list[torch.Tensor]) -> Callable[[], None]:
        """What is to be done when the call's backward is over; parameters and buffers are those of this call."""
        all_inputs = self.now.inputs

        def learn() -> None:
            if runnable.observer is not None and any(hasattr(p, "_local_tensor") for p in self.module.parameters()):
                runnable.observer.leave_room()  # ``fully_shard`` gathered others between the phases, beside the budget
            with self.in_call(all_inputs):
                self._learn(runnable, inputs)

        return learn

    def _learn(self, runnable: Runnable, inputs: list[torch.Tensor]) -> None:
        """A step has been looked at: plan again at once, so that the next step is as it will stay."""
        began = time.perf_counter()
        try:
            new = self._adapted(runnable, inputs)
        except Exception:  # noqa: BLE001 - parameters may be sharded now, a warning an error: the next forward tries again
            if runnable.observer is not None:
                runnable.observer.news = True
            return
        if self.last is runnable:
            self.last = new
        if new is not runnable:
            seconds = time.perf_counter() - began
            self.front.tell_anew(new.plan, seconds, "what its loss was seen to take")


def _returned(structure: Structure, outputs: list[torch.Tensor]) -> Any:
    """What the program returns, of which ``outputs`` are the tensors."""
    results = iter(outputs)
    constants = dict(structure.output_constants)
    leaves = [constants[k] if k in constants else next(results) for k in range(structure.outputs.num_leaves)]
    return unflatten(leaves, structure.outputs)
