"""Gradients of a value's uses are added in eager mode's order, which decides how their sum is rounded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import assert_in_budget, assert_trains_as_eager, step, under_budget
from models import randn
from torch import nn
from torch.nn import functional as F

from rockmate import attach


def assert_two_steps_equal(make: Callable[[], nn.Module]) -> None:
    """Under a budget that makes something run again."""
    torch.manual_seed(0)
    eager = make()
    rk = under_budget(copy.deepcopy(eager), randn(64, 16, seed=0), fraction=0.0)

    def train(model: nn.Module, call: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for k in range(2):
            optimizer.zero_grad()
            yield from step(call, (randn(64, 16, seed=k),))
            optimizer.step()

    assert_trains_as_eager(eager, rk, train)
    x = randn(64, 16, seed=3)
    assert_in_budget(rk, lambda: step(rk, (x,)))


class ViewsOfBase(nn.Module):
    """Uses of one value: an index, and views before and behind what needs the index."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x.view(4, 16, 16))
        near = h[torch.arange(4)[:, None, None], torch.arange(48).view(16, 3) * 7 % 16]
        return self.down(F.gelu(torch.cat([near - h[:, :, None], h[:, :, None].expand_as(near)], -1))).view(64, -1)


def test_gradients_of_views_are_added_in_the_order_of_the_program() -> None:
    assert_two_steps_equal(ViewsOfBase)


def gru_into_rows(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Each state is written where the sequence is collected, and used three times after that."""
    h, states = torch.zeros(16, 16), torch.empty(16, 4, 16)
    for k, row in enumerate(x.view(16, 4, 16).unbind(1)):
        gate = torch.sigmoid(m.gate(h) + row)
        h = (1 - gate) * torch.tanh(m.state(h) + row) + gate * h
        states[:, k] = h
    return states.flatten(0, 1)


def late_sum_in_place(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What is added in place to an early result has been used between."""
    y = m.gate(x)
    h = m.state(x)
    product = y.sin() * torch.cos(y)
    h += y
    return F.gelu(h * product) * y


@pytest.mark.parametrize("function", [gru_into_rows, late_sum_in_place])
def test_gradients_of_uses_are_added_in_the_order_of_the_program(function: Callable[..., torch.Tensor]) -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.state = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(self, x)

    assert_two_steps_equal(Uses)


class BeforeAndBehind(nn.Module):
    """Reads a buffer, changes it, and adds in place to what it has computed with the old values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h -= self.mean
        with torch.no_grad():
            self.mean.lerp_(x.mean(0) + 1, 0.1)
        h += self.b(x)
        return self.c(F.gelu(h))


class ParameterBeforeAndBehind(BeforeAndBehind):
    """The same with a parameter, which forward limits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h -= self.c.bias.detach()
        with torch.no_grad():
            self.c.bias.clamp_(-0.01, 0.01)
        h += self.b(x)
        return self.c(F.gelu(h))


@pytest.mark.parametrize("make", [BeforeAndBehind, ParameterBeforeAndBehind])
def test_what_reads_memory_before_it_changes_stays_before(make: Callable[[], nn.Module]) -> None:
    assert_two_steps_equal(make)


class ReadsStatistics(nn.Module):
    """Reads running statistics in the place ``where``, with an operation of its own or in the memory of the result."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.where == "before":
            h = F.gelu(h - self.norm.running_mean) + self.norm(h)
        elif self.where == "behind":
            h = F.gelu(self.norm(h) - self.norm.running_mean) * (1 + self.norm.running_var.view(1, -1).sqrt())
        elif self.where == "in place":
            h = self.norm(h)
            h -= self.norm.running_mean
        else:
            n = self.norm
            old = F.batch_norm(h, n.running_mean, n.running_var, n.weight, n.bias)
            h = F.gelu(old) + F.gelu(n(h))
        return self.b(F.gelu(h))


@pytest.mark.parametrize("where", ["before", "behind", "in place", "batch norm"])
def test_what_reads_running_statistics_does_not_run_again(where: str) -> None:
    assert_two_steps_equal(lambda: nn.Sequential(*(ReadsStatistics(where) for _ in range(3))))


class WritesAnInput(nn.Module):
    """Changes one input before it adds another one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("queue", torch.ones(64, 16))

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        h = self.a(z)
        self.queue.mul_(0.5)
        h += x
        return self.b(torch.sin(torch.cos(h).exp())).exp().sin()


def test_inputs_that_share_memory_with_what_is_written_are_another_kind_of_call() -> None:
    torch.manual_seed(0)
    model = WritesAnInput()
    eager = copy.deepcopy(model)
    attach(model, "85%", costs="flops", cache=False)
    z = randn(64, 16, seed=1)
    for shares in (False, True, False, True):
        results = []
        for run in (model, eager):
            run.zero_grad()
            y = run(run.queue[:64] if shares else randn(64, 16, seed=0), z)
            y.sum().backward()
            results.append([y.detach(), *(p.grad for p in run.parameters()), run.queue])
        assert all(map(torch.equal, *results))
