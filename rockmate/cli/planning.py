"""Plans for what a function of the user's returned: on the way that ``rockmate.attach`` takes in training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rockmate import Plan, Rockmate
from rockmate.cli.load import Given
from rockmate.follow.plan import FollowedPlan
from rockmate.tell import be_silent
from solvers import Frontier


@dataclass(frozen=True)
class Options:
    """How plans are made: arguments of ``rockmate.attach``, and the type of autocast ("bfloat16"), or None."""

    costs: str = "measured"
    loss_memory: int | None = None
    solver: str = "auto"
    time_limit: float | None = None
    autocast: str | None = None
    compile: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of ``Rockmate`` and ``attach``."""
        return {
            "costs": self.costs,
            "loss_memory": self.loss_memory,
            "solver": self.solver,
            "time_limit": self.time_limit,
            "compile": self.compile,
        }

    @contextlib.contextmanager
    def precision(self, model: torch.nn.Module) -> Iterator[None]:
        """Autocast as asked for, on the device of the model."""
        if self.autocast is None:
            yield
            return
        device = next((p.device.type for p in model.parameters()), "cpu")
        with torch.autocast(device, dtype=getattr(torch, self.autocast)):
            yield


@dataclass(frozen=True)
class Planned:
    """A model with a plan. ``why`` it is not one graph; empty if it is."""

    front: Rockmate
    why: str = ""

    @property
    def plan(self) -> Plan | FollowedPlan:
        """The plan of the call."""
        plan = self.front.plan
        assert plan is not None
        return plan

    def frontier(self) -> Frontier:
        """Time against memory."""
        return self.front.frontier()


def planned(given: Given, budget: str, options: Options) -> Planned:
    """The plan for ``budget``. Raises what ``Rockmate`` raises."""
    be_silent()
    with options.precision(given.model):
        front = Rockmate(given.model, given.sample, budget, sample_kwargs=given.sample_kwargs, **options.arguments)
    return Planned(front, front.reason)
