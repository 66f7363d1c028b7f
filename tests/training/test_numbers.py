"""Random operations, normalisation, mixed precision and shared or frozen weights, against eager mode bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import assert_in_budget, assert_same, assert_trains_as_eager, planned, step, under_budget
from models import SEVERAL, case, in_turn, part_way, randn, square_loss
from torch import nn
from torch.nn import functional as F

from rockmate import Rockmate, frontier


def pair(make: Callable[[], nn.Module], *args: Any, fraction: float = 0.3) -> tuple[nn.Module, Any]:
    """A model as it is, and the same under a budget."""
    torch.manual_seed(0)
    eager = make()
    return eager, under_budget(copy.deepcopy(eager), *args, fraction=fraction)


def steps(x: Callable[[int], torch.Tensor], count: int = 2) -> Callable[[nn.Module, nn.Module], Any]:
    def train(model: nn.Module, call: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for k in range(count):
            optimizer.zero_grad()
            yield from step(call, (x(k),))
            optimizer.step()

    return train


def assert_step_in_budget(rk: Any, *args: Any) -> None:
    assert_in_budget(rk, lambda: step(rk, args))


def x16(seed: int) -> torch.Tensor:
    return randn(64, 16, seed=seed)


class Noisy(nn.Module):
    """Draws in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)
        self.alpha, self.rrelu = nn.AlphaDropout(0.2), nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        h = F.gelu(h + 0.1 * torch.randn_like(h)) * torch.rand(h.shape[1])
        h = self.rrelu(self.alpha(h))
        h = h * torch.bernoulli(torch.full_like(h, 0.7)) + torch.empty_like(h).uniform_(-0.1, 0.1)
        h = F.gelu(h)[torch.randperm(h.shape[0])]
        return self.down(F.gelu(F.gumbel_softmax(h, tau=0.5) * h))


def test_random_operations() -> None:
    eager, rk = pair(Noisy, x16(0), fraction=0.0)
    assert_trains_as_eager(eager, rk, steps(x16))
    assert_step_in_budget(rk, x16(3))


class OwnGenerator(nn.Module):
    """Draws from a generator of its own, and from the global one in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = F.gelu(layer(x))
            h = h * torch.rand(h.shape, generator=self.generator)
            h = F.gelu(F.dropout(h, 0.2) * torch.bernoulli(torch.full_like(h, 0.8), generator=self.generator))
            x = x + h * torch.empty_like(h).normal_(generator=self.generator)
        return x


def test_a_generator_of_the_model() -> None:
    eager, rk = pair(OwnGenerator, x16(0))

    def train(model: nn.Module, call: nn.Module) -> Any:
        yield from steps(x16)(model, call)
        yield model.generator.get_state()

    assert_trains_as_eager(eager, rk, train)
    assert_step_in_budget(rk, x16(3))


def test_a_generator_of_nobody() -> None:
    generator = torch.Generator()

    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * torch.rand(16, generator=generator)

    torch.manual_seed(0)
    eager = Draws()
    rk = Rockmate(copy.deepcopy(eager), x16(0), "1 MiB")

    def train(model: nn.Module, call: nn.Module) -> Any:
        generator.manual_seed(3)
        yield from steps(x16)(model, call)

    assert_trains_as_eager(eager, rk, train)


class Norms(nn.Module):
    """Batch norms of every kind; ``frozen`` is in eval mode while the rest trains."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.first, self.last = nn.BatchNorm1d(32), nn.BatchNorm1d(32)
        self.frozen = nn.BatchNorm1d(32)
        self.bare = nn.BatchNorm1d(32, affine=False, track_running_stats=False)
        self.frozen.running_mean.normal_()  # type: ignore[union-attr]

    def train(self, mode: bool = True) -> Norms:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.first(self.up(x)))
        h = F.gelu(self.frozen(self.middle(h)))
        h = F.gelu(self.bare(self.middle(h)))
        return self.down(torch.tanh(F.gelu(self.last(self.middle(h)))))


