"""Small models for the tests, and one call of each: ``zoo()`` lists them as ``Case``s."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from rockmate.demo.gpt import GPT
from solvers import Frontier

MakeCall = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]

SEVERAL = "ignore:.*times before a backward:rockmate.BudgetWarning"
"""The filter for tests of several calls that share a backward, whose memory is not what they test."""


def in_turn(first: Iterable[Any], second: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Each value of ``first``, which are as many or more, with one of ``second``: for axes of tests that have nothing
    to do with each other.
    """
    return list(zip(first, itertools.cycle(second), strict=False))


def pairs(first: Iterable[Any], second: Iterable[Any], third: Iterable[Any]) -> list[tuple[Any, Any, Any]]:
    """All pairs of the first two, each with one of the third: each value of that comes with each of the others where
    these are enough.
    """
    thirds, seconds = list(third), list(second)
    return [(a, b, thirds[(i + j) % len(thirds)]) for i, a in enumerate(first) for j, b in enumerate(seconds)]


def part_way(found: Frontier, fraction: float) -> int:
    """A budget between the least (0) and that of no recomputation (1)."""
    return found.min_budget + round(fraction * (found.max_budget - found.min_budget))


@dataclass(frozen=True)
class Case:
    """A model and its call. ``call(seed)`` makes fresh arguments, positional and keyword.

    ``recomputes``: whether some budget below the largest makes a node run again.
    """

    name: str
    make: Callable[[], nn.Module]
    call: MakeCall
    recomputes: bool = True

    def model(self) -> nn.Module:
        """The model, the same on every call."""
        torch.manual_seed(0)
        return self.make()


def outputs_of(result: Any) -> list[torch.Tensor]:
    """The tensors in what a model returned."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def square_loss(result: Any) -> torch.Tensor:
    """A scalar that every differentiable output contributes to."""
    return torch.stack([t.float().square().mean() for t in outputs_of(result) if t.requires_grad]).sum()


def randn(*shape: int, seed: int, requires_grad: bool = False) -> torch.Tensor:
    """Normal numbers, without a trace on the global generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(requires_grad)


def tokens(*shape: int, high: int, seed: int) -> torch.Tensor:
    """Uniform ids below ``high``, without a trace on the global generator."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------- perceptrons


def mlp(depth: int = 4, width: int = 32) -> nn.Sequential:
    """Linear and ReLU in turn, smooth activations at the ends."""
    layers: list[nn.Module] = [nn.Linear(16, width), nn.Tanh()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8))


def dropout_mlp() -> nn.Sequential:
    """Batch norm, dropout, and dropout in place."""
    return nn.Sequential(
        nn.Linear(16, 64),
        nn.BatchNorm1d(64),
        nn.Dropout(0.3, inplace=True),
        nn.GELU(),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Linear(64, 64),
        nn.Dropout(0.5, inplace=True),
        nn.Linear(64, 8),
    )


class FrozenFirst(nn.Module):
    """The first layer needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32).requires_grad_(False)
        self.rest = mlp_tail(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(torch.relu(self.first(x)))


def mlp_tail(width: int) -> nn.Sequential:
    """A few layers on ``width`` features."""
    return nn.Sequential(
        nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Tanh(), nn.Linear(width, 8)
    )


class Tied(nn.Module):
    """One weight as embedding and as output layer, and one layer applied three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        self.layer = nn.Linear(24, 24)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for _ in range(3):
            x = x + F.gelu(self.layer(x))
        return self.head(x)


class Skip(nn.Module):
    """Four linear layers, the first of which is read again at the end; a mask that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(8, 8).triu()
        first = h = self.layers[0](x)
        for layer in self.layers[1:]:
            h = layer(h) * mask
        return (h + first).view(-1)


class MovingAverage(nn.Module):
    """Keeps an average of its activations and a count, updated without gradient, and reads both."""

    average: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.middle = nn.Linear(32, 32)
        self.down = nn.Linear(32, 8)
        self.register_buffer("average", torch.zeros(32))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        with torch.no_grad():
            self.count += 1
            self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        h = F.gelu(self.middle(h - self.average))
        return self.down(torch.tanh(h) * h)


# ------------------------------------------------------------------------------------------- in and out


class TwoInTwoOut(nn.Module):
    """Two inputs that meet, two outputs that both depend on both."""

    def __init__(self, as_dict: bool = False) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 32), nn.Linear(12, 32)
        self.join, self.side = nn.Linear(32, 32), nn.Linear(32, 8)
        self.as_dict = as_dict

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        a = torch.tanh(self.left(x))
        b = F.gelu(self.right(y))
        joined = F.gelu(self.join(a * b))
        first, second = self.side(joined + a), joined * torch.sigmoid(b)
        if self.as_dict:
            return {"logits": first, "hidden": [second], "name": "two", "none": None}
        return first, second


