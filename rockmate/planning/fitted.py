"""Captured graphs at sizes that never ran: their planners, from those of a few small sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import torch

from rkgb.cost.extrapolate import Extrapolated, Measured, extrapolated, form
from rkgb.cost.kernels import convolution_kernels
from rockmate.planning.planner import Planner
from rockmate.progress import Report, part_of
from solvers import ChainPlan, Problem, Schedule, keep_everything, walk


class FittedStep:
    """A step of one size, as ``rockmate.estimate.StepOfSize``."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.problem: Problem = planner.problem
        self.reserved = planner.reserved

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


class FittedGraphs:
    """One graph at any size, as ``rockmate.estimate.Fitted``."""

    def __init__(self, sizes: Sequence[int], planners: Sequence[Planner], report: Report) -> None:
        """``planners``: of the rising ``sizes`` that were measured; their graphs are ``alike``."""
        self.sizes, self.last, self.report = tuple(sizes), planners[-1], report
        self._points = [measured(size, planner) for size, planner in zip(sizes, planners, strict=True)]
        self._found: dict[int, Extrapolated] = {}

    def at(self, size: int) -> FittedStep:
        found = self._at(size)
        last = dataclasses.replace(self.last, report=part_of(self.report, f"size {size}"))
        return FittedStep(last.fitted(found.s, found.costs, found.classes))

    def rough(self, size: int) -> tuple[str, ...]:
        return self._at(size).rough

    def kernels(self, size: int) -> dict[str, str]:
        return convolution_kernels(self._at(size).s.d)

    def _at(self, size: int) -> Extrapolated:
        if size not in self._found:
            self._found[size] = extrapolated(self._points, size)
        return self._found[size]


def measured(size: int, planner: Planner) -> Measured:
    graphs = planner.graphs
    return Measured(size, graphs.S, graphs.known.of, graphs.classes)


def alike(a: Planner, b: Planner) -> bool:
    """Whether two sizes are of one graph."""
    return form(measured(0, a)) == form(measured(0, b))
