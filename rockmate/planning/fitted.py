"""Captured graphs at sizes that never ran: their planners, from those of a few small sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from rkgb.cost.extrapolate import Extrapolated, Measured, convolution_kernels, extrapolated, form
from rockmate.planning.planner import Planner
from rockmate.progress import Report, part_of
from solvers import ChainPlan, Problem, Schedule, keep_everything, walk


class FittedStep:
    """A step of one size, as ``rockmate.estimate.StepOfSize``. ``like``: the planner of a size that was measured."""

    def __init__(self, like: Planner, found: Extrapolated) -> None:
        self.like, self.found, self.rough = like, found, found.rough

    @cached_property
    def planner(self) -> Planner:
        return self.like.fitted(self.found.s, self.found.costs, self.found.classes)

    @property
    def problem(self) -> Problem:
        return self.planner.problem

    @property
    def reserved(self) -> int:
        return self.planner.reserved

    @property
    def device(self) -> torch.device:
        return self.planner.device

    @property
    def eager_peak(self) -> int:
        return self.planner.eager_peak

    @property
    def peak(self) -> int:
        schedule = keep_everything(self.problem)
        return self.planner.predicted_peak(ChainPlan(schedule, walk(self.problem, schedule), "keep everything"))

    @cached_property
    def least(self) -> tuple[int, Schedule]:
        """What planning such a call says, too."""
        budget = self.planner.frontier().min_budget
        return budget, self.planner.solve(budget).schedule

    @cached_property
    def kernels(self) -> dict[str, str]:
        return convolution_kernels(self.found.s.d)


def fitted_steps(sizes: Sequence[int], planners: Sequence[Planner], report: Report) -> Callable[[int], FittedStep]:
    """Steps of any size; ``planners``: of the rising ``sizes`` that were measured; their graphs are ``alike``."""
    points = [_measured(size, planner) for size, planner in zip(sizes, planners, strict=True)]

    def at(size: int) -> FittedStep:
        like = dataclasses.replace(planners[-1], report=part_of(report, f"size {size}"))
        return FittedStep(like, extrapolated(points, size))

    return at


def _measured(size: int, planner: Planner) -> Measured:
    graphs = planner.graphs
    return Measured(size, graphs.S, graphs.known.of, graphs.classes)


def alike(a: Planner, b: Planner) -> bool:
    """Whether two sizes are of one graph."""
    return form(_measured(0, a)) == form(_measured(0, b))
