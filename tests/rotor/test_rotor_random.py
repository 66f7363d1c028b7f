"""Random chains of layers of many kinds, at random limits, against eager mode: bits, and bytes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rockmate import measure_peak, rotor
from rockmate.errors import InfeasibleBudgetError

WIDTH = 16


class Does(nn.Module):
    """``function`` of a linear layer and the input."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer, x)


class Pairs(nn.Module):
    """Two tensors from one, or one from two; ``between`` two pairs of them."""

    def __init__(self, begins: bool, ends: bool) -> None:
        super().__init__()
        self.begins, self.ends, self.layer = begins, ends, nn.Linear(WIDTH, WIDTH)

    def forward(self, given: torch.Tensor | dict[str, torch.Tensor]) -> torch.Tensor | dict[str, torch.Tensor]:
        pair = {"a": given, "b": given * 2} if isinstance(given, torch.Tensor) else given
        if self.ends:
            return pair["a"] * pair["b"]
        return pair if self.begins else {"a": F.gelu(self.layer(pair["a"])), "b": pair["a"] + pair["b"]}


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.convolution(x.transpose(1, 2))).relu().transpose(1, 2)


def in_place(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    y[..., ::2] *= 0.5
    return y.relu_()


def beside(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = layer(x).softmax(-1)
    return x * y


def attention(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(layer(x), x, x) + x


KINDS: list[Callable[[], list[nn.Module]]] = [
    lambda: [nn.Linear(WIDTH, WIDTH)],
    lambda: [nn.GELU()],
    lambda: [nn.Softplus(), nn.RReLU()],
    lambda: [nn.LayerNorm(WIDTH)],
    lambda: [nn.Dropout(0.1)],
    lambda: [Pairs(True, False), Pairs(False, True)],
    lambda: [Pairs(True, False), Pairs(False, False), Pairs(False, True)],
    lambda: [Convolution()],
    lambda: [Does(in_place)],
    lambda: [Does(beside)],
    lambda: [Does(attention)],
    lambda: [Does(lambda layer, x: layer(x.detach()) + x)],
    lambda: [Does(lambda layer, x: layer(x).tanh() if x.mean() > 0 else layer(x).sigmoid())],
    lambda: [Does(lambda layer, x: torch.cat([layer(x)[..., :8], x[..., 8:]], -1))],
    lambda: [Does(lambda layer, x: layer(x).transpose(0, 1))],
]


def state(model: nn.Module) -> list[torch.Tensor]:
    """All that a step leaves."""
    gradients = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*gradients, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


def step(model: nn.Module, run: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The caller holds the output to the end."""
    model.zero_grad()
    torch.manual_seed(1)
    y: torch.Tensor = run(x)
    y.square().mean().backward()
    return y.detach()


@pytest.mark.parametrize("seed", range(24))
def test_random_chains(seed: int) -> None:
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH)]
    for _ in range(chosen.randint(3, 9)):
        layers += chosen.choice(KINDS)()
    model = nn.Sequential(*layers)
    eager, x = copy.deepcopy(model), torch.randn(chosen.randint(2, 8), chosen.randint(8, 64), WIDTH)
    algorithm = chosen.choice(["persistent", "persistent", "rotor", "griewank", "sequential"])
    chk = rotor.Checkpointable(model, x, costs="flops", mem_limit=2**40)
    with pytest.raises(InfeasibleBudgetError) as least:
        chk.compute_sequence(1000, algo=algorithm)
    spare = max(0, chk.get_expected_memory() - least.value.min_budget)
    limit = int(least.value.min_budget + chosen.choice([0, chosen.random()]) * spare)
    chk.compute_sequence(limit, algo=algorithm)
    for _ in range(2):
        results = step(model, chk, x), step(eager, eager, x)
        assert torch.equal(*results)
        assert all(map(torch.equal, state(model), state(eager)))
    assert measure_peak(partial(step, model, chk, x)) <= limit