def test_batch_norm() -> None:
    torch.manual_seed(0)
    eager, rk = pair(lambda: Norms().train(), x16(0), fraction=0.0)
    assert_trains_as_eager(eager, rk, steps(x16))
    assert not rk.original.frozen.training
    assert_step_in_budget(rk, x16(3))


def test_batch_norm_with_cumulative_average() -> None:
    """``momentum=None``: the average of all batches, by a counter that Python reads."""
    norm = nn.BatchNorm1d(8, momentum=None)
    eager, rk = pair(lambda: nn.Sequential(case("mlp").make(), norm, nn.Tanh()), randn(128, 16, seed=0))
    assert_trains_as_eager(eager, rk, steps(lambda k: randn(128, 16, seed=k), 4))
    assert rk.plans_made == 1
    assert_step_in_budget(rk, randn(128, 16, seed=3))


def test_batch_norm_with_a_counter_and_no_averages() -> None:
    norm = nn.BatchNorm1d(8, momentum=None)
    norm.running_mean = norm.running_var = None
    eager, rk = pair(lambda: nn.Sequential(case("mlp").make(), norm, nn.Tanh()), randn(128, 16, seed=0))
    assert_trains_as_eager(eager, rk, steps(lambda k: randn(128, 16, seed=k), 4))
    assert rk.plans_made == 1


@pytest.mark.parametrize(("name", "dtype"), in_turn(["gpt", "tied", "dropout_mlp"], [torch.bfloat16, torch.float16]))
def test_autocast(name: str, dtype: torch.dtype) -> None:
    c = case(name)
    eager = c.model()
    with torch.autocast("cpu", dtype=dtype):
        rk = under_budget(c.model(), *c.call(0)[0])

    def train(model: nn.Module, call: nn.Module) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for k in range(2):
            with torch.autocast("cpu", dtype=dtype):
                loss = square_loss(call(*c.call(k)[0]))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield loss.detach()
            yield scaler.get_scale()

    assert_trains_as_eager(eager, rk, train)

    def one() -> None:
        with torch.autocast("cpu", dtype=dtype):
            out = rk(*args).flatten(0, -2)
            loss = F.cross_entropy(out, target)
        loss.backward()

    args, _ = c.call(2)
    target = torch.zeros(eager(*args).flatten(0, -2).shape[0], dtype=torch.int64)
    assert_in_budget(rk, one)
    assert rk.plans_made == 1


def test_autocast_within_the_model() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = case("mlp").model(), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.inner(x)
            return self.head(h.float())

    eager, rk = pair(Inside, randn(128, 16, seed=0))
    assert_trains_as_eager(eager, rk, steps(lambda k: randn(128, 16, seed=k)))


@pytest.mark.filterwarnings(SEVERAL)
def test_several_calls_in_one_autocast_cast_for_themselves() -> None:
    """Eager casts a weight once for all calls, and adds their gradients before it casts them back; without its cache of
    cast weights it does what we do, bit for bit.
    """
    c = case("mlp")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rk = under_budget(c.model(), *c.call(0)[0])
    rk.budget = 2 * rk.budget  # two calls wait at once

    def grads(call: nn.Module, cached: bool) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
            loss = sum(square_loss(call(*c.call(k)[0])) for k in range(2))
        return list(torch.autograd.grad(loss, list(call.parameters())))

    eager = c.model()
    for cached in (False, True):
        assert_same(grads(rk, cached), grads(eager, cached=False))
    assert not all(map(torch.equal, grads(rk, True), grads(eager, True))), "the README says that these differ"


