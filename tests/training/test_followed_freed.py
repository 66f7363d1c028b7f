"""What a followed forward leaves to others who let it go before the backward begins: what autocast around the step has
cast, and results that the loss does not need. A plan keeps some of it for what runs again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from followed_steps import Steps, check_planned
from models import pairs, randn
from torch import nn
from torch.nn import functional as F

X = randn(64, 32, seed=0)


class Layers(nn.Module):
    """Layers, every other one without autocast if ``apart``. A generator of its own is what no capture carries."""

    def __init__(self, apart: bool = False) -> None:
        super().__init__()
        self.apart, self.generator = apart, torch.Generator()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: torch.Tensor) -> Any:
        torch.rand(1, generator=self.generator)
        for k, layer in enumerate(self.layers):
            if self.apart and k % 2:
                with torch.autocast("cpu", enabled=False):
                    x = F.gelu(layer(x.float()))
            else:
                x = F.gelu(layer(x))
        return x


class WithFirst(Layers):
    """Its second result is saved for no backward; what it is read for is."""

    def forward(self, x: torch.Tensor) -> Any:
        first = self.layers[0](x) + 1
        x = torch.stack([(first * k).sin() for k in range(2, 8)]).sum(0)
        return super().forward(x), {"first": first}


class Cast(Steps):
    """Autocast around forward and loss."""

    def run(self) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            self.loss = self.model(self.x).float().square().mean()
        self.loss.backward()


class CastTwice(Steps):
    """Two autocasts, the inner one around the forward alone."""

    def run(self) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", torch.bfloat16):
                y = self.model(self.x)
            self.loss = y.float().square().mean()
        self.loss.backward()


class CastForward(Steps):
    """Autocast around the forward alone: what it has cast goes before the loss."""

    def run(self) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.model(self.x)
        self.loss = y.float().square().mean()
        self.loss.backward()


class LetsGo(Steps):
    """One of two results goes before the loss."""

    def run(self) -> None:
        y, others = self.model(self.x)
        others.clear()
        self.loss = torch.cat([y * k for k in range(8)]).square().mean()
        self.loss.backward()


@pytest.mark.parametrize(
    ("steps", "share", "apart"), pairs([Cast, CastTwice, CastForward], [0.0, 0.2, 0.5], [False, True])
)
def test_what_autocast_has_cast_is_planned_to_be_there_where_it_is_read(
    steps: type[Steps], apart: bool, share: float
) -> None:
    check_planned(lambda: Layers(apart), X, share, steps)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_a_result_that_goes_before_the_loss_is_planned_to_be_there_where_it_is_read(share: float) -> None:
    check_planned(WithFirst, X, share, LetsGo)


class TwoBranches(Layers):
    """Autograd frees ``v`` when it has read it for the second branch; the first one is made from it again, later."""

    def forward(self, x: torch.Tensor) -> Any:
        torch.rand(1, generator=self.generator)
        v = F.gelu(self.layers[0](x)) * 2
        first = self.layers[1](torch.tanh(v * 1.5)).sin()
        scaled = v.expand(8, *v.shape) * 0.5  # autograd saves nothing for it, and its gradient is as large as it
        return first, scaled, self.layers[2](v)


class OfBranches(Steps):
    def run(self) -> None:
        self.loss = sum((t.sum() * k for k, t in enumerate(self.model(self.x), 1)), torch.zeros(()))
        self.loss.backward()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_what_a_second_run_reads_counts_after_autograd_has_let_go_of_it(share: float) -> None:
    check_planned(TwoBranches, X, share, OfBranches)


class LetsGoOfATensor(Steps):
    """The second result goes with the graph that it has."""

    def run(self) -> None:
        y, other = self.model(self.x)
        del other
        self.loss = torch.cat([y * k for k in range(8)]).square().mean()
        self.loss.backward()


class Unread(Layers):
    """Its second result is made of random numbers, which cannot be drawn again, and no loss reads it."""

    def forward(self, x: torch.Tensor) -> Any:
        drawn = torch.rand(x.shape, generator=self.generator)
        return super().forward(x), self.layers[0](torch.tanh(self.layers[1](drawn)))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_part_of_the_graph_that_goes_before_the_backward_holds_nothing(share: float) -> None:
    check_planned(Unread, X, share, LetsGoOfATensor)


class FixedPoint(nn.Module):
    """A layer whose gradient a hook of its result solves for: it holds a result of its own until that is found."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.around, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.last = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))

    def layer(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.around(z) + x))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.no_grad():
            z = self.layer(torch.zeros_like(x), x)
        z = self.layer(z, x)
        start = z.detach().clone().requires_grad_()
        held = self.layer(start, x)

        def solve(gradient: torch.Tensor) -> torch.Tensor:
            found = gradient
            for _ in range(3):
                found = torch.autograd.grad(held, start, found, retain_graph=True)[0] + gradient
            hook.remove()
            return found

        hook = z.register_hook(solve)
        return self.last(z)  # type: ignore[no-any-return]


def test_what_a_hook_holds_into_the_backward_is_not_made_a_second_time_meanwhile() -> None:
    check_planned(FixedPoint, randn(64, 16, seed=1), 0.0)
