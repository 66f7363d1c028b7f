"""A Rockmate trains as its model does in eager mode, bit for bit, under budgets that force recomputation."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ZOO, Case, case, outputs_of, pairs, part_way, square_loss

from rkgb.sample import Call
from rockmate import Rockmate, measure_peak
from rockmate.calls.runnable import Runnable, make_runnable
from rockmate.planning.options import PlanOptions
from rockmate.planning.planner import Planner
from rockmate.planning.prepare import make_planner
from rockmate.run.executor import CallState
from solvers.schedule import Del, Run

FRACTIONS = (0.0, 0.5, 1.0)


def with_gradients(model: torch.nn.Module, allocated: bool = True) -> torch.nn.Module:
    """``model``, whose gradients are there already if they are ``allocated``."""
    for p in model.parameters() if allocated else ():
        p.grad = torch.zeros_like(p)
    return model


@cache
def planner_of(name: str) -> Planner:
    args, kwargs = case(name).call(0)
    return make_planner(case(name).model(), Call(args, kwargs), PlanOptions("flops"))


def budget_of(name: str, fraction: float) -> int:
    """A budget between the smallest feasible one and that of no recomputation."""
    return part_way(planner_of(name).frontier(), fraction)


def planned(c: Case, model: torch.nn.Module, budget: int | str) -> Rockmate:
    args, kwargs = c.call(0)
    return Rockmate(model, args, budget, sample_kwargs=kwargs, costs="flops")


def step(c: Case, model: torch.nn.Module, call: torch.nn.Module, seed: int) -> Iterator[torch.Tensor | None]:
    """Everything that a step computes: outputs, gradients of parameters and inputs, buffers, random state."""
    torch.manual_seed(seed)
    args, kwargs = c.call(seed)
    result = call(*args, **kwargs)
    square_loss(result).backward()
    yield from (t.detach() for t in outputs_of(result))
    yield from (p.grad for p in model.parameters())
    yield from (t.grad for t in outputs_of((args, kwargs)) if t.is_leaf and t.requires_grad)
    yield from model.buffers()
    yield torch.get_rng_state()


def assert_same(ours: Any, theirs: Any) -> None:
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a is None) == (b is None), f"item {k}"
        assert a is None or torch.equal(a, b), f"item {k} differs"


@pytest.mark.parametrize("allocated", [False, True], ids=["grads_none", "grads_allocated"])
@pytest.mark.parametrize("c", ZOO, ids=lambda c: c.name)
def test_two_steps_equal_eager_and_a_third_is_within_the_budget(c: Case, allocated: bool) -> None:
    """Under three budgets, one after the other: they share what is traced and measured."""
    model, eager = with_gradients(c.model(), allocated), with_gradients(c.model(), allocated)
    rk = planned(c, model, "100%")
    found = rk.frontier()
    args, kwargs = c.call(0)

    def train() -> None:
        if not allocated:
            for t in (*model.parameters(), *outputs_of((args, kwargs))):
                t.grad = None
        out = rk(*args, **kwargs)
        square_loss(out).backward()

    for fraction in FRACTIONS:
        rk.budget = part_way(found, fraction)
        assert not c.recomputes or fraction > 0 or rk.plan.recomputed > 0
        eager.load_state_dict(model.state_dict())
        for k in range(2):
            for m in (model, eager):
                m.zero_grad(set_to_none=not allocated)
            assert_same(step(c, model, rk, k), step(c, eager, eager, k))
            for m in (model, eager):
                torch.optim.SGD(m.parameters(), lr=0.05).step()
        train()
        assert measure_peak(train, "cpu") <= rk.budget


@pytest.mark.parametrize(
    ("loss", "fraction", "name"),
    pairs([F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss], [0.0, 0.5], ["mlp", "gpt", "two_in_two_out"]),
)
def test_what_a_loss_keeps_is_within_the_budget(name: str, fraction: float, loss: Any) -> None:
    """Results of mean square errors have storage as large as their input, for as long as they live."""
    c = case(name)
    args, kwargs = c.call(0)
    rk = planned(c, c.model(), budget_of(name, fraction))
    targets = [torch.zeros_like(t) for t in outputs_of(rk.original(*args, **kwargs))]

    def train() -> None:
        rk.zero_grad()
        losses = [loss(t, y) for t, y in zip(outputs_of(rk(*args, **kwargs)), targets, strict=True)]
        torch.autograd.backward(losses)

    train()
    assert measure_peak(train, "cpu") <= rk.budget


@pytest.mark.parametrize(("allocated", "held"), [(False, True), (True, False)], ids=["grads_none", "grads_allocated"])
def test_predicted_peak_is_the_measured_one(allocated: bool, held: bool) -> None:
    """Cross entropy is the loss that the prediction supposes; its own numbers are what the scalars are for."""
    c = case("gpt")
    model, x = with_gradients(c.model(), allocated), c.call(0)[0][0]
    rk = planned(c, model, "100%")
    top = rk.frontier().max_budget

    def train() -> None:
        model.zero_grad(set_to_none=not allocated)
        out = rk(x)
        loss = F.cross_entropy(out.flatten(0, 1), x.flatten())
        if not held:
            del out
        loss.backward()

    for percent in (95, 80, 70):
        rk.budget = top * percent // 100
        assert rk.plan.recomputed > 0
        train()
        measured = measure_peak(train, "cpu")
        assert rk.plan.predicted_peak <= measured <= rk.plan.predicted_peak + 64


@pytest.mark.parametrize("c", ZOO, ids=lambda c: c.name)
def test_a_backward_is_stopped_only_where_something_runs_again(c: Case) -> None:
    """Or for what autograd cannot let go by itself: outputs, and data that come back later."""
    for fraction in FRACTIONS:
        runnable = make_runnable(planner_of(c.name), budget_of(c.name, fraction))
        program, k = runnable.program, runnable.plan.graph
        needed = set(k.outputs)
        for steps in reversed(program.before):
            runs = [step for step in steps if isinstance(step, Run)]
            assert runs or any(step.data in needed for step in steps if isinstance(step, Del))
            needed.update(d for run in runs for d in (*k.nodes[run.node].reads, *k.nodes[run.node].makes))


def half(name: str = "gpt") -> tuple[Case, torch.nn.Module, torch.nn.Module, Rockmate]:
    c = case(name)
    model, eager = c.model(), c.model()
    rk = planned(c, model, budget_of(name, 0.3))
    assert rk.plan.recomputed > 0
    return c, model, eager, rk


def test_nothing_stays_allocated() -> None:
    c, _, _, rk = half()

    def states() -> list[CallState]:
        return [o for o in gc.get_objects() if type(o) is CallState]

    gc.collect()
    out = rk(*c.call(1)[0])
    assert len(states()) == 1
    del out
    assert not states(), "the call's state must go with the graph, without the garbage collector"
    loss = square_loss(rk(*c.call(1)[0]))
    loss.backward()
    assert all(held is None for state in states() for held in state.store.live)


def test_a_plan_for_each_budget_from_one_planner() -> None:
    planner = planner_of("mlp")
    runnables: list[Runnable] = [make_runnable(planner, budget_of("mlp", f)) for f in FRACTIONS]
    overheads = [v.plan.predicted_overhead for v in runnables]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[-1] == 0
