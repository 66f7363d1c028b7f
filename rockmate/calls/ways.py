"""The ways in which a call with a plan can share a step's budget with others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from rockmate.calls.front import Front
from rockmate.calls.runnable import Runnable, program_of
from rockmate.planning.ways import FoundWays, Waits, peak_of
from rockmate.progress import Progress
from solvers import ChainPlan, ChainPlanner, Problem, Schedule, walk
from solvers.calls import Way
from solvers.interrupts import Heeded


def with_gradients(runnable: Runnable, model: torch.nn.Module, inputs: list[torch.Tensor]) -> Runnable:
    """``runnable`` for calls in whose backward the gradients of all parameters are there: the same steps."""
    planner, plan = runnable.planner.with_gradients(model, inputs), runnable.plan
    same = ChainPlan(plan.schedule, walk(planner.problem, plan.schedule), plan.solver)
    return dataclasses.replace(runnable, planner=planner, plan=planner.described(plan.budget, same))


def waits_of(runnable: Runnable) -> Waits:
    """What is held of such calls while others of the step run. Where that was not seen, all that is reserved."""
    room, observer = runnable.planner.room, runnable.observer
    if observer is None:
        return Waits()
    reserved = room.kept + room.scalars
    forwards, backwards = observer.waits or (reserved, reserved)
    return Waits(forwards - reserved, backwards - reserved, max(0, observer.early - reserved))


class PlannedWays(FoundWays[Runnable]):
    """Those of ``runnable``, a plan of ``front``. ``carries``: those of other sizes do, until runs again took long."""

    def __init__(self, runnable: Runnable, front: Front) -> None:
        planner = runnable.planner
        figures = planner.problem, runnable.plan.schedule, runnable.plan.walk, planner.reserved
        family = runnable.family
        self.carries = family is not None and planner.scaled and not family.is_worth_solving(runnable.number)
        alike = family.ways if family is not None and self.carries else None
        super().__init__(*figures, waits_of(runnable), planner.ways, runnable, alike)
        self.runnable, self.owner, self.front = runnable, front, front
        self.call, self.device = runnable.plan.call, planner.device
        k = planner.graphs.K
        self.made = sum(k.s.d.values[v].bytes for v in k.missing)

    def look_for(self, budget: int, tight: bool) -> Iterable[Schedule]:
        """As in ``FoundWays``; none where the plan is from a file."""
        planner = self.runnable.planner
        if planner.saved is not None:
            return []
        with Heeded(), Progress(self.front.terms.progress) as planner.report:
            return list(super().look_for(budget, tight))

    def _search(self, budget: int, tight: bool) -> list[Schedule]:
        found = super()._search(budget, tight)
        if self.runnable.family is not None:
            self.runnable.family.learn_ways((budget, tight), found)
        return found

    @property
    def is_stale(self) -> bool:
        """Whether calls were seen to hold something else meanwhile, or to take so long that a search pays."""
        family, number = self.runnable.family, self.runnable.number
        pays = self.carries and family is not None and family.is_worth_solving(number)
        return pays or self.waits != waits_of(self.runnable)

    def least(self) -> tuple[int, None]:
        return self.runnable.planner.frontier().min_budget - self.beside, None

    def solve(self, problem: Problem, limit: int) -> Schedule | None:
        planner = self.runnable.planner
        chain = planner.chain() if problem is self.problem else ChainPlanner(problem, solved=planner.solved)
        found = chain.found(limit)
        return None if found is None else found.schedule

    def lowered(self, way: Way, schedule: Schedule) -> Runnable:
        found = ChainPlan(schedule, walk(self.problem, schedule), "for several calls")
        plan = self.runnable.planner.described(peak_of(way), found)
        return dataclasses.replace(self.runnable, plan=plan, program=program_of(plan))
