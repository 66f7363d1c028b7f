"""Functions that keep tensors as attributes of ``ctx`` instead of saving them: no hook sees these, and they count."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from against_eager import assert_same, assert_trains_as_eager, snapshot, step
from models import part_way, randn
from torch import nn

from rkgb.device import Cpu
from rockmate import Rockmate, attach, measure_peak


class Scaled(torch.autograd.Function):
    """x · exp(x), which keeps the exponential in the way of a subclass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, e = ctx.kept if hasattr(ctx, "kept") else (*ctx.saved_tensors, ctx.e)
        product: torch.Tensor = gradient * e["e"] * (1 + x) if isinstance(e, dict) else gradient * e * (1 + x)
        return product


class Attribute(Scaled):
    """The input is saved, the exponential an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.e = x.exp()
        return x * ctx.e


class Everything(Scaled):
    """Both are attributes, in containers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        e = x.exp()
        ctx.kept = [x, {"e": e}]
        return x * e


class OfParameter(torch.autograd.Function):
    """Keeps a parameter, which is there anyway, and its input, which another node makes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.scale = x, scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient * ctx.scale, (gradient * ctx.x).sum(0)


class Functions(nn.Module):
    """Layers with a function behind each, and something between that can run again."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.scale = nn.Parameter(torch.ones(32))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            more = (self.scale,) if self.function is OfParameter else ()
            x = torch.tanh(self.function.apply(torch.sigmoid(layer(x)), *more))
        return x


class Counting(torch.autograd.Function):
    """Adds to a tensor in its backward; no product is computed with what is there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        ctx.total = total
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.total.add_(gradient.abs().sum(0))
        return gradient * 2, None


class Reading(Counting):
    """Keeps it likewise, and reads in its backward what it has become by then."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.total, None


class Totals(nn.Module):
    """Layers with a function behind each that keeps one buffer, which forward may change."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.function = nn.ModuleList(nn.Linear(32, 32) for _ in range(5)), function
        self.register_buffer("total", torch.ones(32))
        self.changes = function is Reading

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(self.function.apply(torch.sigmoid(layer(x)), self.total))
            if self.changes:
                self.total.mul_(1.1)
        return x


@pytest.mark.parametrize("function", [Counting, Reading])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_tensor_that_a_function_keeps_may_change_before_its_backward_ends(function: Any, sampled: bool) -> None:
    """It is an attribute, of which autograd counts no changes, as it would of what a capture saves."""
    model, x = Totals(function), randn(512, 32, seed=0)
    eager = copy.deepcopy(model)
    attach(model, "70%", sample=x if sampled else None, costs="flops", cache=False)
    found: list[list[Any]] = [[t for _ in range(4) for t in (*step(m, [x]), m.total.clone())] for m in (model, eager)]
    assert_same(*([*f, *snapshot(m)] for f, m in zip(found, (model, eager), strict=True)))


@pytest.mark.parametrize("function", [Attribute, Everything, OfParameter])
def test_tensors_that_functions_keep_count(function: Any) -> None:
    model, x = Functions(function), randn(512, 32, seed=0)
    eager = copy.deepcopy(model)
    rk = Rockmate(model, x, "100%", costs="flops")
    found = rk.frontier()

    def run() -> None:
        model.zero_grad()
        rk(x).sum().backward()

    for fraction in (0.0, 0.5, 1.0):
        rk.budget = part_way(found, fraction)
        assert (rk.plan.recomputed > 0) == (fraction < 1)
        for m in (model, eager):
            m.zero_grad()
        assert_trains_as_eager(eager, rk, lambda _, call: step(call, [x]))
        for _ in range(3):
            run()
        model.zero_grad()
        assert measure_peak(run) <= rk.plan.predicted_peak + Cpu.scalars <= rk.budget + Cpu.scalars


def test_no_more_is_counted_than_there_is() -> None:
    """What a function keeps of others' memory, or of parameters, is counted once, or not at all."""
    peaks = []
    for function in (Attribute, Everything, OfParameter):
        model, x = Functions(function), randn(512, 32, seed=0)
        rk = Rockmate(model, x, "100%", costs="flops")

        def run(model: nn.Module = model, rk: Rockmate = rk, x: torch.Tensor = x) -> None:
            model.zero_grad()
            rk(x).sum().backward()

        for _ in range(3):
            run()
        model.zero_grad()
        peaks.append((rk.plan.predicted_peak, measure_peak(run)))
    assert all(0 <= measured + Cpu.scalars - predicted <= 2 * Cpu.scalars for predicted, measured in peaks), peaks


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch's context manager sets what no machine here has
def test_settings_of_a_rerun_are_those_of_the_forward() -> None:
    """The kernels of oneDNN have other bits than torch's own, and only the forward is to be without them."""
    torch.manual_seed(0)
    layers = (layer for _ in range(6) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()))
    model = nn.Sequential(*layers)
    eager, x = copy.deepcopy(model), torch.randn(4, 8, 16, 16)

    def step(run: nn.Module) -> None:
        run.zero_grad()
        with torch.backends.mkldnn.flags(enabled=False):
            output = run(x)
        output.square().mean().backward()

    step(eager)
    handle = attach(model, int(0.7 * measure_peak(lambda: step(eager))), costs="flops", cache=False)
    before = copy.deepcopy(eager.state_dict())
    model.load_state_dict(before)
    for run in (model, eager):
        run.load_state_dict(before)
        for _ in range(2):
            step(run)
    assert handle.plan.recomputed > 0
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))
    assert torch.backends.mkldnn.enabled


class TwoResults(torch.autograd.Function):
    """Nobody reads the second result, whose gradient is then None, and not zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        scaled: torch.Tensor = gradient * x.cos() + (1 if other is None else other)
        return scaled


@pytest.mark.parametrize("sampled", [False, True])
def test_a_function_may_ask_for_none_in_the_place_of_zeros(sampled: bool) -> None:
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.Sigmoid(), nn.Tanh())]
    model, x = nn.Sequential(*layers, First(), nn.Linear(32, 32)), randn(512, 32, seed=0)
    eager = copy.deepcopy(model)
    attach(model, "75%", sample=x if sampled else None, costs="flops", cache=False)
    found: list[list[Any]] = [[t for _ in range(4) for t in step(m, [x])] for m in (model, eager)]
    assert_same(*([*f, *snapshot(m)] for f, m in zip(found, (model, eager), strict=True)))


class First(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return TwoResults.apply(x)[0]  # type: ignore[no-any-return]
