"""Operations of a followed forward whose results are written into later, one of several, as of norms before a ReLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from followed_steps import check_at_first, check_planned
from models import in_turn, randn
from torch import nn
from torch.nn import functional as F

X = randn(64, 32, seed=0)
OPERATIONS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {}


def operation(f: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    OPERATIONS[f.__name__] = f
    return f


@operation
def sort(m: Any, x: torch.Tensor) -> torch.Tensor:
    values, order = x.sort(-1)
    values.mul_(2)
    y = values.sin()
    return y + m.table.gather(1, order % 16)  # whose backward, the first one, makes the sort again for the order alone


@operation
def topk(m: Any, x: torch.Tensor) -> torch.Tensor:
    values, order = x.topk(16, -1)
    values.add_(1).relu_()
    return (values.exp() * values.cos() * m.table.gather(1, order // 2)).repeat(1, 2)


@operation
def pool(m: Any, x: torch.Tensor) -> torch.Tensor:
    values, places = F.max_pool1d(x[None], 2, return_indices=True)
    values.mul_(2)
    return (values.sin() * places.float().cos())[0].repeat(1, 2)


@operation
def batch_norm(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.inner(F.relu(m.norm(x), inplace=True)).sin()


@operation
def layer_norm(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = F.layer_norm(x, (32,))
    x += x
    return x.clamp_(-1, 1).sin() * x


@operation
def group_norm(m: Any, x: torch.Tensor) -> torch.Tensor:
    v = F.group_norm(x, 4)
    v.mul_(1.5).add_(x)
    return m.inner(v.sin()) * v


@operation
def parts(m: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = torch.split_copy(x, 16, -1)
    a, b = a.sin_(), b.mul_(2)
    return torch.cat([b.cos() * a, (a * b).exp()], -1)


@operation
def variance(m: Any, x: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    variance.add_(1e-3)
    mean.mul_(0.5)
    return (x - mean) * variance.rsqrt() * mean.sin()


@operation
def several(m: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = torch._foreach_mul([x, x + 1], 2.0)
    a.sin_()
    b.mul_(2)
    return a.exp() * b.cos()


@operation
def held(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 1.5
    z = y.square().detach()
    y[:, :16].add_(0.5)  # from here on z cannot be made again, and is held
    z.mul_(0.1)
    return m.inner(z).tanh() + y


class Twice(nn.Module):
    """Layers with the operation between them, twice. A generator of its own is what no capture carries."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.operation, self.generator = OPERATIONS[name], torch.Generator()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.inner, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)
        self.table = nn.Parameter(torch.randn(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(1, generator=self.generator)
        for k, layer in enumerate(self.layers):
            x = F.gelu(layer(x))
            if k in (1, 2):
                x = self.operation(self, x)
        return x


@pytest.mark.parametrize(("name", "share"), in_turn(OPERATIONS, [0.0, 0.4]))
def test_a_result_that_is_written_into_is_made_again_with_its_writes(name: str, share: float) -> None:
    check_planned(lambda: Twice(name), X, share)


@pytest.mark.parametrize("name", OPERATIONS)
def test_and_before_a_plan_is_known(name: str) -> None:
    check_at_first(lambda: Twice(name), X, 0.6)
