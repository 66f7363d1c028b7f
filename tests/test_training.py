"""A Rockmate trains as its model does in eager mode, bit for bit, under budgets that force recomputation."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ZOO, Case, case, outputs_of, square_loss

from rockmate import Rockmate, measure_peak
from rockmate.executor import CallState
from rockmate.module import _Variant, make_variant
from rockmate.planning import Planner, make_planner

FRACTIONS = (0.0, 0.5, 1.0)


@cache
def planner_of(name: str, allocated: bool = False) -> Planner:
    model = case(name).model()
    for p in model.parameters() if allocated else ():
        p.grad = torch.zeros_like(p)
    args, kwargs = case(name).call(0)
    return make_planner(model, args, kwargs, "flops", None)


def budget_of(name: str, fraction: float, allocated: bool = False) -> int:
    """A budget between the smallest feasible one and that of no recomputation."""
    found = planner_of(name, allocated).frontier()
    return found.min_budget + round(fraction * (found.max_budget - found.min_budget))


def planned(c: Case, model: torch.nn.Module, budget: int) -> Rockmate:
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


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("c", ZOO, ids=lambda c: c.name)
def test_two_steps_equal_eager(c: Case, fraction: float) -> None:
    model, eager = c.model(), c.model()
    rk = planned(c, model, budget_of(c.name, fraction))
    assert not c.recomputes or fraction > 0 or rk.plan.recomputed > 0
    for k in range(2):
        assert_same(step(c, model, rk, k), step(c, eager, eager, k))
        for m in (model, eager):
            torch.optim.SGD(m.parameters(), lr=0.05).step()
            m.zero_grad(set_to_none=k == 0)


@pytest.mark.parametrize("allocated", [False, True], ids=["grads_none", "grads_allocated"])
@pytest.mark.parametrize("fraction", (0.0, 0.5, 1.0))
@pytest.mark.parametrize("c", ZOO, ids=lambda c: c.name)
def test_measured_peak_is_within_the_budget(c: Case, fraction: float, allocated: bool) -> None:
    model = c.model()
    if allocated:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    args, kwargs = c.call(0)
    rk = planned(c, model, budget_of(c.name, fraction, allocated))

    def train() -> None:
        if not allocated:
            for t in (*model.parameters(), *outputs_of((args, kwargs))):
                t.grad = None
        out = rk(*args, **kwargs)
        square_loss(out).backward()

    train()
    assert measure_peak(train, "cpu") <= rk.budget


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("allocated", [False, True], ids=["grads_none", "grads_allocated"])
@pytest.mark.parametrize("percent", [95, 80, 70])
def test_predicted_peak_is_the_measured_one(percent: int, allocated: bool, held: bool) -> None:
    """Cross entropy is the loss that the prediction supposes; its own numbers are what the scalars are for."""
    c = case("gpt")
    model, x = c.model(), c.call(0)[0][0]
    if allocated:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    top = planner_of("gpt", allocated).frontier().max_budget
    rk = planned(c, model, top * percent // 100)
    assert rk.plan.recomputed > 0

    def train() -> None:
        model.zero_grad(set_to_none=not allocated)
        out = rk(x)
        loss = F.cross_entropy(out.flatten(0, 1), x.flatten())
        if not held:
            del out
        loss.backward()

    train()
    measured = measure_peak(train, "cpu")
    assert rk.plan.predicted_peak <= measured <= rk.plan.predicted_peak + 64


def half(name: str = "gpt") -> tuple[Case, torch.nn.Module, torch.nn.Module, Rockmate]:
    c = case(name)
    model, eager = c.model(), c.model()
    rk = planned(c, model, budget_of(name, 0.3))
    assert rk.plan.recomputed > 0
    return c, model, eager, rk


def gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in model.parameters()]


def test_two_forwards_before_their_backwards() -> None:
    c, model, eager, rk = half()
    for call in (rk, eager):
        torch.manual_seed(5)
        first, second = (square_loss(call(*c.call(k)[0])) for k in (1, 2))
        first.backward()
        second.backward()
    assert_same(gradients(model), gradients(eager))


def test_accumulation_with_and_without_gradients() -> None:
    c, model, eager, rk = half()
    for k in range(3):
        assert_same(step(c, model, rk, k), step(c, eager, eager, k))
    assert rk.plans_made == 1  # gradients that are there need no plan of their own


def test_retain_graph_and_the_error_without_it() -> None:
    c, model, eager, rk = half()
    messages = []
    for call in (rk, eager):
        torch.manual_seed(5)
        loss = square_loss(call(*c.call(1)[0]))
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError) as error:
            loss.backward()
        messages.append(str(error.value))
    assert_same(gradients(model), gradients(eager))
    assert messages[0] == messages[1]


def test_double_backward() -> None:
    c, model, eager, rk = half()
    for m, call in ((model, rk), (eager, eager)):
        torch.manual_seed(5)
        loss = square_loss(call(*c.call(1)[0]))
        grads = torch.autograd.grad(loss, list(m.parameters()), create_graph=True)
        torch.stack([g.square().sum() for g in grads]).sum().backward()
    assert_same(gradients(model), gradients(eager))


def test_backward_of_parts() -> None:
    c, model, eager, rk = half()
    for call in (rk, eager):
        torch.manual_seed(5)
        out = call(*c.call(1)[0])
        out[0].sum().backward(retain_graph=True)
        out[1].square().sum().backward()
    assert_same(gradients(model), gradients(eager))


def test_hooks_see_what_they_see_in_eager() -> None:
    c, model, eager, rk = half()
    seen: list[list[torch.Tensor]] = []
    for m, call in ((model, rk), (eager, eager)):
        notes: list[torch.Tensor] = []
        for p in m.parameters():
            p.register_post_accumulate_grad_hook(lambda q, notes=notes: notes.append(q.grad.clone()))
        torch.manual_seed(5)
        out = call(*c.call(1)[0])
        out.register_hook(lambda g, notes=notes: notes.append(g.clone()))
        square_loss(out).backward()
        seen.append(notes)
    assert_same(*seen)


def test_eval_and_no_grad_call_the_model() -> None:
    c, model, eager, rk = half()
    x = c.call(1)[0][0]
    rk.eval()
    assert not model.training
    assert torch.equal(rk(x), eager.eval()(x))
    rk.train()
    assert model.training
    with torch.no_grad():
        assert rk(x).grad_fn is None


def test_other_shapes_are_planned_once_each() -> None:
    c, model, eager, rk = half()
    eager.train()
    for batch in (1, 2, 1, 1):
        x = c.call(1)[0][0][:batch]
        for m, call in ((model, rk), (eager, eager)):
            m.zero_grad()
            torch.manual_seed(5)
            square_loss(call(x)).backward()
        assert_same(gradients(model), gradients(eager))
    assert rk.plans_made == 2


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
    assert all(held is None for state in states() for held in state.live)


def test_a_parameter_changed_before_backward_is_an_error() -> None:
    c, model, _, rk = half()
    loss = square_loss(rk(*c.call(1)[0]))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copies_and_pickles_train() -> None:
    c, model, _, rk = half()
    for other in (copy.deepcopy(rk), pickle.loads(pickle.dumps(rk))):
        reference = c.model()
        assert other.original is not model
        assert_same(step(c, other.original, other, 3), step(c, reference, reference, 3))


def test_a_plan_for_each_budget_from_one_planner() -> None:
    planner = planner_of("mlp")
    variants: list[_Variant] = [make_variant(planner, budget_of("mlp", f)) for f in FRACTIONS]
    overheads = [v.plan.predicted_overhead for v in variants]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[-1] == 0
