"""The ways in which a call with a plan can share a step's budget with others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import torch

from rockmate.calls.runnable import Runnable, program_of
from rockmate.calls.turns import fitting
from rockmate.planning.ways import way_of, ways_of
from rockmate.progress import Progress
from solvers import ChainPlan, keep_everything, walk
from solvers.calls import Way
from solvers.interrupts import Heeded


def with_gradients(runnable: Runnable, model: torch.nn.Module, inputs: list[torch.Tensor]) -> Runnable:
    """``runnable`` for calls in whose backward the gradients of all parameters are there: the same steps."""
    planner, plan = runnable.planner.with_gradients(model, inputs), runnable.plan
    same = ChainPlan(plan.schedule, walk(planner.problem, plan.schedule), plan.solver)
    return dataclasses.replace(runnable, planner=planner, plan=planner.described(plan.budget, same))


def waits_of(runnable: Runnable) -> int:
    """Bytes that the caller holds of such calls while others of the step run, as far as that was seen."""
    return 0 if runnable.observer is None else runnable.observer.waits


class PlannedWays:
    """Those of ``runnable``: see ``rockmate.calls.steps.Ways``. ``progress``: as for ``Rockmate``."""

    rough = False

    def __init__(self, runnable: Runnable, owner: object, progress: bool | None) -> None:
        self.runnable, self.owner, self.progress, self.seen = runnable, owner, progress, waits_of(runnable)
        self.call, self.device = runnable.call, runnable.planner.device
        room = runnable.planner.room  # is part of what is reserved
        self.waits = max(0, waits_of(runnable) - room.kept - room.scalars)
        k = runnable.planner.graphs.K
        self.made = sum(k.s.d.values[v].bytes for v in k.missing)
        self._asked: set[tuple[int, bool]] = set()
        self._found: dict[Way, ChainPlan] = {}
        self._placed: dict[Way, Runnable] = {}

    @cached_property
    def alone(self) -> Way:
        """As in ``Ways``."""
        plan, planner = self.runnable.plan, self.runnable.planner
        return way_of(planner.problem, plan.schedule, planner.reserved, self.waits)

    @cached_property
    def eager(self) -> Way:
        """As in ``Ways``."""
        problem = self.runnable.planner.problem
        return way_of(problem, keep_everything(problem), self.runnable.planner.reserved, self.waits)

    def within(self, budget: int, *, tight: bool = False) -> Sequence[Way]:
        """As in ``Ways``."""
        planner = self.runnable.planner
        if planner.saved is not None:
            return [self.alone]
        if (budget, tight) not in self._asked:
            with Heeded(), Progress(self.progress) as planner.report:
                self._found.update(ways_of(planner, budget, tight, self.waits))
            self._asked.add((budget, tight))
        return fitting([self.alone, *self._found], budget)

    def placed(self, way: Way) -> Runnable:
        """The plan that runs in this way."""
        if way == self.alone:
            return self.runnable
        if way not in self._placed:
            plan = self.runnable.planner.described(max(way.forward, way.backward), self._found[way])
            self._placed[way] = dataclasses.replace(self.runnable, plan=plan, program=program_of(plan))
        return self._placed[way]
