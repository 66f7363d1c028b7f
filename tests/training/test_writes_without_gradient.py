"""Inputs and parameters that require gradients, written within ``no_grad``: planning writes them, and puts back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from against_eager import WAYS, assert_same, planned_by, snapshot
from models import randn
from torch import nn
from torch.nn import functional as F

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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["input", "parameter", "result", "parameter twice"])
@pytest.mark.parametrize("write", WRITES)
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
