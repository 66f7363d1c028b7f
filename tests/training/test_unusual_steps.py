"""Steps that differ from those before, budgets that change between the phases, and calls that have no backward."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from against_eager import assert_same
from models import randn
from torch import nn
from torch.nn import functional as F

from rockmate import Attachment, InfeasibleBudgetError, Rockmate, attach, measure_peak
from rockmate.planning.planner import Planner

WIDTH = 32


class Checked(nn.Module):
    """Blocks between which Python looks at values."""

    def __init__(self, inner: int = 4 * WIDTH) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(WIDTH, inner), nn.GELU(), nn.Linear(inner, WIDTH)) for _ in range(6))
        self.blocks = nn.ModuleList(blocks)
        self.seen = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
            self.seen = x[0, 0].item()
        return x


def train(model: nn.Module, x: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        model(x).square().mean().backward()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [[nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)] for _ in range(6)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


# ------------------------------------------------------------------ followed steps


def accumulated(budget: float, rows: int) -> tuple[nn.Module, Attachment, torch.Tensor]:
    """A model whose steps are planned where gradients are there. ``budget``: in parts of what a step takes that makes
    them, which are most of it.
    """
    torch.manual_seed(0)
    model, x = Checked(32 * WIDTH), randn(rows, WIDTH, seed=0)
    model.zero_grad()
    peak = measure_peak(lambda: train(model, x, 1))
    model.zero_grad()
    handle = attach(model, int(budget * peak), costs="flops", cache=False)
    train(model, x, 4)
    model.zero_grad()
    return model, handle, x


def test_gradients_that_were_there_when_a_step_was_planned_count_in_a_step_that_makes_them() -> None:
    model, handle, x = accumulated(1.0, 24)
    for _ in range(3):
        model.zero_grad()
        train(model, x, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measure_peak(lambda: train(model, x, 1)) <= handle.budget
        model.zero_grad()
        assert handle.budget >= measure_peak(lambda: train(model, x, 1)) == handle.plan.predicted_peak


def test_where_these_never_fit_that_is_an_error() -> None:
    with pytest.raises(InfeasibleBudgetError, match="the smallest that can be planned is"):
        accumulated(0.9, 16)


def test_where_there_is_room_for_these_nothing_is_said() -> None:
    model, handle, x = accumulated(2.0, 24)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model.zero_grad()
            assert measure_peak(lambda: train(model, x, 1)) <= handle.budget
            train(model, x, 1)


def test_a_batch_for_which_no_plan_fits_does_not_end_training_with_smaller_ones() -> None:
    torch.manual_seed(0)
    model = Checked()
    model.zero_grad()
    small, large = randn(64, WIDTH, seed=0), randn(1024, WIDTH, seed=0)
    budget = 2 * measure_peak(lambda: train(model, small, 1))
    model.zero_grad()
    attach(model, budget, costs="flops", cache=False)

    def fresh(x: torch.Tensor, steps: int) -> None:
        for _ in range(steps):
            model.zero_grad()
            train(model, x, 1)

    with pytest.raises(InfeasibleBudgetError, match="make the batch smaller") as first:
        fresh(large, 4)
    with warnings.catch_warnings():
        fresh(small, 4)
    model.zero_grad()
    assert measure_peak(lambda: train(model, small, 1)) <= budget
    assert first.value.min_budget > budget


def test_a_call_in_which_nothing_needs_a_gradient_is_no_reason_to_trace_the_model() -> None:
    torch.manual_seed(0)
    model, head, x = Checked(), nn.Linear(WIDTH, 4), randn(256, WIDTH, seed=0)
    handle = attach(model, "80%", costs="flops", cache=False)
    model.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head(model(x)).sum().backward()
        model.requires_grad_(True)
        for k in range(5):
            head(model(randn(256, WIDTH, seed=k))).sum().backward()
    assert handle.plan is not None


def test_gradients_of_several_backwards_at_once() -> None:
    torch.manual_seed(0)
    model, x = Checked(), randn(64, WIDTH, seed=0)
    weights = randn(3, 64, WIDTH, seed=1)

    def grads() -> Any:
        return torch.autograd.grad(model(x), list(model.parameters()), weights, is_grads_batched=True)

    expected = grads()
    attach(model, "80%", costs="flops", cache=False)
    train(model, x, 3)
    assert_same(grads(), expected)


def test_losses_by_turns_are_planned_for_when_each_came_twice() -> None:
    """A look that came to the loss that was known passed over the other one, time after time."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(24) for m in (nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 256))
    x = randn(512, 64, seed=0)

    def large(y: torch.Tensor) -> torch.Tensor:
        return (y.softmax(-1) * y.sigmoid() * y.tanh() * y.exp() * y.cos() * y.sin()).sum()

    def run(m: nn.Module, k: int) -> int:
        m.zero_grad()
        loss = large if k % 2 else torch.Tensor.mean
        if k < 4:
            loss(m(x)).backward()
            return 0
        return measure_peak(lambda: loss(m(x)).backward())

    eager = copy.deepcopy(model)
    budget = int(0.9 * max(run(eager, k) for k in (4, 5)))
    attach(model, budget, costs="flops", cache=False)
    assert max(run(model, k) for k in range(8)) <= budget


