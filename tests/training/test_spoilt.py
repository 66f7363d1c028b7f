"""Operations whose saved tensors forward changes in place: a backward that comes to them raises eager mode's error."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_same, snapshot
from models import in_turn, randn
from torch import nn

from rockmate import Rockmate, attach, attached, measure_peak

WIDTH = 64


def relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x + 0.1).add_(x.detach(), alpha=0.5)


def root(x: torch.Tensor) -> torch.Tensor:
    return (x * x + 1).sqrt().mul_(2)


def exponential(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    y[:, ::2] *= 0.5
    return y


def probabilities(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1).clamp_(min=0.01)


def by_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x.tanh()
    y.view(-1).add_(1)
    return y


def a_reader(x: torch.Tensor) -> torch.Tensor:
    y = x.sigmoid()
    z = F.gelu(1.5 * y)
    return z + y.add_(1)


SPOILT = [relu, root, exponential, probabilities, by_a_view, a_reader]


def unspoilt(x: torch.Tensor) -> torch.Tensor:
    """What is changed, only what nobody needs has saved."""
    y = 2 * x
    y.sin()
    return y.add_(1)


def detached(x: torch.Tensor) -> torch.Tensor:
    """The version of ``y`` does not count this."""
    y = x.exp()
    y.data.mul_(1.0)
    return y


class Two(nn.Module):
    """Two outputs, of which ``part`` computes the second; ``several``: as no one graph."""

    def __init__(self, part: Callable[[torch.Tensor], torch.Tensor], several: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.part, self.several, self.mean = part, several, 0.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers[:4]:  # type: ignore[index]
            x = F.gelu(layer(x))
        result = self.part(x)
        if self.several:
            self.mean = x.detach().mean().item()
        for layer in self.layers[4:]:  # type: ignore[index]
            x = F.gelu(layer(x))
        return x, 2 * result


def trained(model: nn.Module, read: Callable[[Any], torch.Tensor]) -> list[Any]:
    found: list[Any] = []
    for k in range(4):
        outputs = model(randn(128, WIDTH, seed=k))
        read(outputs).square().mean().backward()
        found += [*outputs, *snapshot(model)]
    return found


def first(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return outputs[0]


@pytest.mark.parametrize(("part", "several"), in_turn([*SPOILT, unspoilt, detached], [False, True]))
def test_where_the_loss_leaves_it_out_the_rest_is_planned(part: Any, several: bool) -> None:
    model = Two(part, several)
    eager, x = copy.deepcopy(model), randn(128, WIDTH, seed=9)

    def step(run: nn.Module) -> None:
        first(run(x)).square().mean().backward()
        run.zero_grad()

    step(eager)
    handle = attach(model, int(0.85 * measure_peak(lambda: step(eager), "cpu")), costs="flops")
    assert_same(trained(model, first), trained(eager, first))
    model.zero_grad()
    step(model)
    step(model)
    assert handle.plan is not None
    assert measure_peak(lambda: step(model), "cpu") <= handle.budget


@pytest.mark.parametrize(("part", "read"), in_turn(SPOILT, [lambda y: y[1], lambda y: y[0] + y[1].sum()]))
def test_where_the_loss_reads_it_the_backward_raises_the_error(part: Any, read: Any) -> None:
    model = Two(part, False)
    eager = copy.deepcopy(model)
    attach(model, "75%", costs="flops", on_infeasible="least")
    messages = []
    for run in (eager, model):
        loss = read(run(randn(128, WIDTH, seed=1))).square().mean()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            loss.backward()
        messages.append(re.match("[^:]*", str(raised.value)))
    assert messages[0] is not None and messages[1] is not None and messages[0][0] == messages[1][0]
    assert attached(model) is not None


@pytest.mark.parametrize(("part", "several"), in_turn(SPOILT, [True, False]))
def test_a_rockmate_plans_the_rest(part: Any, several: bool) -> None:
    model, x = Two(part, several), randn(128, WIDTH, seed=1)
    eager = copy.deepcopy(model)
    rk = Rockmate(model, x, "90%", costs="flops")
    assert_same(trained(rk, first), trained(eager, first))
