"""Steps of followed models, in eager mode and under plans: bits and peaks."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn

import rockmate
from rockmate import measure_peak


class Steps:
    """Steps of a model on ``x``, and what each gives: the loss, gradients and buffers."""

    def __init__(self, make: Callable[[], nn.Module], x: torch.Tensor) -> None:
        torch.manual_seed(0)
        self.model, self.x, self.loss = make(), x, x
        self.given: list[list[torch.Tensor | None]] = []
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def run(self) -> None:
        self.loss = self.model(self.x).square().mean()
        self.loss.backward()

    def step(self, measured: bool = False) -> int:
        """One step; its peak in bytes if it is ``measured``, else 0."""
        self.loss, peak = self.x, 0
        self.optimizer.zero_grad()
        if measured:
            peak = measure_peak(self.run, "cpu")
        else:
            self.run()
        found = [self.loss, *(p.grad for p in self.model.parameters()), *self.model.buffers()]
        self.given.append([None if t is None else t.detach().clone() for t in found])
        self.optimizer.step()
        return peak

    def differ(self, other: Steps) -> list[int]:
        """The steps that do not give what those of ``other`` give, bit for bit."""
        pairs = enumerate(zip(self.given, other.given, strict=True))
        return [k for k, (ours, theirs) in pairs if not all(map(_same, ours, theirs))]


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b is None or (a is not None and b is not None and torch.equal(a, b))


def check_planned(make: Callable[[], nn.Module], x: torch.Tensor, share: float, steps: type[Steps] = Steps) -> None:
    """Under a plan whose budget is at ``share`` of the way from the least to the most: eager mode's bits, and a peak
    within the prediction.
    """
    eager, ours = steps(make, x), steps(make, x)
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


def check_at_first(make: Callable[[], nn.Module], x: torch.Tensor, share: float) -> None:
    """The first step, of which nothing is known, under a ``share`` of eager mode's peak: it holds what fits as it takes
    place, and gives eager mode's bits.
    """
    eager, ours = Steps(make, x), Steps(make, x)
    eager.step()
    budget = int(share * eager.step(measured=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rockmate.BudgetWarning)
        handle = rockmate.attach(ours.model, budget, costs="flops", cache=False)
        ours.step()
        ours.step()
    assert not ours.differ(eager)
    assert handle.plan is not None
