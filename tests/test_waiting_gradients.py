"""Gradients of inputs and parameters wait for the last contribution, in the memory of which they are views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import pairs, randn
from torch import nn
from torch.nn import functional as F

from rkgb.device import Cpu
from rockmate import Rockmate, measure_peak

Joined = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# The gradient of the first is a view with other strides than its own. It may be the smaller part of the memory.
JOINED: dict[str, Joined] = {
    "side by side": lambda a, b: torch.cat((a, b), 1),
    "between": lambda a, b: torch.cat((b, a, b), -1),
    "a part": lambda a, b: torch.cat((a[:, :2], b), 1),
    "turned": lambda a, b: torch.cat((a.transpose(0, 1), b.transpose(0, 1))),
    "stacked": lambda a, b: torch.stack((a, b), 1),
    "with itself": lambda a, b: torch.cat((a, a, b), 1),
    "alone": lambda a, b: a.transpose(1, 2) @ b,
}


class Joins(nn.Module):
    """Joins ``first``, the input or a parameter, with what is computed from the input, and from ``first`` if
    ``again``. Beside it returns a part of what is joined, so that the memory of both gradients is not its own.
    """

    def __init__(self, join: Joined, of_parameter: bool, again: bool) -> None:
        super().__init__()
        self.join, self.of_parameter, self.again = join, of_parameter, again
        self.token = nn.Parameter(torch.linspace(-1, 1, 512).view(8, 8, 8))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.token if self.of_parameter else x
        y = (first if self.again else x.detach()).abs().add(0.1).sqrt()
        y = y * self.scale
        return self.join(first, y), y.select(0, 0)


@pytest.mark.parametrize(("join", "of_parameter", "again"), pairs(JOINED, [True, False], [True, False]))
def test_the_peak_is_the_predicted_one(join: str, of_parameter: bool, again: bool) -> None:
    model = Joins(JOINED[join], of_parameter, again)
    x = randn(8, 8, 8, seed=0, requires_grad=not of_parameter)
    rk = Rockmate(model, x, "100%", costs="flops")

    def train() -> None:
        for t in (*model.parameters(), x):
            t.grad = None
        out = rk(x)  # held to the end
        sum((t * torch.linspace(0, 1, t.shape[-1])).mean() for t in out).backward()

    train()
    rk.budget = rk.frontier().min_budget
    train()
    assert rk.plan.predicted_peak <= measure_peak(train, "cpu") <= rk.plan.predicted_peak + Cpu.scalars


def assert_as_predicted(rk: Rockmate, train: Callable[[], None]) -> None:
    """The peak of a step, after steps that have shown what the loss does."""
    train()
    train()
    assert rk.plan.predicted_peak <= measure_peak(train) <= rk.plan.predicted_peak + Cpu.scalars


class Tied(nn.Module):
    """A weight is used twice, once as a view, so that its gradients are added in new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.first(x)), self.first.weight.t())


def test_the_gradient_of_a_bias_is_there_while_those_of_its_weight_are_added() -> None:
    model, x = Tied(), randn(8, 48, seed=0)
    rk = Rockmate(model, x, "100%", costs="flops")

    def train() -> None:
        model.zero_grad()
        rk(x).mean().backward()

    assert_as_predicted(rk, train)


HANDED_ON: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a mean of rows": lambda t: t - t.mean(-1, keepdim=True),
    "a mean of all": lambda t: t + t.mean(),
    "a part of itself": lambda t: t + t.mul(0.5).roll(1, 1),
    "in steps": lambda t: (t + 0).contiguous() + t.mean(1, keepdim=True).expand_as(t),
}
LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda y: y,
    "flat": lambda y: y.flatten(0, 1),
    "turned": lambda y: y.transpose(1, 2).contiguous(),
    "a sum": lambda y: y.sum(0),
}


@pytest.mark.parametrize(("way", "of_loss", "behind"), pairs(HANDED_ON, LOSSES, [True, False]))
def test_nothing_is_added_in_place_to_a_view_that_is_handed_on(way: str, of_loss: str, behind: bool) -> None:
    """The gradient that ``sub`` and ``add`` hand on is the one that they get."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 48), nn.Linear(48, 4) if behind else nn.Identity()
    compute, x = HANDED_ON[way], randn(4, 192, 4, seed=0)
    weights = LOSSES[of_loss](randn(4, 192, 4 if behind else 48, seed=1))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.last(compute(self.first(x)))
            return y

    model = Model()
    rk = Rockmate(model, x, "100%", costs="flops")

    def train() -> None:
        model.zero_grad()
        (LOSSES[of_loss](rk(x)) * weights).sum().backward()

    train()
    train()
    measured = measure_peak(train)
    assert measured <= rk.plan.predicted_peak + 2 * Cpu.scalars
    if of_loss != "a sum":  # whose gradient is expanded, and counted as if it took its memory
        assert measured >= rk.plan.predicted_peak


class HandedOn(torch.autograd.Function):
    """Its backward gives the gradient that it gets."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Twice(nn.Module):
    """Uses a weight twice, once through a function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(256, 256, seed=0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x @ HandedOn.apply(self.weight) + x @ self.weight  # type: ignore[no-untyped-call]
        return found


def test_what_a_function_gives_is_added_in_place() -> None:
    model, x = Twice(), randn(8, 256, seed=1)
    rk = Rockmate(model, x, "100%", costs="flops")

    def train() -> None:
        model.zero_grad()
        rk(x).square().mean().backward()

    assert_as_predicted(rk, train)
