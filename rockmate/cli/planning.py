"""Plans for what a function of the user's returned: on the way that ``rockmate.attach`` takes in training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.errors import GraphError
from rkgb.sample import call_of
from rkgb.trees import tensors_in
from rockmate import Attachment, HookError, InfeasibleBudgetError, Plan, Rockmate, VariantLimitError, attach
from rockmate.cli.load import Given
from rockmate.planning.step import StepPlan
from solvers import Frontier

STEPS = 4
"""Training steps after which the plan of a model that is several graphs is there."""


@dataclass(frozen=True)
class Options:
    """How plans are made: arguments of ``rockmate.attach``, and the type of autocast ("bfloat16"), or None."""

    costs: str = "measured"
    loss_memory: int | None = None
    solver: str = "auto"
    time_limit: float | None = None
    autocast: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of ``Rockmate`` and ``attach``."""
        return {
            "costs": self.costs,
            "loss_memory": self.loss_memory,
            "solver": self.solver,
            "time_limit": self.time_limit,
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
    """A model with a plan. ``why``: why it is several graphs; empty if it is one."""

    front: Rockmate | Attachment
    why: str = ""

    @property
    def plan(self) -> Plan | StepPlan:
        """The plan of the call."""
        plan = self.front.plan
        assert plan is not None
        return plan

    def frontier(self) -> Frontier:
        """Time against memory."""
        return self.front.frontier()


def planned(given: Given, budget: str, options: Options, whole: bool = False) -> Planned:
    """The plan for ``budget``. Raises what ``Rockmate`` raises.

    Where TorchDynamo captures a call as several graphs, there is a plan after a few steps of training, which are run
    here. ``whole``: such a model is traced as one graph all the same, if it can be.
    """
    try:
        with options.precision(given.model):
            front = Rockmate(given.model, given.sample, budget, sample_kwargs=given.sample_kwargs, **options.arguments)
    except (GraphError, HookError, VariantLimitError):
        found = _trained(given, budget, options)
        if found is None:
            raise
        return found
    one_graph = whole or not front.why_traced
    return Planned(front) if one_graph else _trained(given, budget, options) or Planned(front)


def _trained(given: Given, budget: str, options: Options) -> Planned | None:
    """The plan after some steps of training; None if there is none then. Raises ``InfeasibleBudgetError``."""
    handle = attach(given.model, budget, **options.arguments)
    call = call_of(given.sample, given.sample_kwargs)
    try:
        for _ in range(STEPS):
            with options.precision(given.model):
                outputs = given.model(*call.args, **call.kwargs)
            roots = [t for t in tensors_in(outputs) if t.requires_grad]
            torch.stack([t.float().mean() for t in roots]).sum().backward()
            given.model.zero_grad()
    except InfeasibleBudgetError:
        raise
    except Exception:  # noqa: BLE001 - why it is not supported is what the first error says
        return None
    return Planned(handle, handle.reason) if isinstance(handle.plan, StepPlan) else None
