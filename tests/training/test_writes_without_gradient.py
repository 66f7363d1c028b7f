"""Inputs and parameters that require gradients, written within ``no_grad``: planning writes them, and puts back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from against_eager import WAYS, assert_same, planned_by, snapshot
from models import in_turn, pairs, randn
from torch import nn
from torch.nn import functional as F

from rockmate import attach, measure_peak

Write = Callable[[torch.Tensor], Any]


def _clamped_and_scaled(x: torch.Tensor) -> None:
    x.mul_(2)
    x.clamp_(max=3)


def _dropped(x: torch.Tensor) -> None:
    F.dropout(x, 0.2, inplace=True)


def _renormed(x: torch.Tensor) -> None:
    x.div_(x.norm(dim=-1, keepdim=True).clamp_min(0.1))
    x.add_(0.1)
    x.sin_()


WRITES: dict[str, Write] = {
    "scaled": lambda x: x.mul_(2),
    "clamped and scaled": _clamped_and_scaled,
    "dropped": _dropped,
    "renormed": _renormed,
}


class Written(nn.Module):
    """``place``: what is written: the input, a parameter, the result of a layer, or the parameter before and after its
    layers.
    """

    def __init__(self, write: Write, place: str) -> None:
        super().__init__()
        self.write, self.place = write, place
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 64).view(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.place != "result":
                self.write(x if self.place == "input" else self.scale)
        for layer in self.layers:
            x = F.gelu(layer(x))
        if self.place in ("result", "parameter twice"):
            with torch.no_grad():
                self.write(x if self.place == "result" else self.scale)
        return x @ self.scale


@pytest.mark.parametrize(
    ("write", "place", "way"), pairs(WRITES, ["input", "parameter", "result", "parameter twice"], WAYS)
)
def test_it_is_written_once(write: str, place: str, way: str) -> None:
    def results(planned: bool) -> Iterator[Any]:
        torch.manual_seed(0)
        model = Written(WRITES[write], place)
        call: Any = model
        if planned:
            call, _ = planned_by(way, model, "80%", randn(32, 8, seed=0, requires_grad=True))
        torch.manual_seed(5)
        for k in range(3):
            x = randn(32, 8, seed=k, requires_grad=True)
            call(x).square().mean().backward()
            yield from snapshot(model, x)

    assert_same([*results(True)], [*results(False)])


class WrittenView(nn.Module):
    """A part of a layer's result, of a parameter or of a buffer is written within ``no_grad``, in a view."""

    def __init__(self, write: Callable[[WrittenView, torch.Tensor], Any]) -> None:
        super().__init__()
        self.write, self.count = write, 0
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 32))
        self.register_buffer("rate", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        for layer in self.layers:
            x = layer(x)
            with torch.no_grad():
                self.write(self, x)
            x = F.dropout(x.sin(), 0.1) * self.scale.clone() * self.rate.clone()
        return x


def _set_in_view(_: WrittenView, x: torch.Tensor) -> None:
    x.t()[0] = 1.0


def _of_everything(model: WrittenView, x: torch.Tensor) -> None:
    x[:, 0].mul_(0.5 / model.count)
    model.scale[:3].mul_(1.01)
    model.rate[1] += 0.01
    F.dropout(x[:, 5:7], 0.5, inplace=True)


VIEWS: dict[str, Callable[[WrittenView, torch.Tensor], Any]] = {
    "a column": lambda _, x: x[:, 0].mul_(0.5),
    "every other column": lambda _, x: x[:, ::2].clamp_(max=0.5),
    "a row": lambda _, x: x[0].fill_(0.1),
    "a half": lambda _, x: x.chunk(2, 1)[0].copy_(x.chunk(2, 1)[1]),
    "set": _set_in_view,
    "a mask": lambda _, x: x.__setitem__(x > 1, 1.0),
    "a parameter": lambda model, _: model.scale[0].mul_(1.01),
    "a buffer": lambda model, _: model.rate[0].mul_(1.01),
    "of everything": _of_everything,
}


@pytest.mark.parametrize(("write", "way"), in_turn(VIEWS, WAYS))
def test_a_view_is_written_once(write: str, way: str) -> None:
    def results(planned: bool) -> Iterator[Any]:
        torch.manual_seed(0)
        model = WrittenView(VIEWS[write])
        call: Any = model
        if planned:
            call, _ = planned_by(way, model, "80%", randn(32, 32, seed=0))
        torch.manual_seed(5)
        for k in range(4):
            y = call(randn(32, 32, seed=k))
            y.square().mean().backward()
            yield y.detach()
            yield from snapshot(model)

    assert_same([*results(True)], [*results(False)])


def test_an_output_of_a_view_without_gradients_gets_one() -> None:
    """Autograd gives such a view a gradient of its own, of which no graph's plan knows: the step is followed."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            for layer in self.layers:
                x = F.gelu(layer(x))
            with torch.no_grad():
                y = x.squeeze()
            return x, y / (1 + y.square())

    torch.manual_seed(0)
    model, x = Views(), torch.randn(256, 64)
    eager = copy.deepcopy(model)

    def step(m: nn.Module) -> None:
        m.zero_grad()
        sum(t.square().sum() for t in m(x)).backward()

    budget = 9 * measure_peak(lambda: step(eager)) // 10
    handle = attach(model, budget)
    for _ in range(3):
        step(model)
        step(eager)
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    assert "view taken under torch.no_grad()" in handle.reason
    assert measure_peak(lambda: step(model)) == handle.plan.predicted_peak <= budget
