"""A second run changes nothing that a first run has changed, and draws what it drew."""

from __future__ import annotations

import copy
import itertools
import random
import threading
import warnings
from typing import Any

import numpy
import pytest
import torch
from against_eager import assert_same, assert_trains_as_eager, snapshot, step, under_budget
from test_order import assert_two_steps_equal
from torch import nn
from torch.nn import functional as F

from rockmate import BudgetWarning, Rockmate, attach


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
        elif self.how == "NumPy's number":
            total = torch.tensor(numpy.float32(0))
        elif self.how == "range":
            total = torch.tensor(range(16)).float()
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


@pytest.mark.parametrize(
    "how", ["tensor", "new_tensor", "as_tensor", "NumPy's number", "range", "Tensor", "from_numpy"]
)
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


# ------------------------------------------------------------------ what the sample does not show


def assert_equal_after(sample: torch.Tensor, model: nn.Module, fraction: float = 0.0) -> None:
    """Planned on ``sample``, and trained on others."""
    eager = copy.deepcopy(model)
    rk = under_budget(copy.deepcopy(eager), sample, fraction=fraction)

    def train(model: nn.Module, call: nn.Module) -> Any:
        for k in range(2):
            yield from step(call, (torch.randn(sample.shape, generator=torch.Generator().manual_seed(k)),))

    assert_trains_as_eager(eager, rk, train)


def test_statistics_that_stay_on_zeros_change_once_on_others() -> None:
    torch.manual_seed(0)
    channels = [3, 8, 8, 8, 8]
    layers = (
        layer
        for a, b in itertools.pairwise(channels)
        for layer in (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
    )
    assert_equal_after(torch.zeros(8, 3, 16, 16), nn.Sequential(*layers))


class DrawsByValue(Layer):
    """Draws for numbers above, or below, zero."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a = how, nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        if self.how == "poisson":
            h = h * torch.poisson(torch.relu(h.detach()) * 3)
        elif self.how == "binomial":
            h = h * torch.binomial(torch.relu(h.detach() * 5).round(), torch.full_like(h, 0.5))
        else:
            h = F.rrelu(h, training=True)
        return self.b(F.gelu(h.exp()) + F.silu(h))


@pytest.mark.parametrize("how", ["poisson", "binomial", "rrelu"])
def test_what_draws_nothing_on_zeros_draws_the_same_again_on_others(how: str) -> None:
    torch.manual_seed(0)
    assert_equal_after(torch.zeros(64, 16), nn.Sequential(*(DrawsByValue(how) for _ in range(5))))


class FromTensor(nn.Module):
    """Gives a number to an operation as a tensor, which the operation reads in C++."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layers = how, nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.register_buffer("number", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.how == "huber":
            return F.huber_loss(3 * x, torch.zeros_like(x), delta=self.number)
        if self.how == "smooth":
            return F.smooth_l1_loss(3 * x, torch.zeros_like(x), beta=self.number)
        if self.how == "triplet":
            return F.triplet_margin_loss(x, x.flip(0), x.roll(1, 0), margin=self.number)
        if self.how == "dropout":
            return F.dropout(x, self.number)
        if self.how == "list":
            return x / torch.tensor([self.number, 1.0])[0]
        return x + torch.empty_like(x).normal_(0, self.number)


@pytest.mark.parametrize("how", ["huber", "smooth", "triplet", "dropout", "list", "normal"])
def test_a_number_that_is_given_as_a_tensor_is_that_of_the_call(how: str) -> None:
    torch.manual_seed(0)
    eager = FromTensor(how)
    rk = under_budget(copy.deepcopy(eager), torch.randn(64, 16), fraction=0.5)

    def train(model: nn.Module, call: nn.Module) -> Any:
        for number in (0.5, 0.25, 0.75):
            model.number.fill_(number)
            yield from step(call, (torch.randn(64, 16, generator=torch.Generator().manual_seed(1)),))

    assert_trains_as_eager(eager, rk, train)


def test_a_parameter_that_forward_makes() -> None:
    class Makes(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)) * nn.Parameter(torch.ones(16)))

    torch.manual_seed(0)
    eager = Makes()
    rk = Rockmate(copy.deepcopy(eager), torch.randn(64, 16), "100%", costs="flops", cache=False)
    x = torch.randn(64, 16)
    assert_trains_as_eager(eager, rk, lambda _, call: [t for _ in range(3) for t in step(call, (x,))])


