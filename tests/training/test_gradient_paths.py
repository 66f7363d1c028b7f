"""Attributes of a model that change which gradients flow, and no value: a plan of before must not run.

Each model computes the same outputs, bit for bit, before and after the change.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Turned, in_turn
from torch import nn
from torch.autograd import forward_ad

from rockmate import BudgetWarning, attach


class Model(nn.Module):
    """``way`` computes the input of layers that are not read below, from ``x`` and what ``change`` changes."""

    def __init__(self, way: Callable[[Model, torch.Tensor], torch.Tensor], tied: bool, parts: bool) -> None:
        super().__init__()
        self.way, self.parts = (way,), parts
        self.first = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.other = self.first if tied else copy.deepcopy(self.first)
        self.behind = nn.Sequential(*(nn.GELU() for _ in range(6)), nn.Linear(16, 16, bias=False))
        self.zeros = nn.Parameter(torch.zeros(8, 16))
        self.nothing = nn.Linear(16, 16)
        nn.init.zeros_(self.nothing.weight)
        nn.init.zeros_(self.nothing.bias)
        self.on, self.count, self.bit, self.rate = False, 2, 0, 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.behind(self.way[0](self, x))
        return y if not self.parts or float(y.detach().sum()) < 1e9 else x

    def change(self) -> None:
        if self.other is self.first:
            self.other = copy.deepcopy(self.first)
        self.on, self.count, self.bit, self.rate = not self.on, self.count + 1, 1 - self.bit, self.rate + 0.25


def without_gradient(m: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad() if m.on else contextlib.nullcontext():
        found: torch.Tensor = m.first(x)
    return found


def grad_mode(m: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(not m.on):
        found: torch.Tensor = m.first(x)
    return found


def one_of_two(m: Model, x: torch.Tensor) -> torch.Tensor:
    a, b = m.first(x), m.other(x)
    found: torch.Tensor = a.detach() + b if m.on else a + b.detach()
    return found


def twice_or_both(m: Model, x: torch.Tensor) -> torch.Tensor:
    a, b = m.first(x), m.other(x)
    found: torch.Tensor = a + a if m.on else a + b
    return found


WAYS: dict[str, Callable[[Model, torch.Tensor], torch.Tensor]] = {
    "no_grad": without_gradient,
    "set_grad_enabled": grad_mode,
    "which of two is detached": one_of_two,
    "which of two is read": lambda m, x: (m.other if m.on else m.first)(x),
    "one of two is read twice": twice_or_both,
    "data": lambda m, x: m.first(x).data if m.on else m.first(x),
    "backward by a flag": lambda m, x: Turned.apply(m.first(x), -1.0 if m.on else 1.0),
    "backward by a whole number": lambda m, x: Turned.apply(m.first(x), m.count),
    "backward by a rate": lambda m, x: Turned.apply(m.first(x), m.rate),
    "row of zeros": lambda m, x: m.first(x) + m.zeros[m.count],
    "first or second row of zeros": lambda m, x: m.first(x) + m.zeros[m.bit],
    "rows of zeros": lambda m, x: m.first(x) + m.zeros[m.count : m.count + 1],
    "rows of zeros by arange": lambda m, x: m.first(x) + m.zeros[torch.arange(m.count, m.count + 1)],
    "rows of zeros by indices": lambda m, x: m.first(x) + F.embedding(torch.full((1,), m.count), m.zeros),
    "factor of zero": lambda m, x: m.first(x) + m.count * m.nothing(x),
    "zero or one of zero": lambda m, x: m.first(x) + m.bit * m.nothing(x),
    "rate of zero": lambda m, x: torch.add(m.first(x), m.nothing(x), alpha=m.rate),
    "number of zeros": lambda m, x: torch.add(m.first(x), m.nothing(x), alpha=m.count),
    "some of zero": lambda m, x: torch.add(m.first(x), m.nothing(x), alpha=m.bit),
    "slope that no value meets": lambda m, x: F.leaky_relu(m.first(x).abs(), m.rate),
    "tied": lambda m, x: m.other(m.first(x)),
}


def trained(way: str, how: str, sizes: tuple[int, ...]) -> Iterator[list[torch.Tensor | None]]:
    """The gradients of each of some steps, between which the model changes."""
    torch.manual_seed(0)
    model = Model(WAYS[way], tied=way == "tied", parts=how == "in parts")
    x = torch.randn(64, 16)
    if how != "eager":
        attach(model, "75%", costs="flops", cache=False)
    for step in range(6):
        model.zero_grad()
        model(x[: sizes[step % len(sizes)]]).square().mean().backward()
        yield [p.grad for p in model.parameters()]
        if step in (2, 4):
            model.change()


@pytest.mark.filterwarnings("ignore::rockmate.BudgetWarning")
@pytest.mark.parametrize(("way", "hows"), in_turn(WAYS, [("attached", "in parts"), ("in parts", "attached")]))
def test_gradients_are_those_of_now(way: str, hows: tuple[str, str]) -> None:
    """At one size in the first of ``hows``, at two in the other."""
    for how, sizes in zip(hows, ((64,), (64, 40)), strict=True):
        expected = list(trained(way, "eager", sizes))
        for step, (found, grads) in enumerate(zip(trained(way, how, sizes), expected, strict=True)):
            assert len(found) == len(grads)
            for mine, their in zip(found, grads, strict=True):
                assert (mine is None) == (their is None), f"{how}, step {step}"
                assert mine is None or their is None or torch.equal(mine, their), f"{how}, step {step}"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_in_forward_mode_the_model_itself_runs() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
    x, tangent = torch.randn(64, 16), torch.randn(64, 16)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent))).tangent
            assert found is not None
            found.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    attach(model, "60%", costs="flops", cache=False)
    with pytest.warns(BudgetWarning, match="the model itself runs"):
        found = gradients()
    assert all(map(torch.equal, found, expected))


def test_a_call_within_a_backward_opens_no_profiler(capfd: pytest.CaptureFixture[str]) -> None:
    """As where the adjoint of a differential equation is solved."""
    inner = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Softplus()) for _ in range(4)))

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x + inner(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                y = inner(x.detach().requires_grad_())
            return gradient, *torch.autograd.grad(y, list(inner.parameters()), gradient)

    def step() -> list[torch.Tensor]:
        inner.zero_grad()
        torch.manual_seed(0)
        Again.apply(torch.randn(64, 16), *inner.parameters()).square().mean().backward()
        return [p.grad.clone() for p in inner.parameters() if p.grad is not None]

    expected = step()
    attach(inner, "75%", costs="flops", cache=False)
    for _ in range(3):
        assert all(map(torch.equal, step(), expected))
    said = capfd.readouterr().err
    assert "profil" not in said
    assert "callback" not in said