class Keywords(nn.Module):
    """Called with keywords only; a constant among them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, *, x: torch.Tensor, scale: float, shift: torch.Tensor | None = None) -> torch.Tensor:
        h = torch.tanh(self.up(x)) * scale
        if shift is not None:
            h = h + shift
        return self.down(F.gelu(F.gelu(self.middle(h)) * h))


# --------------------------------------------------------------------------------------- convolutions


def conv(inside: int, outside: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution of the same image size over ``stride``, without bias."""
    return nn.Conv2d(inside, outside, size, stride, size // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a residual."""

    expansion = 1

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inside, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample(inside, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a residual."""

    expansion = 2

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = width * self.expansion
        self.conv1, self.bn1 = conv(inside, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, outside, 1), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample(inside, outside, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def downsample(inside: int, outside: int, stride: int) -> nn.Sequential | None:
    """The residual's own convolution where sizes change."""
    if stride == 1 and inside == outside:
        return None
    return nn.Sequential(conv(inside, outside, 1, stride), nn.BatchNorm2d(outside))


class ResNet(nn.Module):
    """A residual network in the manner of ResNet-18 or -50, small."""

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], widths: tuple[int, ...], depth: int) -> None:
        super().__init__()
        self.stem, self.bn = conv(3, widths[0], 3), nn.BatchNorm2d(widths[0])
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        layers: list[nn.Module] = []
        inside = widths[0]
        for k, width in enumerate(widths):
            for j in range(depth):
                layers.append(block(inside, width, 2 if k > 0 and j == 0 else 1))
                inside = width * block.expansion
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(inside, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.relu(self.bn(self.stem(x))))
        return self.head(F.adaptive_avg_pool2d(self.layers(x), 1).flatten(1))


# ------------------------------------------------------------------------------------ special autograd


class Cube(torch.autograd.Function):
    """x³ with a backward of its own, of methods and of torch's functions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.mul(x, x) * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * torch.square(x)


class WithFunction(nn.Module):
    """An autograd.Function between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = Cube.apply(torch.tanh(self.up(x)))
        return self.down(F.gelu(Cube.apply(self.middle(h))))


class Checkpointed(nn.Module):
    """Already uses torch's own checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.down = mlp_part(16, 32), mlp_part(32, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.down(checkpoint(self.second, x, use_reentrant=False))


def mlp_part(inside: int, width: int) -> nn.Sequential:
    """Two layers with dropout."""
    return nn.Sequential(nn.Linear(inside, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width), nn.Tanh())


class Recurrent(nn.Module):
    """A fused recurrent layer between perceptrons."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.lstm, self.after = mlp_part(16, 24), nn.LSTM(24, 24, batch_first=True), mlp_tail(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.lstm(self.before(x))[0])


# ------------------------------------------------------------------------------------------------- zoo


def _one(*shape: int, requires_grad: bool = False) -> MakeCall:
    return lambda seed: ((randn(*shape, seed=seed, requires_grad=requires_grad),), {})


def _two(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (randn(32, 16, seed=seed, requires_grad=True), randn(32, 12, seed=seed + 100)), {}


def _keywords(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {"x": randn(32, 16, seed=seed), "scale": 1.5, "shift": randn(32, seed=seed + 100, requires_grad=True)}


def _ids(*shape: int, high: int) -> MakeCall:
    return lambda seed: ((tokens(*shape, high=high, seed=seed),), {})


class Turned(torch.autograd.Function):
    """The identity, whose backward multiplies by ``factor``; it returns a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.factor * gradients[0], None


ZOO = (
    Case("mlp", mlp, _one(128, 16, requires_grad=True)),
    Case("dropout_mlp", dropout_mlp, _one(32, 16, requires_grad=True)),
    Case("frozen_first", FrozenFirst, _one(32, 16)),
    Case("tied", Tied, _ids(4, 8, high=40)),
    Case("moving_average", MovingAverage, _one(32, 16, requires_grad=True)),
    Case("two_in_two_out", TwoInTwoOut, _two),
    Case("dict_out", lambda: TwoInTwoOut(as_dict=True), _two),
    Case("keywords", Keywords, _keywords),
    Case("resnet_basic", lambda: ResNet(BasicBlock, (8, 16), 2), _one(4, 3, 16, 16)),
    Case("resnet_bottleneck", lambda: ResNet(Bottleneck, (8, 12), 1), _one(4, 3, 12, 12, requires_grad=True)),
    Case("gpt", lambda: GPT(3, 32, 4, 16, 64), _ids(2, 16, high=64)),
    Case("function", WithFunction, _one(32, 16, requires_grad=True)),
    Case("checkpointed", Checkpointed, _one(32, 16)),
    Case("recurrent", Recurrent, _one(4, 6, 16)),
)


def case(name: str) -> Case:
    """The case of this name."""
    return next(c for c in ZOO if c.name == name)
