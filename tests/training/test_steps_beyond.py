"""Followed steps that keep more than one forward and one backward do, and backwards of others within a step."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from against_eager import assert_same, snapshot
from models import randn
from torch import nn

from rockmate import Attachment, BudgetWarning, attach, measure_peak

ROWS, WIDTH = 320, 64


class Checked(nn.Module):
    """Blocks between which Python looks at values."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4))
        self.first, self.blocks, self.largest = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.largest = x.abs().max().item()
        for block in self.blocks:
            x = x + block(x)
            if x.isnan().any():
                print("not a number")  # noqa: T201
        return x


def planned(share: float) -> tuple[nn.Module, torch.Tensor, Attachment]:
    """A model whose steps are planned, an input and the plans."""
    torch.manual_seed(0)
    model, x = Checked(), randn(ROWS, WIDTH, seed=1)
    handle = attach(model, f"{share:.0%}")
    for _ in range(4):
        model(x).square().mean().backward()
    return model, x, handle


def test_calls_that_add_up_are_said_to_exceed_the_budget() -> None:
    model, x, _ = planned(0.7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one call and its backward at a time, and calls without a backward
        for _ in range(2):
            model(x).square().mean().backward()
            with torch.no_grad():
                model(x)
    with pytest.warns(BudgetWarning, match="was called 2 times before a backward"):
        loss = model(x).square().mean() + model(-x).square().mean()
    loss.backward()


def test_two_calls_for_which_there_is_room_are_no_reason_to_warn() -> None:
    model, x, handle = planned(0.7)
    one = measure_peak(lambda: model(x).square().mean().backward())
    handle.budget = 5 * one
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (model(x).square().mean() + model(-x).square().mean()).backward()


@pytest.mark.parametrize("what", ["retain_graph", "create_graph"])
def test_a_backward_whose_graph_stays_is_said_to_exceed_the_budget_once(what: str) -> None:
    model, x, _ = planned(0.7)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss = model(x).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()), **{what: True})
        del gradients, loss
    assert [str(w.message) for w in said if "retain_graph" in str(w.message)] == [str(w.message) for w in said]
    assert len(said) == 1


def test_observed_steps_leave_no_activation() -> None:
    torch.manual_seed(0)
    model, x = Checked(), randn(ROWS, WIDTH, seed=1)
    attach(model, "70%")
    gc.collect()
    gc.disable()  # what is left for the collector stays
    try:
        left = []
        for _ in range(4):
            y = model(x)
            y.square().mean().backward()
            del y
            left.append(sum(type(t) is torch.Tensor and t.shape == x.shape for t in gc.get_objects()))
    finally:
        gc.enable()
    assert left == [1] * 4  # the input


class Turns(Checked):
    """It runs as many blocks as it is told to."""

    def forward(self, x: torch.Tensor, count: int = 4) -> torch.Tensor:  # type: ignore[override]
        x = self.first(x)
        for block in self.blocks[:count]:
            x = x + block(x)
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        return torch.tanh(x)


def test_a_step_that_is_measured_is_planned_before() -> None:
    torch.manual_seed(0)
    model, x = Turns(), randn(ROWS, WIDTH, seed=1)
    handle = attach(model, "70%")

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measure_peak(step) <= handle.budget
        for _ in range(5):
            step()
        measure_peak(step)


def test_a_measured_step_that_cannot_be_observed_is_said_to_run_without_a_plan() -> None:
    model, x = Turns(), randn(ROWS, WIDTH, seed=1)
    attach(model, "70%")
    with pytest.warns(BudgetWarning, match="has no plan for such steps yet"):
        measure_peak(lambda: model(x))


@pytest.mark.parametrize("model", [Checked, lambda: nn.Sequential(*(Checked().blocks))])
def test_a_backward_of_another_graph_belongs_to_the_step(model: Callable[[], nn.Module]) -> None:
    """As that of a discriminator, before the one of the generator. What it allocates stays, as gradients do."""
    torch.manual_seed(0)
    generator, other = model(), nn.Sequential(nn.Linear(WIDTH, 1024), nn.Tanh(), nn.Linear(1024, 1))
    x = randn(ROWS, WIDTH, seed=1)

    def step() -> None:
        y = generator(x)
        other(y.detach()).mean().backward()
        y.square().mean().backward()
        generator.zero_grad()
        other.zero_grad()

    step()
    eager = measure_peak(step)
    handle = attach(generator, int(0.9 * eager), costs="flops")
    for _ in range(5):
        step()
    assert measure_peak(step) <= handle.budget
    handle.budget = 2 * eager  # everything fits, which is seen although another backward comes first
    for _ in range(3):
        step()
    assert measure_peak(step) == eager


@torch.compiler.disable
def outside(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.ones(20, 1, 1)).sin().mean(0)


class Order(nn.Module):
    """Parts in the order that ``kinds`` says: a layer, code that is not captured, a part without a gradient that is
    read or dropped, a part whose result is dropped, a part of a detached input.
    """

    def __init__(self, kinds: str) -> None:
        super().__init__()
        self.kinds = kinds
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.GELU()) for _ in kinds)

    def free(self, k: int, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = self.parts[k](x).exp() + 1
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, kind in enumerate(self.kinds):
            if kind == "o":
                x = outside(x)
            elif kind == "n":
                self.free(k, x)
            elif kind == "r":
                x = x / self.free(k, x)
            elif kind == "l":
                self.parts[k](x)
            else:
                x = x + self.parts[k](x.detach() if kind == "d" else x)
        return x


@pytest.mark.parametrize("kinds", ["aonoa", "aola", "aoan", "aoal", "loanal", "aordor", "aroadl"])
def test_parts_without_a_backward_come_in_every_order(kinds: str) -> None:
    torch.manual_seed(0)
    model = Order(kinds)
    eager, x = copy.deepcopy(model), randn(ROWS, WIDTH, seed=1)

    def step(run: nn.Module) -> None:
        run(x).square().mean().backward()

    step(eager)
    eager.zero_grad()
    handle = attach(model, measure_peak(lambda: step(eager), "cpu"), costs="flops")
    eager.zero_grad()
    for _ in range(4):
        step(eager)
        step(model)
        assert_same(snapshot(model), snapshot(eager))
        eager.zero_grad()
        model.zero_grad()
    assert measure_peak(lambda: step(model), "cpu") <= handle.budget
