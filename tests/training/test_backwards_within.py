"""Followed forwards that take gradients of a part of themselves, or hooks that do; nested tensors in a backward."""

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


@part
def in_a_hook(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.detach().requires_grad_()
    e = (y.sin().exp() * m.table.detach()).tanh() * 0.1

    def solved(g: torch.Tensor) -> torch.Tensor:  # the gradient of a fixed point, as deep equilibrium models find it
        h = g
        for _ in range(3):
            h = torch.autograd.grad(e, y, h, retain_graph=True)[0] + g
        return h

    z = torch.addcmul(x, e.detach(), m.table)
    if z.requires_grad:
        z.register_hook(solved)
    return z


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


@pytest.mark.parametrize(("name", "share"), in_turn(PARTS, [0.0, 0.4]))
def test_what_a_backward_within_forward_reads_lives_as_long_as_planned(name: str, share: float) -> None:
    check_planned(lambda: Parts(name), X, share)


@pytest.mark.parametrize("name", PARTS)
def test_and_before_a_plan_is_known(name: str) -> None:
    check_at_first(lambda: Parts(name), X, 0.7)
