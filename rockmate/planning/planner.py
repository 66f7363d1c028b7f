"""Planners for other uses of the outputs, for other sizes, and with costs that are measured anew."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.cost.measure import Known
from rkgb.cost.usage import Usage
from rkgb.graphs import S_graph
from rkgb.Ktools import K_graph
from rkgb.pipeline import make_K
from rockmate.planning.finder import CARRIED, LITTLE, PlanFinder
from rockmate.planning.kept import Bounded
from rockmate.planning.plan import Plan
from rockmate.planning.problem import Room, bytes_of_outputs, declared_room, grown, problem_of, usual_room, wider
from rockmate.progress import silent
from solvers import Bwd, ChainPlan, Options, Schedule, ScheduleError, walk, with_deletes


def missing_gradients(model: torch.nn.Module) -> frozenset[str]:
    """Parameters that have no gradient but need one: new memory that stays."""
    return frozenset(name for name, p in model.named_parameters() if lacks_gradient(p))


def lacks_gradient(p: torch.Tensor) -> bool:
    """Whether a parameter has no gradient but needs one; what was put in its place (functional_call) never has one."""
    return p.requires_grad and (not p.is_leaf or p.grad is None)


@dataclass(eq=False)
class Planner(PlanFinder):
    """Makes planners for other uses of the outputs, other sizes, and costs that are measured anew."""

    def for_usage(
        self, model: torch.nn.Module, inputs: list[torch.Tensor], usage: Usage, seen: Room | None, unsure: bool
    ) -> Planner:
        """A planner for another ``usage`` of the outputs, with as much room for the loss as was ``seen``; if nothing
        was, or if that is ``unsure``, with the usual room at least. What was declared is the least room.

        What is not measured yet is measured on ``inputs``. Blocks that stay what they were are not solved again.
        """
        k, seconds = self.graphs.K, dict(self.seconds)
        if usage != k.usage:
            start, before = time.perf_counter(), self.graphs.known.measurings
            self.report("measure", 0.0)
            k = make_K(self.graphs.S, model, inputs, self.options.costs, usage, self.graphs.known, k.missing)
            doing = phase_of(self.graphs.known, before)
            seconds[doing] = seconds.get(doing, 0.0) + time.perf_counter() - start
        if (declared := self.options.loss_memory) is not None:
            room = declared_room(k, declared, seen)
        else:
            room = seen if seen and not unsure else wider(usual_room(k, None), seen)
        return self.with_costs(k, room, self.graphs.known, saved=None, seconds=seconds)

    def with_auto_solver(self) -> Planner:
        """The same with a solver that finds the plan of least memory."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, solver="auto"))

    def with_costs(
        self, k: K_graph, room: Room, known: Known, classes: tuple[int, ...] | None = None, **changed: Any
    ) -> Planner:
        """This planner with other costs, or another room for the loss: nothing is solved yet."""
        classes = self.graphs.classes if classes is None else classes
        graphs = dataclasses.replace(self.graphs, D=k.s.d, S=k.s, K=k, known=known, classes=classes)
        problem = problem_of(graphs, room, self.options.costs)
        return dataclasses.replace(self, graphs=graphs, problem=problem, room=room, _chain=None, **changed)

    @property
    def solved_options(self) -> Options | None:
        """What the blocks may run, as far as it was solved for."""
        return self._chain.solved if self._chain is not None else None

    def solve_options(self) -> Options:
        """What the blocks may run; those that were solved for another use of the outputs are not solved again."""
        self.report, self._end = silent, time.perf_counter() + self.options.time_limit
        return self.chain().solved or self.chain().loose

    def at_other_sizes(
        self,
        s: S_graph,
        known: Known,
        model: torch.nn.Module,
        inputs: list[torch.Tensor],
    ) -> Planner:
        """A planner for ``s``, which has the skeleton of this planner's graph, with the ``known`` costs.

        The caller uses the outputs as it does here. What its loss takes is in proportion to the outputs' bytes, and at
        least what was seen here.
        """
        start = time.perf_counter()
        self.report("measure", 0.0)
        usage = self.graphs.K.usage
        k = make_K(s, model, inputs, self.options.costs, usage, known)
        seen = self.room.seen
        room = grown(self.room, bytes_of_outputs(s.d)) if seen else usual_room(k, self.options.loss_memory)
        return self.with_costs(
            k,
            room,
            known,
            missing=missing_gradients(model),
            saved=None,
            seconds={phase_of(known): time.perf_counter() - start},
            scaled=not known.own,
            solved={},
        )

    def measured_anew(self, model: torch.nn.Module, inputs: list[torch.Tensor], known: Known) -> Planner:
        """This planner, whose costs were scaled, with those of its own sizes: the ``known`` ones, or measured.

        The backward makes the gradients that it makes here, whichever are there now.
        """
        start, k, sources = time.perf_counter(), self.graphs.K, self.graphs.D.sources
        self.report("measure", 0.0)
        known.given = frozenset(v for v in sources if self.graphs.D.values[v].requires_grad) - k.missing
        k = make_K(self.graphs.S, model, inputs, self.options.costs, k.usage, known, k.missing)
        seconds = {phase_of(known): time.perf_counter() - start}
        return self.with_costs(k, self.room, known, seconds=seconds, scaled=False, solved={})

    def with_gradients(self, model: torch.nn.Module, inputs: list[torch.Tensor]) -> Planner:
        """A planner for calls in whose backward the gradients of all parameters are there."""
        k = self.graphs.K
        k = make_K(self.graphs.S, model, inputs, self.options.costs, k.usage, self.graphs.known, frozenset())
        return self.with_costs(k, self.room, self.graphs.known, missing=frozenset())

    def carried_plan(self, budget: int, schedules: Iterable[Schedule]) -> Plan | None:
        """The fastest of ``schedules`` of other sizes of the graph that fits ``budget``; None if none does."""
        best: ChainPlan | None = None
        for schedule in {id(schedule): schedule for schedule in schedules}.values():
            try:
                found = ChainPlan(schedule, walk(self.problem, schedule), CARRIED)
            except ScheduleError:  # of another use of the outputs
                continue
            if found.peak + self.reserved <= budget and (best is None or found.time < best.time):
                best = found
        return None if best is None else self._plan(budget, Bounded(best, None))

    def kept_plan(self, plan: Plan) -> Plan | None:
        """The runs of ``plan`` with the figures of this planner, if they fit the budget and there is little to gain."""
        if (schedule := self._schedule_of(plan)) is None:
            return None
        walked = walk(self.problem, schedule)
        spare = plan.budget - self.reserved - walked.peak
        if spare < 0 or (walked.recompute and spare > LITTLE * plan.budget):
            return None
        found = ChainPlan(schedule, walked, plan.solver)
        bound, provable = (None, plan.budget - self.reserved) if walked.recompute else (self.problem.eager_time, None)
        return self._plan(plan.budget, Bounded(found, bound, plan.reason), provable)

    def taken_by(self, plan: Plan) -> int:
        """Bytes that a step under ``plan`` took whose outputs were used as is known here; 0 if its backward differs."""
        schedule = self._schedule_of(plan)
        return 0 if schedule is None else walk(self.problem, schedule).peak + self.room.kept + self.beside

    def _schedule_of(self, plan: Plan) -> Schedule | None:
        """The runs of ``plan``, if the backward comes to the nodes that it came to there."""
        if [step.node for step in plan.schedule if isinstance(step, Bwd)] != self.problem.backward_order():
            return None
        return with_deletes(self.problem, plan.schedule)


def phase_of(known: Known, before: int = 0) -> str:
    """What it is called that costs became ``known``, of which ``before`` were measured."""
    return "load" if known.own and known.measurings == before else "measure"