def test_autocast_without_its_cache_is_another_plan() -> None:
    """A weight used twice in one call is then cast twice, and its gradients are added in float32."""
    c = case("tied")
    eager = c.model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rk = under_budget(c.model(), *c.call(0)[0])

    def train(_: nn.Module, call: nn.Module) -> Any:
        for cached in (True, False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
                out = call(*c.call(1)[0])
            square_loss(out).backward()
            yield from (p.grad.clone() for p in call.parameters() if p.grad is not None)
            call.zero_grad()

    assert_trains_as_eager(eager, rk, train)
    assert rk.plans_made == 2


def test_inputs_changed_before_the_backward_are_an_error() -> None:
    """Never are new values used silently; eager may have kept what it needs and go on."""
    c = case("mlp")
    _, rk = planned(c)
    (x,), _ = c.call(1)
    loss = square_loss(rk(x))
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    _same_after_error(c, rk)


@pytest.mark.parametrize("which", ["0.weight", "4.weight", "8.bias"])
def test_parameters_changed_before_the_backward(which: str) -> None:
    """An error where eager mode has one, and where a second run would read the parameter."""
    c = case("mlp")
    eager, rk = planned(c)
    raised = []
    for call in (eager, rk):
        loss = square_loss(call(*c.call(1)[0]))
        with torch.no_grad():
            call.get_parameter(which).add_(1)
        try:
            loss.backward()
            raised.append(False)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            raised.append(True)
    assert raised[1] or not raised[0]
    if not raised[1]:
        for p, q in zip(eager.parameters(), rk.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def _same_after_error(c: Any, rk: Any) -> None:
    rk.zero_grad()
    assert_trains_as_eager(c.model(), rk, lambda _, call: step(call, c.call(3)[0]))


def test_deterministic_mode() -> None:
    c = case("gpt")
    torch.use_deterministic_algorithms(True)
    try:
        eager, rk = pair(c.model, *c.call(0)[0])
        assert_trains_as_eager(eager, rk, steps(lambda k: c.call(k)[0][0]))
        assert_step_in_budget(rk, *c.call(3)[0])
    finally:
        torch.use_deterministic_algorithms(False)


def test_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        eager, rk = pair(Noisy, x16(0).double(), fraction=0.0)
        assert next(rk.parameters()).dtype == torch.float64
        assert_trains_as_eager(eager, rk, steps(lambda k: x16(k).double()))
        assert_step_in_budget(rk, x16(3).double())
    finally:
        torch.set_default_dtype(torch.float32)


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of low rank (LoRA)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(self.dropout(x)))


def lora() -> nn.Module:
    model = case("gpt").model().requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child.out_features > 64:
                setattr(module, name, LowRank(child))
    return model


def test_low_rank_updates_of_a_frozen_model() -> None:
    """No input and few weights need a gradient."""
    ids = case("gpt").call
    eager, rk = pair(lora, *ids(0)[0])
    assert any(p.requires_grad for p in rk.parameters())
    assert_trains_as_eager(eager, rk, steps(lambda k: ids(k)[0][0]))
    assert_step_in_budget(rk, *ids(3)[0])


class DrawnInPlace(nn.Module):
    """Draws between a result and random changes of it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(x)
            noisy = h * torch.rand_like(h)
            x = x * F.gelu(F.dropout(h, 0.3, inplace=True) + noisy)
        return F.dropout(F.alpha_dropout(x, 0.1, training=True), 0.3, inplace=True)


def test_draws_around_random_changes_in_place() -> None:
    torch.manual_seed(0)
    eager = DrawnInPlace()
    found = frontier(eager, x16(0), costs="flops")
    rk = Rockmate(copy.deepcopy(eager), x16(0), part_way(found, 0.5), costs="flops")
    assert rk.plan.recomputed
    assert_trains_as_eager(eager, rk, steps(x16))
    assert_step_in_budget(rk, x16(3))


class Crops(nn.Module):
    """Takes as much of a tensor as there is, as after an upsampling that may overshoot."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)[..., : x.shape[2], : x.shape[3]]
        result: torch.Tensor = self.last(y)[:, 1:]
        return result


def test_slices_that_take_all_are_none_as_in_eager_mode() -> None:
    """Else their backward lays gradients out anew, and a bias adds them in another order."""
    torch.manual_seed(0)
    model, x = Crops(), torch.randn(8, 4, 33, 33).to(memory_format=torch.channels_last)
    eager, rk = copy.deepcopy(model), Rockmate(model, x, "10 MiB", costs="flops")
    for run in (eager, rk):
        run(x).sin().square().sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])
    taken = [node.args[1:3] for node in rk.plan.graph.s.d.nodes if node.op is torch.ops.aten.slice.Tensor]
    assert taken == [(1, 1)]
