"""The ways in which a call with a plan can share a step's budget with others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import torch

from rockmate.calls.turns import fitting
from rockmate.calls.variants import Variant, program_of
from rockmate.planning.ways import way_of, ways_of
from rockmate.progress import Progress
from solvers import ChainPlan, keep_everything, walk
from solvers.calls import Way
from solvers.interrupts import Heeded


def with_gradients(variant: Variant, model: torch.nn.Module, inputs: list[torch.Tensor]) -> Variant:
    """``variant`` for calls in whose backward the gradients of all parameters are there: the same steps."""
    planner, plan = variant.planner.with_gradients(model, inputs), variant.plan
    same = ChainPlan(plan.schedule, walk(planner.problem, plan.schedule), plan.solver)
    return dataclasses.replace(variant, planner=planner, plan=planner.described(plan.budget, same))


def waits_of(variant: Variant) -> int:
    """Bytes that the caller holds of such calls while others of the step run, as far as that was seen."""
    return 0 if variant.observer is None else variant.observer.waits


class PlannedWays:
    """Those of ``variant``: see ``rockmate.calls.steps.Ways``. ``progress``: as for ``Rockmate``."""

    rough = False

    def __init__(self, variant: Variant, owner: object, progress: bool | None) -> None:
        self.variant, self.owner, self.progress, self.seen = variant, owner, progress, waits_of(variant)
        self.call, self.device = variant.call, variant.planner.device
        room = variant.planner.room  # is part of what is reserved
        self.waits = max(0, waits_of(variant) - room.kept - room.scalars)
        k = variant.planner.graphs.K
        self.made = sum(k.s.d.values[v].bytes for v in k.missing)
        self._asked: set[tuple[int, bool]] = set()
        self._found: dict[Way, ChainPlan] = {}
        self._placed: dict[Way, Variant] = {}

    @cached_property
    def alone(self) -> Way:
        """As in ``Ways``."""
        plan, planner = self.variant.plan, self.variant.planner
        return way_of(planner.problem, plan.schedule, planner.reserved, self.waits)

    @cached_property
    def eager(self) -> Way:
        """As in ``Ways``."""
        problem = self.variant.planner.problem
        return way_of(problem, keep_everything(problem), self.variant.planner.reserved, self.waits)

    def within(self, budget: int, *, tight: bool = False) -> Sequence[Way]:
        """As in ``Ways``."""
        planner = self.variant.planner
        if planner.saved is not None:
            return [self.alone]
        if (budget, tight) not in self._asked:
            with Heeded(), Progress(self.progress) as planner.report:
                self._found.update(ways_of(planner, budget, tight, self.waits))
            self._asked.add((budget, tight))
        return fitting([self.alone, *self._found], budget)

    def placed(self, way: Way) -> Variant:
        """The variant that runs in this way."""
        if way == self.alone:
            return self.variant
        if way not in self._placed:
            plan = self.variant.planner.described(max(way.forward, way.backward), self._found[way])
            self._placed[way] = dataclasses.replace(self.variant, plan=plan, program=program_of(plan))
        return self._placed[way]
