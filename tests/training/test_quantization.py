"""Quantization-aware training: observers write their statistics in a way that version counters do not tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from against_eager import assert_in_budget, assert_trains_as_eager, step
from models import randn
from torch import nn
from torch.ao.quantization.fake_quantize import FakeQuantize, FusedMovingAvgObsFakeQuantize
from torch.ao.quantization.observer import MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver

from rockmate import Rockmate, frontier

Quantize = Callable[[], nn.Module]


class QuantizedLinear(nn.Module):
    """A linear layer with fake-quantized weights and results."""

    def __init__(self, inside: int, outside: int, weight: Quantize, result: Quantize) -> None:
        super().__init__()
        self.linear = nn.Linear(inside, outside)
        self.weight, self.result = weight(), result()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.result(nn.functional.linear(x, self.weight(self.linear.weight), self.linear.bias))
        return y


def fused() -> nn.Module:
    return FusedMovingAvgObsFakeQuantize()


def fused_by_channel() -> nn.Module:
    return FusedMovingAvgObsFakeQuantize(
        MovingAveragePerChannelMinMaxObserver, -128, 127, dtype=torch.qint8, qscheme=torch.per_channel_symmetric
    )


def of_operations() -> nn.Module:
    return FakeQuantize(MovingAverageMinMaxObserver, 0, 255)


def model(weight: Quantize, result: Quantize) -> nn.Module:
    torch.manual_seed(0)
    layers = (layer for _ in range(3) for layer in (QuantizedLinear(32, 32, weight, result), nn.GELU(), nn.Tanh()))
    return nn.Sequential(QuantizedLinear(16, 32, weight, result), nn.Tanh(), *layers, nn.Linear(32, 8))


def train(model: nn.Module, call: nn.Module) -> Iterator[Any]:
    """The same values twice, for which statistics stay what they are, then others."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for k, scale in enumerate((1, 1, 3, 2)):
        optimizer.zero_grad()
        yield from step(call, [scale * randn(256, 16, seed=max(1, k))])
        yield from (b.clone() for b in model.buffers())
        optimizer.step()


@pytest.mark.parametrize(
    ("weight", "result"),
    [(fused, fused), (fused_by_channel, fused), (of_operations, of_operations)],
    ids=["fused", "by channel", "operations"],
)
@pytest.mark.parametrize("called_before", [False, True], ids=["new", "called"])
def test_quantization_aware_training(weight: Quantize, result: Quantize, called_before: bool) -> None:
    """Statistics change once a step, whether they have their sizes when the plan is made or get them in a call."""
    pair = [model(weight, result) for _ in range(2)]
    if called_before:
        for m in pair:
            m(randn(256, 16, seed=1))
    x = randn(256, 16, seed=1)
    rk = Rockmate(pair[1], x, frontier(pair[1], x, costs="flops").min_budget, costs="flops")
    assert rk.plan.recomputed > 0
    assert_trains_as_eager(pair[0], rk, train)
    assert rk.plan.recomputed > 0
    assert_in_budget(rk, lambda: step(rk, [x]))
