"""``Rockmate``: a module that computes what another does, in the memory it is given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from rkgb.sample import Sample
from rkgb.trace.patches import TRACING
from rockmate.budget import parse_budget
from rockmate.calls.attachment import Attachment, PlannedCall
from rockmate.calls.state import NO_REPLICAS
from rockmate.calls.surroundings import undisturbed
from rockmate.calls.terms import Terms
from rockmate.calls.variants import Variant
from rockmate.errors import BudgetError, InputError
from rockmate.facade import Facade, signed_as_original
from rockmate.planning.artefact import read_plan
from rockmate.planning.checks import checked_call
from rockmate.planning.options import PlanOptions, options_of
from rockmate.planning.plan import Plan
from rockmate.planning.prepare import make_planner
from rockmate.progress import Progress
from solvers import Frontier
from solvers.interrupts import Heeded


class Rockmate(Facade):
    """``model`` under a memory budget: same outputs, gradients and buffer updates, peak at most ``budget``.

    ``sample``: a tensor, a tuple of positional arguments, or a dict of keyword arguments, as ``model`` is
    called with; ``sample_kwargs``: keyword arguments beside a tuple. ``budget``: what one forward and its
    backward may allocate above the level at the forward, in bytes or as text: "2 GiB", "60%" of what the step takes
    without recomputation, or "auto" for what is free on the device when the plan is made, less a tenth (an optimizer
    whose state is not there yet needs its own part of that); ``rockmate.budget.parse_budget`` says what can be
    written. ``plan``: instead of a budget, a file that ``plan.save(path)`` wrote for this graph (else ``PlanError``).
    ``costs``: "measured" times every operation, "flops" models them (the same plan on every run and machine with such
    a device).
    ``loss_memory``: bytes that the loss allocates beside the outputs and their gradients. By default, room
    for three times the outputs' bytes is left in the first step, and for what the loss took from then on
    (``plan.room``). A scalar beside other outputs is taken for the loss until a step has shown which outputs
    the backward starts from. ``time_limit``: seconds after which the search for a plan ends with the best so far, as
    ``plan.reason`` then says; by default 60 for each integer program. ``solver``: one of
    ``solvers.solver_names(solvers.Problem)``, such as "sqrt" or one of your own; "auto" is the best of ours.
    ``progress``: True shows how far planning is, False does not; None does on a terminal, when it takes more than a
    second. ``cache``: the folder where costs and schedules are kept for the next start of a script; True for what the
    environment variable ROCKMATE_CACHE says (a path, or "off"), or else the platform's folder for such files; False or
    None for nowhere.

    ``plan`` is the plan of the last call, or the one that replaced it after its backward. Calls of another
    shape, or with other settings (whatever the module's Python reads), are planned when they first come, and
    cached; likewise a call that finds no ``.grad`` where there was one at planning, since gradients that are
    made then stay and count. Without gradients the model itself runs. ``attach`` plans a model in place. Raises
    ``InputError`` and its kinds for arguments that cannot be used, ``InfeasibleBudgetError`` for a budget that
    no plan fits, ``GraphError`` for a model that cannot be traced. Based on Rockmate (Zhao et al., ICML 2023).
    """

    OWN = frozenset({"_front"})

    def __init__(
        self,
        model: torch.nn.Module,
        sample: Sample,
        budget: int | float | str | None = None,
        *,
        plan: str | Path | None = None,
        sample_kwargs: dict[str, Any] | None = None,
        costs: str = "measured",
        loss_memory: int | None = None,
        time_limit: float | None = None,
        solver: str = "auto",
        progress: bool | None = None,
        cache: bool | str | os.PathLike[str] | None = True,
    ) -> None:
        call = checked_call(model, sample, sample_kwargs)
        if (plan is None) == (budget is None):
            raise BudgetError("give either a budget, or a saved plan, which has a budget of its own")
        saved = None if plan is None else read_plan(plan)
        super().__init__(model)
        asked = costs, loss_memory, time_limit, solver, cache
        options = options_of(*asked)
        if saved is not None:
            with saved.unchanged():
                options = options_of(saved.costs, saved.loss_memory, *asked[2:])
        terms = Terms(saved.budget if saved else parse_budget(budget), options, progress, always=True)
        self._front = Attachment(model, terms)
        self._front.plan_for(call, saved)

    @property
    def plan(self) -> Plan:
        """The plan of the last call, or the one that replaced it after its backward."""
        if self._last is None:
            raise InputError("a copy plans at its first call: call it before you ask for its plan")
        return self._last.plan

    @property
    def _last(self) -> Variant | None:
        """The plan of the last call, ready to run."""
        return self._front.variant

    @property
    def plans_made(self) -> int:
        """How many kinds of calls were planned."""
        return self._front.plans_made

    @property
    def plans(self) -> list[PlannedCall]:
        """All kinds of calls so far, each with its plan, those of the last call first."""
        return self._front.plans

    @property
    def budget(self) -> int:
        """Bytes that one forward and its backward may allocate. When it is set, only the solver runs again."""
        return self._front.budget

    @budget.setter
    def budget(self, budget: int | float | str) -> None:
        self._front.budget = budget

    @property
    def plans_dropped(self) -> int:
        """Plans that went because more than ``variants.MAX_PLANS`` kinds of calls came."""
        return self._front.plans_dropped

    @property
    def why_traced(self) -> str:
        """Why the model was traced as a whole, where TorchDynamo captures it as several graphs; empty if it is one."""
        return self._front.reason

    def frontier(self) -> Frontier:
        """Time against memory for the last kind of call, as ``rockmate.frontier``."""
        return self._front.frontier()

    @signed_as_original
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments."""
        self._check_own_changes()
        return self._front(*args, **kwargs)

    def _replicate_for_data_parallel(self) -> Rockmate:
        raise InputError(NO_REPLICAS)

    def backward(self) -> None:
        """Nothing: ``loss.backward()`` has done it. Kept for scripts of the first Rockmate, which call it."""

    def _check_own_changes(self) -> None:
        """Raise ``InputError`` where weights were replaced on the Rockmate, whose forward is not that of the model."""
        hooks = [h for h in self._forward_pre_hooks.values() if type(h).__module__.startswith("torch.nn.utils.")]
        parametrized = type(self).__name__ == f"Parametrized{type(self).__mro__[1].__name__}"
        if hooks or parametrized:
            what = type(hooks[0]).__name__ if hooks else "a parametrization"
            raise InputError(
                f"{what} was registered on the Rockmate, and the model would not see it: register it on the model "
                "(rk.original), before or after planning"
            )

    def extra_repr(self) -> str:
        budget = self._front.terms.budget
        return f"budget={budget} bytes" if isinstance(budget, int) else f"budget={budget}"


def frontier(
    model: torch.nn.Module,
    sample: Sample,
    *,
    sample_kwargs: dict[str, Any] | None = None,
    costs: str = "measured",
    loss_memory: int | None = None,
    progress: bool | None = None,
) -> Frontier:
    """Time against memory for ``model``: ``min_budget``, ``max_budget`` (no recomputation), and ``points``.

    Each point is (budget in bytes, predicted overhead as a fraction of the eager step). Arguments as for
    ``Rockmate``.
    """
    call, options = checked_call(model, sample, sample_kwargs), PlanOptions(costs, loss_memory)
    with TRACING, Heeded(), undisturbed(), Progress(progress) as report:
        return make_planner(model, call, options, report).frontier()