def test_a_counter_that_forward_changes_is_no_guard() -> None:
    """Batch norm reads it as a number, in an operation of its own, and may be called twice."""

    class Twice(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16, momentum=None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.b(torch.tanh(self.norm(self.a(x)))))

    torch.manual_seed(0)
    eager = Twice()
    rk = Rockmate(copy.deepcopy(eager), torch.randn(64, 16), "100%", costs="flops", cache=False)
    x = torch.randn(64, 16)
    assert_trains_as_eager(eager, rk, lambda _, call: [t for _ in range(6) for t in step(call, (x,))])
    assert rk.plans_made <= 2  # for steps that make gradients, and for those that add to them


# ------------------------------------------------------------------ models that are followed


class Followed(Layer):
    """TorchDynamo captures it as two graphs."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.other = what, nn.Parameter(torch.ones(16))
        if what == "boxes":
            nn.init.zeros_(self.b.weight)
            nn.init.zeros_(self.b.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        h = torch.tanh(self.a(x)).exp().sin()
        if self.what == "likelihood":
            return F.gaussian_nll_loss(self.b(h), h, h.abs() + 1, eps=2.0)
        if self.what == "boxes":
            return self.b(h) * torch.tensor([float(len(x)), 1.0] * 8)
        with torch.set_grad_enabled(len(x) <= 64):
            h = h * self.other
        return self.b(h)


@pytest.mark.parametrize("what", ["likelihood", "boxes", "grad"])
def test_gradients_that_no_output_shows(what: str) -> None:
    """A part without gradient in a function of torch's, a constant of sizes behind zeros, a mode that follows sizes."""
    torch.manual_seed(0)
    eager = Followed(what)

    def train(model: nn.Module) -> Any:
        for size in (64, 48, 40):
            model.zero_grad()
            yield from step(model, (torch.randn(size, 16, generator=torch.Generator().manual_seed(size)),))
            yield from (None if p.grad is None else p.grad.clone() for p in model.parameters())

    model = copy.deepcopy(eager)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        attach(model, "90%", sample=torch.randn(64, 16), costs="flops", cache=False, on_infeasible="least")
        assert_same(train(model), train(eager))


def test_a_sample_of_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.randn(64, 16)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))
    model[0].requires_grad_(False)
    Rockmate(model, x, "90%", costs="flops", cache=False)(x).sum().backward()


TOTAL = torch.zeros(16)


class Changing(Layer):
    """Followed. Its forward and its hooks change tensors that no module holds."""

    total = torch.zeros(16)

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ModuleList(nn.Identity() for _ in range(600))  # more than is looked into besides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        with torch.no_grad():
            TOTAL.add_(x.mean(0))
            self.total.add_(x.mean(0))
        return self.b(torch.tanh(self.a(x)).exp().sin())


def test_steps_ahead_of_training_change_nothing_that_hooks_and_functions_hold() -> None:
    model, seen, total, norm = Changing(), list[int](), torch.zeros(16), nn.BatchNorm1d(16)
    momenta = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

    def added(_: nn.Module, __: Any, gradients: tuple[torch.Tensor, ...]) -> None:
        total.add_(norm(gradients[0]).square().sum(0))

    model.b.register_full_backward_hook(added)

    def stepped(p: torch.Tensor) -> None:
        seen.append(len(seen))
        momenta[p].step()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(stepped)
    Rockmate(model, torch.randn(64, 16), "100%", costs="flops", cache=False)
    assert not seen
    assert not any(momentum.state for momentum in momenta.values())
    assert not any(t.any() for t in (TOTAL, Changing.total, total, norm.running_mean, norm.num_batches_tracked))


def _drawn() -> float:
    return random.random() + float(numpy.random.rand())


@torch.library.custom_op("rockmate_again::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Draws from Python's generator and NumPy's, unseen."""
    return x + _drawn()


@torch.library.custom_op("rockmate_again::noisy_backward", mutates_args=())
def noisy_backward(x: torch.Tensor) -> torch.Tensor:
    """Draws in its backward."""
    return x.clone()


for op, backward in ((noisy, lambda _, g: g * 2), (noisy_backward, lambda _, g: g * _drawn())):
    op.register_fake(torch.empty_like)
    op.register_autograd(backward)


@pytest.mark.parametrize("op", [noisy, noisy_backward])
def test_operators_that_draw_unseen_are_given_the_numbers_of_eager_mode(
    op: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no other thread runs that may draw: pytest's, which waits for its time limit, does not."""
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])

    class Noisy(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(op(torch.tanh(self.a(x)).exp())).sin())

    torch.manual_seed(0)
    model, found = Noisy(), []
    for call in (copy.deepcopy(model), model):
        random.seed(0)
        numpy.random.seed(0)
        if call is model:
            attach(model, "90%", costs="flops", cache=False, on_infeasible="least")
        outputs = [t for k in range(4) for t in step(call, (torch.full((64, 16), 0.1 * k),))]
        found.append([*outputs, *snapshot(call), random.getstate(), float(numpy.random.rand())])
    assert_same(found[1], found[0])
