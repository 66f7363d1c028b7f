"""Forwards that read numbers from tensors, or register hooks on them: they are followed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from against_eager import assert_same, snapshot
from models import randn
from torch import nn

from rockmate import attach


def with_one(h: torch.Tensor, k: int) -> torch.Tensor:
    ones = torch.zeros(len(h))
    ones[k] = 1.0
    return (h[:, 0] * ones).sum()


def with_hook(h: torch.Tensor, k: int) -> torch.Tensor:
    h.register_hook(lambda g: g * 0.5)
    return h.square().mean()


USES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "divided": lambda h, k: h.square().sum() / (k + 1),
    "times": lambda h, k: (h[:2] * k).sum(),
    "in a tensor of indices": lambda h, k: h[torch.tensor([k, 0])].square().sum(),
    "in a tensor of numbers": lambda h, k: (h[:2, 0] * h.new_tensor([float(k), 1.0])).sum(),
    "filled": lambda h, k: (h[:2, 0] * torch.full((2,), k)).sum(),
    "set": with_one,
    "index": lambda h, k: h[k].sum(),
    "end of a slice": lambda h, k: h[: k + 1].sum(),
    "largest": lambda h, k: h.sum() / max(k, 1),
    "hook": with_hook,
}


class Uses(nn.Module):
    def __init__(self, use: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.use = use
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers(x)
        k = 0 if self.use is with_hook else int(x[:, 0].argmin())
        return self.use(h, k) + h.mean()


@pytest.mark.parametrize("use", USES)
def test_numbers_that_are_others_in_each_step_are_planned_once(use: str) -> None:
    torch.manual_seed(0)
    model = Uses(USES[use])
    eager = copy.deepcopy(model)
    handle = attach(model, "80%", costs="flops")
    for step in range(20):
        x = randn(256, 16, seed=step)
        results = [m(x) for m in (model, eager)]
        for result in results:
            result.backward()
        assert_same(results[:1], results[1:])
        assert_same(snapshot(model), snapshot(eager))
    assert handle.plan is not None
    assert handle.plan.recomputed
    assert handle.plans_made <= 2
