"""Sizes and numbers whose first values hide what they do: a program that fits them is not the module's."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import pytest
import torch
from against_eager import assert_same, snapshot
from models import in_turn, randn
from torch import nn
from torch.nn import functional as F

import rockmate
from rockmate import Attachment, Rockmate, attach
from rockmate.calls.keys import call_key
from rockmate.follow.plan import FollowedPlan
from rockmate.planning.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore::rockmate.BudgetWarning")  # plans of least memory are plans, too


def steps(model: nn.Module, calls: Iterable[tuple[Any, ...]]) -> Iterable[Any]:
    """What steps give; a tensor and a number among the arguments of a call are those of ``forward``."""
    for call in calls:
        model.zero_grad()
        y = model(*call)
        y.square().mean().backward()
        yield y.detach().clone()
        yield from (None if p.grad is None else p.grad.clone() for p in model.parameters())


def assert_equal(model: nn.Module, calls: list[tuple[Any, ...]], budget: str = "90%") -> Attachment:
    eager = copy.deepcopy(model)
    handle = attach(model, budget, costs="flops", cache=False, on_infeasible="least")
    assert_same(steps(model, calls), steps(eager, calls))
    return handle


class Halved(nn.Module):
    """Two graphs. The second halves a size by a function in Python."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Conv1d(8, 8, 3, padding=1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = F.gelu(layer(x))
        if x.sum() < -1e9:
            x = x + 1
        return self.second(x)

    def second(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "area":
            x = F.interpolate(x, scale_factor=0.5, mode="area")
        elif self.how == "recomputed":
            x = F.interpolate(x, scale_factor=0.5, mode="linear", recompute_scale_factor=True)
        else:
            x = F.adaptive_avg_pool1d(x, x.shape[2] // 4 * 2)
        for layer in self.layers[2:]:
            x = F.gelu(layer(x))
        return x


@pytest.mark.parametrize("how", ["area", "recomputed", "given"])
def test_an_odd_size_is_halved_as_it_is(how: str) -> None:
    """Half of 65 and half of 64 are the same."""
    torch.manual_seed(0)
    assert_equal(Halved(how), [(randn(16, 8, size, seed=size),) for size in (65, 65, 64, 64, 63, 61, 51)], "80%")


NUMBER = 40


class Weighted(nn.Module):
    """Multiplies some places by a tensor that is made of a number."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        number = 4 if self.of == "constant" else NUMBER
        return x * torch.where(where, torch.tensor(number), torch.tensor(1))


def masked(size: int, some: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = randn(size, 16, 32, seed=size)
    return x, (x > 0) & some


def test_a_tensor_of_a_number_that_equals_a_size_is_no_size() -> None:
    """The first batch of another size has no place where the number counts."""
    torch.manual_seed(0)
    calls = [
        masked(*call)
        for call in ((4, True), (4, False), (6, False), (6, True), (8, False), (8, True), (3, False), (3, True))
    ]
    assert_equal(Weighted("constant"), calls)


def test_a_tensor_of_another_number_is_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Weighted("global")
    eager = copy.deepcopy(model)
    attach(model, "90%", costs="flops", cache=False, on_infeasible="least")
    for number, some in ((40, True), (50, False), (50, True), (60, False), (60, True)):
        monkeypatch.setitem(globals(), "NUMBER", number)
        assert_same(steps(model, [masked(7, some)]), steps(eager, [masked(7, some)]))


class Scaled(nn.Module):
    """A power, a factor or a place whose number is the first batch's size, and a statistic that nothing reads."""

    def __init__(self, what: str, dead: bool) -> None:
        super().__init__()
        self.what, self.dead = what, dead
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.scale, self.level = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(9, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.dead:
            (x.detach() ** 2).add(1)[:, 0].mean()
        if self.what == "power":
            return x * self.scale**4
        if self.what == "factor":
            return torch.add(x, self.level[0], alpha=4)
        return x + self.level[4]


@pytest.mark.parametrize("dead", [True, False])
@pytest.mark.parametrize("what", ["power", "factor", "place"])
def test_what_nothing_reads_hides_no_number(what: str, dead: bool) -> None:
    torch.manual_seed(0)
    assert_equal(Scaled(what, dead), [(randn(size, 8, 16, seed=size),) for size in (4, 4, 6, 6, 7, 5)])


def test_the_zeros_are_two() -> None:
    """1 / 0.0 and 1 / -0.0 differ."""
    assert call_key([0.0], None) == call_key([0.0], None) != call_key([-0.0], None)


class CountsFirst(nn.Module):
    """Reads a buffer behind its update."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        number = self.count.item()
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x * number


def test_a_number_is_read_behind_what_writes_it() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_equal(CountsFirst(), [(randn(32, 16, seed=0),)] * 4)


class Varied(nn.Module):
    """What follows each layer takes a number that Python computes from a counter."""

    def __init__(self, how: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers, self.how, self.step = nn.ModuleList(nn.Linear(16, 16) for _ in range(6)), how, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        for layer in self.layers:
            x = self.how(self.step, F.gelu(layer(x)))
        return x


SCHEDULES: dict[str, Callable[[int, torch.Tensor], torch.Tensor]] = {
    "a factor": lambda step, x: x * math.exp(-0.1 * step),
    "a slope": lambda step, x: F.leaky_relu(x, 0.01 + math.exp(-step)),
    "a saturation": lambda step, x: F.elu(x, 1 + math.exp(-step)),
    "a power": lambda step, x: (x.abs() + 0.1).pow(1 + 1 / (1 + math.log(1 + step))),
}


@pytest.mark.parametrize("how", SCHEDULES.values(), ids=SCHEDULES)
def test_a_number_that_is_another_one_in_each_call_is_followed(how: Callable[..., torch.Tensor]) -> None:
    """TorchDynamo has its value in the program, and each step would be captured and planned for."""
    handle = assert_equal(Varied(how), [(randn(64, 16, seed=k),) for k in range(9)], "75%")
    assert isinstance(handle.plan, FollowedPlan)
    assert handle.reason is not None
    assert handle.reason.startswith("a number that forward computes is another one in each call at test_hidden_numbers")


OF_PYTHON: dict[str, Callable[[int, torch.Tensor], Any]] = {
    "a root beside whole numbers": lambda step, x: torch.sin(torch.arange(16) / numpy.sqrt(3)),
    "a root as an exponent": lambda step, x: (x.abs() ** numpy.sqrt(16)).tanh(),
    "a sign beside whole numbers": lambda step, x: (x > 0) * numpy.sign(-step - 0.5),
    "an element beside whole numbers": lambda step, x: torch.arange(16) * (numpy.array([0.25, 0.5]) * step)[1],
    "a format of a constant": lambda step, x: float(format(1 / 3, ".1f")),
    "a format": lambda step, x: float(format(1 / step, ".1f")),
    "a text": lambda step, x: float(f"{1 / step:.1f}"),
    "texts": lambda step, x: len(f"{step:03d}") + len(f"{step!r}") + float(f"{step}{step}"),
    "tens": lambda step, x: round(37 * step, -1),
    "tens of a size": lambda step, x: round(x.shape[0] + 37 * step, -1),
    "digits": lambda step, x: round(step / 7, 2),
    "a sum of unlike fractions": lambda step, x: (step / 7 + 1.7e9) - 1.7e9,
    "a difference": lambda step, x: (1 - (1 - step / 1e9)) * 1e9,
}


@pytest.mark.parametrize(("name", "sampled"), in_turn(OF_PYTHON, [False, True]))
def test_python_and_numpy_compute_with_numbers_as_in_eager_mode(name: str, sampled: bool) -> None:
    model = Varied(lambda step, x: x * OF_PYTHON[name](step, x) * 0.5)
    eager, calls = copy.deepcopy(model), [(randn(64, 16, seed=k),) for k in range(6)]
    sample = calls[0] if sampled else None
    attach(model, "90%", sample=sample, costs="flops", cache=False, on_infeasible="least")
    assert_same(steps(model, calls), steps(eager, calls))


def test_texts_of_numbers_that_forward_returns_are_texts() -> None:
    class Told(Varied):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), f"{self.step}", f"{1 / self.step:.2f}", [f"{self.step:x}", str(self.step)]

    model = Told(lambda _, x: x)
    attach(model, "90%", costs="flops", cache=False)
    for step in range(1, 15):
        y, *told = model(randn(64, 16, seed=step))
        y.sum().backward()
        assert told == [f"{step}", f"{1 / step:.2f}", [f"{step:x}", str(step)]]


def test_a_few_numbers_in_turn_are_captured() -> None:
    model = Varied(lambda step, x: x * math.exp(-(step % 3)))
    assert_equal(model, [(randn(64, 16, seed=k),) for k in range(9)], "75%")
    assert isinstance(rockmate.attached(model).plan, Plan)


# ------------------------------------------------------------------ calls that fail, or are not captured


@pytest.mark.parametrize("look", ["hook", "counter"])
def test_a_call_that_the_model_refuses_changes_nothing(look: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.calls = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if look == "counter":
                self.calls += 1
            for layer in self.layers:
                x = F.gelu(layer(x))
            return x

    model, seen = Model(), []
    if look == "hook":
        model.layers[2].register_forward_hook(lambda *_: seen.append(1))
    rk = rockmate.Rockmate(model, randn(64, 16, seed=0), "80%", cache=False, costs="flops")
    rk(randn(64, 16, seed=0)).sum().backward()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        rk(randn(64, 15, seed=0))
    before = model.calls, len(seen)
    rk(randn(64, 16, seed=0)).sum().backward()
    assert (model.calls - before[0], len(seen) - before[1]) == ((1, 0) if look == "counter" else (0, 1))
    assert rk.plans_made == 1


def test_a_model_that_is_not_captured_says_so() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    attach(model, "90%", costs="flops", cache=False)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.warns(rockmate.BudgetWarning, match="Sequential runs as it is, with no plan and no budget: TorchDynamo"),
    ):
        model(randn(4, 16, seed=0)).sum().backward()


def test_a_model_that_is_not_captured_cannot_be_planned() -> None:
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), randn(4, 16, seed=0)
    for plan in (lambda: attach(model, "90%", sample=x), lambda: Rockmate(model, x, "90%")):
        with (
            torch.compiler.set_stance("force_eager"),
            pytest.raises(rockmate.InputError, match=r"Sequential cannot be planned: TorchDynamo, .* is switched off"),
        ):
            plan()
    assert rockmate.attached(model) is None


class Binned(nn.Module):
    """Returns bins, which the loss does not read, by an operation without a derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x, (x * 10) // 1


def test_an_operation_without_a_derivative_is_named() -> None:
    """Where the loss does not read its result, eager mode trains; so does a model that is followed."""
    eager = Binned()
    model, x = copy.deepcopy(eager), randn(64, 16, seed=0)
    handle = attach(model, "60%", costs="flops", cache=False)
    for _ in range(3):
        for m in (model, eager):
            m(x)[0].square().mean().backward()
        assert_same(snapshot(model), snapshot(eager))
    assert re.match(r"floor_divide at .*test_hidden_numbers.py:\d+ has no deriv", handle.reason)


class Reversed(torch.autograd.Function):
    """The gradient comes back turned, by a factor that it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -ctx.factor * gradients[0], None


class Scheduled(nn.Module):
    """The gradient is turned by a factor that Python computes anew in each step, as its own functions do."""

    def __init__(self, schedule: Callable[[int], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.schedule, self.step = schedule, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        for layer in self.layers:
            x = F.gelu(layer(x))
        return Reversed.apply(x, self.schedule(self.step))  # type: ignore[no-any-return,no-untyped-call]


SCHEDULES: dict[str, Callable[[int], float]] = {
    "exponential": lambda step: math.exp(-step),
    "logistic": lambda step: 2 / (1 + math.exp(-10 * step / 100)) - 1,
    "cosine": lambda step: 0.5 * (1 + math.cos(math.pi * step / 100)),
    "logarithm": lambda step: 1 + math.log1p(step),
    "least": lambda step: min(1, 0.011 * step),
    "power": lambda step: 0.99**step,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_number_that_python_computes_anew_in_each_step_is_planned_for_once(schedule: str) -> None:
    eager = Scheduled(SCHEDULES[schedule])
    model, x = copy.deepcopy(eager), randn(64, 16, seed=0)
    handle = attach(model, "75%", costs="flops", cache=False)
    made = []
    for _ in range(6):
        for m in (model, eager):
            m(x).square().mean().backward()
        assert_same(snapshot(model), snapshot(eager))
        made.append(handle.plans_made)
    assert made[2:] == made[-1:] * 4  # twice at most: TorchDynamo may make an argument of a number that has changed
    assert made[-1] <= 2


class FactorTwice(torch.autograd.Function):
    """Both parts compute with the factor, the backward in several ways."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x * factor + 0.3 / factor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.factor * gradients[0] * 0.5 * ctx.factor + x * (1 - ctx.factor) - x.sigmoid().pow(
            1 + ctx.factor
        ), None


class FactorOfStep(torch.autograd.Function):
    """The factor is computed inside, from a whole number."""

    @staticmethod
    def forward(ctx: Any, step: int, x: torch.Tensor) -> torch.Tensor:
        ctx.factor = min(1.0, 0.011 * step)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, -(2 / (1 + ctx.factor)) * gradients[0]


class Annealed(nn.Module):
    """Layers, and a head behind a function that gets a number which follows from how many calls there were."""

    def __init__(self, apply: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.apply_function, self.step = apply, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.mean() + self.apply_function(x, self.step).sin().sum()


GIVEN: dict[str, tuple[Callable[[torch.Tensor, int], torch.Tensor], int]] = {
    "given": (lambda x, step: Reversed.apply(x, min(1, 0.011 * step)), 2),
    "given twice": (lambda x, step: Reversed.apply(Reversed.apply(x, 0.011 * step), 1 / (1 + step)), 2),
    "computed inside": (lambda x, step: FactorOfStep.apply(step, x), 2),
    "an exponent, too": (lambda x, step: FactorTwice.apply(x, min(0.5, 0.1 * step)), 6),  # it stays that of pow
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*in_turn(GIVEN, [torch.bfloat16]), *in_turn(GIVEN, [torch.float32, torch.float64])]
)
def test_a_number_that_a_function_of_autograd_is_given_asks_for_no_other_plan(name: str, dtype: torch.dtype) -> None:
    """The first call has it as a constant, the second as an input."""
    torch.manual_seed(0)
    apply, plans = GIVEN[name]
    eager = Annealed(apply).to(dtype)
    model, x = copy.deepcopy(eager), torch.randn(60, 16, dtype=dtype)
    handle = attach(model, "75%", costs="flops")
    for _ in range(6):
        expected, found = eager(x), model(x)
        expected.backward()
        found.backward()
        assert torch.equal(expected, found)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(eager.parameters(), model.parameters(), strict=True))
    assert len(handle.plans) <= plans
    assert handle.plan is not None and handle.plan.recomputed
