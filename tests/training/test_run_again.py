"""A second run changes nothing that a first run has changed, and draws what it drew."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from test_order import assert_two_steps_equal
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)


class Statistics(Layer):
    """Batch norm whose running statistics are ``held`` as something else than two buffers."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.held = held
        mean, var = torch.zeros(16), torch.ones(16)
        if held == "views":
            self.register_buffer("both", torch.stack([mean, var]))
        elif held == "parameters":
            self.mean, self.var = nn.Parameter(mean, False), nn.Parameter(var, False)
        else:
            self.mean, self.var = mean, var

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, var = self.both if self.held == "views" else (self.mean, self.var)
        h = F.batch_norm(self.a(x), mean, var, training=True)
        return self.b(F.gelu(h) + F.silu(h)) + mean.sum()


@pytest.mark.parametrize("held", ["views", "parameters", "attributes"])
def test_running_statistics_are_updated_once_wherever_they_are_held(held: str) -> None:
    assert_two_steps_equal(lambda: nn.Sequential(*(Statistics(held) for _ in range(3))))


class FromNumbers(Layer):
    """Adds to a tensor that forward makes of numbers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "tensor":
            total = torch.tensor(0.0)
        elif self.how == "new_tensor":
            total = x.new_tensor([0.0])
        elif self.how == "Tensor":
            total = torch.Tensor([0.0])
        elif self.how == "from_numpy":
            total = torch.from_numpy(numpy.zeros(1, dtype=numpy.float32))
        else:
            total = torch.as_tensor([0.0])
        h = F.gelu(self.a(x))
        total += h.detach().mean()
        total *= 2
        return self.b(F.gelu(h)) + total


@pytest.mark.parametrize("how", ["tensor", "new_tensor", "as_tensor", "Tensor", "from_numpy"])
def test_tensors_of_numbers_are_new_in_each_call(how: str) -> None:
    assert_two_steps_equal(lambda: nn.Sequential(*(FromNumbers(how) for _ in range(3))))


class TwoDraws(torch.autograd.Function):
    """Draws from the generator that it is given, and from the default one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=generator) + torch.rand(x.shape)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0], None


class Noisy(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()
        self.generator.manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = TwoDraws.apply(self.a(x), self.generator)
        return self.b(F.gelu(h) + F.silu(h))


def test_a_function_that_draws_from_two_generators_draws_the_same_again() -> None:
    assert_two_steps_equal(lambda: nn.Sequential(*(Noisy() for _ in range(6))))