# ------------------------------------------------------------------ budgets that do not bind


def test_another_mode_is_measured_though_the_budget_did_not_bind() -> None:
    model, x = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(512, 512), nn.ReLU()))), randn(8, 512, seed=0)
    gradients = sum(p.nbytes for p in model.parameters())
    handle = attach(model, 40 * gradients, costs="flops", cache=False)
    for _ in range(2):
        model.zero_grad()
        train(model, x, 1)
    assert handle.plan is None, "the budget does not bind"

    def cast() -> None:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()

    cast()
    assert [("autocast" in " ".join(kind.call)) for kind in handle.plans] == [False, True]


def test_a_number_that_changes_in_every_step_is_measured_some_times() -> None:
    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.slope = nn.Linear(8, 8), nn.Linear(8, 8), 0.1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(F.leaky_relu(self.a(x), self.slope))

    model, x = Slope(), randn(4, 8, seed=0)
    handle = attach(model, "1 GiB", costs="flops", cache=False)
    looked_at = 0
    for k in range(600):
        model.slope = 0.1 + 1e-5 * k
        y = model(x)
        looked_at += torch.autograd._profiler_enabled()
        y.sum().backward()
    assert looked_at <= 260, "256, and those of the first captures"
    assert len(handle.plans) <= 256


@pytest.mark.parametrize("budget", ["1 GiB", "80%"])
@pytest.mark.parametrize("graphs", [1, 6])
def test_a_forward_without_a_backward_leaves_no_profiler_open(budget: str, graphs: int) -> None:
    torch.manual_seed(0)
    model = layers() if graphs == 1 else Checked()
    x = randn(64, WIDTH, seed=0)
    attach(model, budget, costs="flops", cache=False)
    for _ in range(4):
        model(x)
        assert not torch.autograd._profiler_enabled()
        model(x).sum().backward()


# ------------------------------------------------------------------ between forward and backward


def test_a_budget_that_is_set_between_forward_and_backward_holds() -> None:
    model, x = layers(), randn(256, WIDTH, seed=0)
    handle = attach(model, "1 GiB", costs="flops", cache=False)
    loss = model(x).square().mean()
    handle.budget = budget = 800 * 2**10
    loss.backward()
    for _ in range(2):
        model.zero_grad()
        train(model, x, 1)
    model.zero_grad()
    assert handle.plan is not None
    assert measure_peak(lambda: train(model, x, 1)) <= handle.budget == budget


def test_a_loss_is_seen_though_the_budget_was_set_meanwhile() -> None:
    model, x = layers(), randn(256, WIDTH, seed=0)
    rk = Rockmate(model, x, "90%", costs="flops", cache=False)
    loss = rk(x).square().mean()
    rk.budget = "80%"
    loss.backward()
    train(rk, x, 2)
    assert rk.plan.room.seen


def test_what_a_step_has_shown_is_not_lost_by_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = layers(), randn(256, WIDTH, seed=0)
    rk = Rockmate(model, x, "90%", costs="flops", cache=False)

    def interrupted(*_: Any, **__: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Planner, "for_usage", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(rk, x, 1)
    train(rk, x, 2)
    assert rk.plan.room.seen


def test_memory_of_outputs_that_is_watched_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps the record of a memory until each weak reference to it was freed."""
    model, x = layers(), randn(64, WIDTH, seed=0)
    rk = Rockmate(model, x, "90%", costs="flops", cache=False)
    train(rk, x, 3)
    made, freed = [], []
    make, free = torch.UntypedStorage._weak_ref, torch.UntypedStorage._free_weak_ref

    def weak(self: Any) -> Any:
        made.append(None)
        return make(self)

    def let_go(*args: Any) -> Any:
        freed.append(None)
        return free(*args)

    monkeypatch.setattr(torch.UntypedStorage, "_weak_ref", weak)
    monkeypatch.setattr(torch.UntypedStorage, "_free_weak_ref", staticmethod(let_go))
    train(rk, x, 10)
    assert len(made) == len(freed) >= 10


def test_a_backward_that_fails_says_nothing_of_the_memory_of_a_step() -> None:
    model, x = layers(), randn(256, WIDTH, seed=0)
    handle = attach(model, "1 GiB", costs="flops", cache=False)

    def fail(_: Any) -> None:
        raise RuntimeError("a hook of the user's")

    hook = model[0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="a hook of the user's"):
        model(x).sum().backward()
    assert handle.plans == [], "the step was not measured to its end"
    hook.remove()
    model.zero_grad()
    model(x).sum().backward()
    assert len(handle.plans) == 1
