"""Followed forwards that take gradients of a part of themselves; nested tensors among what a backward reads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import randn
from torch import nn
from torch.nn import functional as F

import rockmate
from rockmate import measure_peak

X = randn(64, 32, seed=0)
PARTS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {}


def part(f: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    PARTS[f.__name__] = f
    return f


@part
def of_a_copy(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.detach().requires_grad_()
    (g,) = torch.autograd.grad((y.sin() * m.table.detach()).sum(), y)
    return torch.addcmul(x, g.cos() * x, m.table)


@part
def with_a_graph(m: Any, x: torch.Tensor) -> torch.Tensor:
    (g,) = torch.autograd.grad((x.sin() * m.table).sum(), x, create_graph=True)
    return x.exp() * 0.1 + g * g


@part
def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.detach().requires_grad_()
    e = y.sin().exp() * m.table.detach()
    (g,) = torch.autograd.grad(e.sum(), y, retain_graph=True)
    (h,) = torch.autograd.grad(e.square().mean(), y)
    return torch.addcmul(x, (g + h).cos() * x, m.table)


@part
def transformed(m: Any, x: torch.Tensor) -> torch.Tensor:
    slope = torch.func.vmap(torch.func.grad(lambda row: (row.sin() * row.exp()).sum()))
    return slope(x) * 0.1 * m.table  # type: ignore[no-any-return]


@part
def nested(m: Any, x: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.as_nested_tensor([x[:20].sin(), x[20:].cos()], layout=torch.jagged)
    return (rows * 2).values().sin() * m.table  # type: ignore[no-any-return]


class Parts(nn.Module):
    """Layers with the part between them, twice. A generator of its own is what no capture carries."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.part, self.generator = PARTS[name], torch.Generator()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.table = nn.Parameter(torch.randn(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(1, generator=self.generator)
        for k, layer in enumerate(self.layers):
            x = F.gelu(layer(x))
            if k in (1, 2):
                x = self.part(self, x)
        return x


class Steps:
    """Steps of a model with ``Parts``, and what each gives."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model, self.loss = Parts(name), X
        self.given: list[list[torch.Tensor]] = []
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def run(self) -> None:
        self.loss = self.model(X).square().mean()
        self.loss.backward()

    def step(self, measured: bool = False) -> int:
        self.loss = X
        self.optimizer.zero_grad()
        peak = 0
        if measured:
            peak = measure_peak(self.run, "cpu")
        else:
            self.run()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.given.append([self.loss.detach(), *gradients])
        self.optimizer.step()
        return peak

    def differ(self, other: Steps) -> list[int]:
        """The steps that do not give what those of ``other`` give, bit for bit."""
        pairs = enumerate(zip(self.given, other.given, strict=True))
        return [k for k, (ours, theirs) in pairs if not all(map(torch.equal, ours, theirs))]


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("name", PARTS)
def test_what_a_backward_within_forward_reads_lives_as_long_as_planned(name: str, share: float) -> None:
    eager, ours = Steps(name), Steps(name)
    handle = rockmate.attach(ours.model, "100%", costs="flops", cache=False)
    for _ in range(3):
        ours.step()
    found = handle.frontier()
    handle.budget = found.min_budget + int(share * (found.max_budget - found.min_budget))
    ours.step()
    ours.step()
    peak = ours.step(measured=True)
    for _ in range(6):
        eager.step()
    assert not ours.differ(eager)
    assert handle.plan is not None
    assert handle.plan.predicted_overhead > 0
    assert peak <= handle.plan.predicted_peak <= handle.budget


@pytest.mark.parametrize("name", PARTS)
def test_and_before_a_plan_is_known(name: str) -> None:
    eager, ours = Steps(name), Steps(name)
    eager.step()
    budget = int(0.7 * eager.step(measured=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rockmate.BudgetWarning)
        handle = rockmate.attach(ours.model, budget, costs="flops", cache=False)
        ours.step()
        ours.step()
    assert not ours.differ(eager)
    assert handle.plan is not None
