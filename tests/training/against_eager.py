"""Train a model under a budget that forces recomputation, and as it is, and compare everything, bit for bit."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from models import Case, outputs_of, part_way, square_loss
from torch import nn

from rkgb.sample import call_of
from rockmate import Attachment, Rockmate, attach, measure_peak
from rockmate.planning.options import PlanOptions
from rockmate.planning.plan import Plan
from rockmate.planning.prepare import make_planner
from solvers import Frontier, Problem, all_baselines, walk

Train = Callable[[nn.Module, nn.Module], Iterable[Any]]
"""``train(model, call)``: runs steps, ``call`` in the place of ``model``, and yields what must be equal."""


def tight_budget(model: nn.Module, args: Any, kwargs: dict[str, Any] | None = None, fraction: float = 0.3) -> int:
    """Between the least peak of what needs no optimiser (checkpoints, all recomputed) and that of no recomputation;
    where these are the same, as for a single block, between the least that can be planned and that.
    """
    planner = make_planner(copy.deepcopy(model), call_of(args, kwargs), PlanOptions("flops"))
    return _between(planner.problem, planner.reserved, fraction, planner.frontier)


def _between(problem: Problem, reserved: int, fraction: float, frontier: Callable[[], Frontier]) -> int:
    peaks = [walk(problem, schedule).peak for schedule in all_baselines(problem).values()]
    least = reserved + min(peaks) if min(peaks) < max(peaks) else frontier().min_budget
    return least + round(fraction * (reserved + max(peaks) - least))


def under_budget(model: nn.Module, *args: Any, fraction: float = 0.3, **kwargs: Any) -> Rockmate:
    """``model`` under a budget with which something runs again: that of ``tight_budget``."""
    rk = Rockmate(model, args, "100%", sample_kwargs=kwargs, costs="flops")
    if isinstance(rk.plan, Plan):
        problem = rk.plan.problem
        reserved = rk.budget - walk(problem, rk.plan.schedule).peak
        rk.budget = _between(problem, reserved, fraction, rk.frontier)
    else:  # followed: what is drawn is kept, so that less can be saved
        rk.budget = part_way(rk.frontier(), fraction)
    assert rk.plan.recomputed > 0, "the budget forces nothing"
    return rk


WAYS = ("attach", "Rockmate")
"""How a model comes under a budget."""


def planned_by(way: str, model: nn.Module, budget: int | str, *args: Any) -> tuple[nn.Module, Attachment | Rockmate]:
    """What is called in the place of ``model``, and what has the plan, for calls with ``args`` by one of ``WAYS``."""
    if way == "attach":
        return model, attach(model, budget, sample=args, costs="flops", cache=False)
    rk = Rockmate(model, args, budget, costs="flops")
    return rk, rk


_PLANS = tempfile.TemporaryDirectory()


@cache
def _saved_plan(c: Case) -> Path:
    """Planning is slow, so that it happens once for each model; tests load the plan."""
    args, kwargs = c.call(0)
    path = Path(_PLANS.name) / f"{c.name}.json"
    under_budget(c.model(), *args, **kwargs).plan.save(path)
    return path


def planned(c: Case) -> tuple[nn.Module, Rockmate]:
    """The model of ``c`` twice: as it is, and under a budget with which something runs again."""
    args, kwargs = c.call(0)
    return c.model(), Rockmate(c.model(), args, plan=_saved_plan(c), sample_kwargs=kwargs)


def assert_same(ours: Iterable[Any], theirs: Iterable[Any]) -> None:
    """Equal tensors (bit for bit), Nones and values, item by item."""
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(b, torch.Tensor):
            assert isinstance(a, torch.Tensor), f"item {k} is {a!r}"
            assert a.dtype == b.dtype, f"item {k}: {a.dtype} and {b.dtype}"
            assert torch.equal(a, b), f"item {k} differs by {float((a - b).abs().max()):.3g}"
        else:
            assert a == b, f"item {k}: {a!r} and {b!r}"


def snapshot(model: nn.Module, *tensors: torch.Tensor) -> Iterator[Any]:
    """Copies of parameters, their gradients, buffers, gradients of ``tensors``, and the generator's state."""
    for t in (*model.parameters(), *tensors):
        yield t.detach().clone()
        yield None if t.grad is None else t.grad.clone()
    yield from (b.clone() for b in model.buffers())
    yield torch.get_rng_state()


def assert_trains_as_eager(eager: nn.Module, rk: Rockmate, train: Train) -> None:
    """``train`` yields the same for both, and both are in the same state afterwards."""
    results = []
    for model, call in ((eager, eager), (rk.original, rk)):
        torch.manual_seed(5)
        results.append([*train(model, call), *snapshot(model)])
    assert_same(results[1], results[0])


def step(call: nn.Module, args: Iterable[Any], kwargs: dict[str, Any] | None = None) -> list[torch.Tensor]:
    """Forward and backward of ``square_loss``; the outputs, detached copies."""
    result = call(*args, **(kwargs or {}))
    square_loss(result).backward()
    return [t.detach().clone() for t in outputs_of(result)]


def assert_in_budget(rk: Rockmate, function: Callable[[], Any], grads: Iterable[torch.Tensor] = ()) -> None:
    """The measured peak of ``function`` (which makes no inputs) is at most the budget, gradients being None before."""

    def fresh() -> None:
        for t in (*rk.original.parameters(), *grads):
            t.grad = None

    fresh()
    function()
    fresh()
    peak = measure_peak(function, "cpu")
    assert peak <= rk.budget, f"peak {peak}, budget {rk.budget}"
