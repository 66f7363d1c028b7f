"""``Rockmate``: a module that computes what another does, in the memory it is given."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rkgb.Btools import tensors_of
from rkgb.capture import current_mode
from rkgb.graphs import Structure
from rkgb.pipeline import Sample, call_of
from rockmate.budget import parse_budget
from rockmate.compiled import Program, compile_schedule
from rockmate.errors import InputError
from rockmate.executor import CallState
from rockmate.planning import Plan, Planner, make_planner
from solvers import Frontier


@dataclass(frozen=True)
class _Variant:
    """The plan for one kind of call, ready to run.

    Where nothing is recomputed the program is that of eager mode without the module's Python, whose local
    variables would hold tensors beyond the prediction.
    """

    plan: Plan
    program: Program
    structure: Structure


class Rockmate(torch.nn.Module):
    """``model`` under a memory budget: same outputs, gradients and buffer updates, peak at most ``budget``.

    ``sample``: a tensor, a tuple of positional arguments, or a dict of keyword arguments, as ``model`` is
    called with; ``sample_kwargs``: keyword arguments beside a tuple. ``budget``: what one forward and its
    backward may allocate above the level at the forward, in bytes or as text ("2 GiB"). ``costs``:
    "measured" times every operation, "flops" models them (the same plan on every run and machine).
    ``loss_memory``: bytes that the loss allocates beside the outputs and their gradients. By default room
    is left for three times the outputs' bytes, which suffices for the usual losses; ``plan.predicted_peak``
    is that of cross entropy, which takes two.

    ``plan`` is the plan of the last call. Calls of another shape are planned when they first come, and
    cached; likewise a call that finds no ``.grad`` where there was one at planning, since gradients that are
    made then stay and count. In ``eval()`` mode and without
    gradients the model itself runs. Raises ``InputError`` and its kinds for arguments that cannot be
    used, ``InfeasibleBudgetError`` for a budget that no plan fits, ``GraphError`` for a model that
    cannot be traced. Based on Rockmate (Zhao et al., ICML 2023).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sample: Sample,
        budget: int | float | str,
        *,
        sample_kwargs: dict[str, Any] | None = None,
        costs: str = "measured",
        loss_memory: int | None = None,
    ) -> None:
        super().__init__()
        args, kwargs = _checked_call(model, sample, sample_kwargs)
        # The very dicts of the model: names, values and changes of parameters and submodules are the model's.
        self.__dict__["_original"] = model
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = model.training
        self.budget = parse_budget(budget)
        self.plans_made = 0
        self._costs, self._loss_memory = costs, loss_memory
        self._variants: dict[tuple[Hashable, frozenset[str]], _Variant] = {}
        self.plan: Plan = self._variant(args, kwargs).plan

    @property
    def original(self) -> torch.nn.Module:
        """The module that was given."""
        found: torch.nn.Module = self.__dict__["_original"]
        return found

    def train(self, mode: bool = True) -> Rockmate:
        """Set the mode of the model, as ``nn.Module.train``."""
        self.original.train(mode)
        self.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments."""
        if not (self.training and torch.is_grad_enabled()):
            return self.original(*args, **kwargs)
        variant = self._variant(args, kwargs)
        self.plan = variant.plan
        outputs = iter(CallState(variant.program, self.original, tensors_of(args, kwargs)).forward())
        structure = variant.structure
        constants = dict(structure.output_constants)
        leaves = [constants[k] if k in constants else next(outputs) for k in range(structure.outputs.num_leaves)]
        return pytree.tree_unflatten(leaves, structure.outputs)

    def backward(self) -> None:
        """Nothing: ``loss.backward()`` has done it. Kept for scripts of the first Rockmate, which call it."""

    def _variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Variant:
        key = _call_key(self.original, args, kwargs)
        missing = frozenset(name for name, p in self.original.named_parameters() if p.requires_grad and p.grad is None)
        for (known, planned_missing), variant in self._variants.items():
            if known == key and missing <= planned_missing:  # gradients that are there need no memory
                return variant
        planner = make_planner(self.original, args, kwargs, self._costs, self._loss_memory)
        variant = make_variant(planner, self.budget)
        self._variants[key, missing] = variant
        self.plans_made += 1
        return variant

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles plan again at their first call: plans hold operators, which have no pickled form."""
        return {**self.__dict__, "_variants": {}, "plan": None}

    def extra_repr(self) -> str:
        return f"budget={self.budget} bytes"


def make_variant(planner: Planner, budget: int) -> _Variant:
    """The plan for ``budget``, ready to run."""
    solution = planner.solve(budget)
    k = planner.graphs.K
    plan = Plan(
        budget,
        planner.predicted_peak(solution),
        solution.overhead,
        solution.schedule,
        planner.problem,
        k,
        solution.source,
        dict(planner.seconds),
    )
    return _Variant(plan, compile_schedule(k, plan.schedule), k.s.d.structure)


def frontier(
    model: torch.nn.Module,
    sample: Sample,
    *,
    sample_kwargs: dict[str, Any] | None = None,
    costs: str = "measured",
    loss_memory: int | None = None,
) -> Frontier:
    """Time against memory for ``model``: ``min_budget``, ``max_budget`` (no recomputation), and ``points``.

    Each point is (budget in bytes, predicted overhead as a fraction of the eager step). Arguments as for
    ``Rockmate``.
    """
    args, kwargs = _checked_call(model, sample, sample_kwargs)
    return make_planner(model, args, kwargs, costs, loss_memory).frontier()


def _checked_call(
    model: torch.nn.Module, sample: Sample, sample_kwargs: dict[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The sample as arguments; refuses what no plan can be made for, before anything runs."""
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
    args, kwargs = call_of(sample, sample_kwargs)
    inputs = tensors_of(args, kwargs)
    parameters = list(model.named_parameters())
    if not any(p.requires_grad for _, p in parameters) and not any(t.requires_grad for t in inputs):
        raise InputError(
            "nothing needs a gradient: no parameter of the model and no tensor of the sample requires grad, so there "
            "is nothing to save memory on. Set requires_grad on what is to be trained."
        )
    devices = {p.device for _, p in parameters} or {t.device for t in inputs}
    for k, t in enumerate(inputs):
        if t.device not in devices and t.dim() > 0:
            raise InputError(
                f"tensor {k} of the sample is on {t.device}, the model on {', '.join(sorted(map(str, devices)))}: "
                f"move the sample with .to({str(next(iter(devices)))!r})"
            )
    return args, kwargs


def _call_key(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Calls with equal keys run the same graph."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    described = tuple(
        (tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad)
        if isinstance(x, torch.Tensor)
        else (type(x).__name__, repr(x))
        for x in leaves
    )
    modes = tuple(m.training for m in model.modules())
    needs = tuple(p.requires_grad for p in model.parameters())
    return (str(spec), described, current_mode(), modes, needs)
