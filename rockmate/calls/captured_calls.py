"""The calls of the programs that TorchDynamo captured, each under plans of its own."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from rkgb.errors import GraphError, MeasureError
from rkgb.graphs import Structure
from rkgb.sample import Call
from rkgb.trace.patches import TRACING
from rkgb.trees import unflatten
from rkgb.warn import warn
from rockmate.calls.adapted import adapted
from rockmate.calls.call_look import CallLook, ObservedCall
from rockmate.calls.captured import captured_sources
from rockmate.calls.front import Front
from rockmate.calls.look import Look
from rockmate.calls.made import PlansOfCalls
from rockmate.calls.observe import Observer
from rockmate.calls.runnable import Runnable, make_runnable, reads_more, solved_again
from rockmate.calls.surroundings import undisturbed, witnesses
from rockmate.calls.ways import PlannedWays, with_gradients
from rockmate.calls.whole_steps import Turn
from rockmate.errors import BudgetWarning, CannotBeCalledError
from rockmate.run.executor import CallState
from solvers.interrupts import Heeded


class Planned(Exception):
    """A plan was made, and nothing is to run."""


class CapturedCalls(PlansOfCalls):
    """The calls of one graph that TorchDynamo captured, and how often it was captured again."""

    def __init__(self, program: fx.GraphModule, front: Front) -> None:
        super().__init__(program, front)
        self.identity, self.repeated = identity_of(program), 0
        self.refused = False  # no plan can be made

    def call(self, *arguments: Any) -> Any:
        if self.refused or witnesses() != getattr(self.front.inside, "witnesses", witnesses()):
            return self.program.forward(*arguments)
        wanted = (a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad)
        if not torch.is_grad_enabled() or next(wanted, None) is None or not self.gives_gradients:
            return self.program.forward(*arguments)
        inputs, numbers = self.split.inputs(arguments) if self.split else (arguments, ())
        with TRACING if not self.ready else nullcontext():  # a thread may come while another is here for the first time
            if not self.ready:
                self.make_ready(inputs)
        with self.in_call(inputs):
            call = Call(tuple(inputs[k] for k in self.module.given), {})
            kind, missing = self.kind(call)
            if self.front.only_plans:
                self.last = self.runnable(call, kind, missing, self.front.saved)
                self.front.last = self
                raise Planned
            try:
                results = self.run(call, kind, missing)
            except CannotBeCalledError:
                return self.program.forward(*arguments)  # whose own error comes
            except GraphError as error:
                self._refuse(error)
                return self.program.forward(*arguments)
            self.front.last, self.front.ran_freely = self, False
            return self.split.joined(results, numbers) if self.split else results

    def run(self, call: Call, key: Hashable, missing: frozenset[str]) -> Any:
        """What the module returns, computed under the plan for such calls; ``key``, ``missing``: their ``kind``."""
        runnable = self.runnable(call, key, missing)
        place = self.terms.steps.observed_place()
        if place == 0:
            base = runnable = self._adapted(runnable, call.tensors)
        else:
            base, runnable = runnable, self._at_place(runnable, place, call.tensors)
        turn, ran = self._turn(runnable, call, key)
        observer = runnable.observer
        look = CallLook(observer) if observer is not None and observer.wants_look() else None
        with self.terms.steps.forward_of(turn, look):
            state = CallState(ran.program, self.sources(ran, call.tensors), self.front.timed(ran.plan))
            outputs = state.forward()
            result = _returned(ran.program.s.d.structure, outputs)
        turn.held_by(state.backward)
        state.backward.arrived = turn.begin
        self.cache.used(base)
        self.last, self._placed = base, (base, ran)
        if runnable.planner.scaled and runnable.family is not None:
            runnable.family.spent[runnable.number] += ran.plan.rerun_time
        if observer is not None and any(outputs[k].grad_fn is not None for k in observer.places):
            if look is not None:
                look.then = partial(self._learn, runnable, call.tensors, self.now.inputs)
            kept = state.store.warn_unplanned if ran.is_tight else None
            observed = ObservedCall(observer, ran.program, outputs, look, turn, kept)
            turn.held_by(observed)
            state.backward.arrived = observed.begin
        elif look is not None:
            look.abandon()
        return result

    def _at_place(self, runnable: Runnable, place: int, inputs: list[torch.Tensor]) -> Runnable:
        """``runnable`` for calls after so many others of their step: what these do with outputs is observed apart."""
        found = self._places.get((runnable.number, place))
        if found is None:
            observer = runnable.observer and Observer(
                runnable.plan.graph, runnable.planner.options.loss_memory is not None
            )
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
        if ways is None or ways.is_stale:
            ways = runnable.derived["ways"] = PlannedWays(runnable, self.front)
        turn = steps.take(key, ways, after)
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
        self.terms.compare_loss(new.planner)
        return new

    def _learn(self, runnable: Runnable, inputs: list[torch.Tensor], all_inputs: Sequence[Any]) -> None:
        """A step has been looked at: plan again at once, so that the next step is as it will stay. ``all_inputs``: of
        the call, whose parameters and buffers count.
        """
        began, observer = time.perf_counter(), runnable.observer
        assert observer is not None
        model = self.front.known_model
        if model is not None and any(hasattr(p, "_local_tensor") for p in model.parameters()):
            observer.leave_room()  # ``fully_shard`` gathered others between the phases, beside the budget
        try:
            with self.in_call(all_inputs):
                new = self._adapted(runnable, inputs)
        except Exception:  # noqa: BLE001 - parameters may be sharded now, a warning an error: the next forward tries again
            observer.news = True
            return
        if self.last is runnable:
            self.last = new
        if new is not runnable:
            seconds = time.perf_counter() - began
            took = 0 if observer.waits is not None else new.planner.taken_by(runnable.plan)  # no other call ran
            self.front.tell_anew(new.plan, seconds, "what its loss was seen to take", runnable.plan, took)

    def _refuse(self, error: GraphError) -> None:
        """Run without a plan from now on, if that is wanted; that memory is measured now says nothing of the graph."""
        if isinstance(error, MeasureError) or not self.terms.least or self.front.follows:
            raise error
        self.refused = True
        warn(
            f"{self.front.name} cannot be planned for such calls, which run as they are from now on, with no budget: "
            f"{error}",
            BudgetWarning,
        )


def _returned(structure: Structure, outputs: list[torch.Tensor]) -> Any:
    """What the program returns, of which ``outputs`` are the tensors."""
    results = iter(outputs)
    constants = dict(structure.output_constants)
    leaves = [constants[k] if k in constants else next(results) for k in range(structure.outputs.num_leaves)]
    return unflatten(leaves, structure.outputs)


def identity_of(program: fx.GraphModule) -> Hashable:
    """Programs of equal identity do the same to the same inputs; None where that is not known.

    What a model's Python reads and only logs makes TorchDynamo capture again, but the program is the same.
    """
    nodes = list(program.graph.nodes)
    if any(n.op in ("get_attr", "call_module") for n in nodes):
        return None
    targets = tuple(n.target for n in nodes if n.op == "call_function")
    forms = tuple(_form(n.meta.get("example_value")) for n in nodes if n.op == "placeholder")
    return program.code, tuple(captured_sources(program)), targets, forms


def _form(example: Any) -> Hashable:
    """Of a parameter or another input, what the keys of plans do not tell: those have the forms of arguments."""
    if not isinstance(example, torch.Tensor):
        return str(type(example))
    lies = example.stride() if example.layout == torch.strided else ""
    told = (str(x) for x in (example.device, tuple(example.shape), lies, example.layout))
    return isinstance(example, torch.nn.Parameter), example.dtype, example.requires_grad, *told
