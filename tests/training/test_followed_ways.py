"""Ways of a followed forward that alternate, or change: each step takes what its own plan says."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from followed_steps import Steps
from models import randn
from torch import nn
from torch.nn import functional as F

import rockmate
import rockmate.follow.solving
from rkgb.device import kind_of
from rockmate import measure_peak

X = randn(48, 8, seed=0)
NUMBERS = kind_of(torch.device("cpu")).scalars
"""Bytes of the numbers of the loss itself, which a prediction leaves out."""


class Ways(nn.Module):
    """Computes in one of two ways. A generator of its own is what no capture carries."""

    def __init__(self) -> None:
        super().__init__()
        self.way, self.generator = 0, torch.Generator()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("scale", torch.zeros(8))


class Noise(Ways):
    """Only one of its ways reads a layer's result, which is made of random numbers, in the backward."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.inner(F.gelu(self.inner(x + torch.randn(8, generator=self.generator))))
        z = y * self.scale
        if self.way:
            z = z * z
        return (torch.lerp(z, y, 0.25),)


class Lives(Ways):
    """One of its ways saves what lives, and the other does not; they part before it is saved."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.rand(1, generator=self.generator)
        y = self.inner(x)
        z = x.cos() if self.way else x.sin()
        z += y.sin() if self.way else y * 2
        return (torch.cat([z + y] * 8),)


class Deep(Ways):
    """Its ways part in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(1, generator=self.generator)
        for k in range(12):
            x = F.gelu(self.inner(x)).sin() if k < 6 or self.way else F.silu(self.inner(x)).cos()
        return x


class Sorted(Ways):
    """Data are written by indices, which a plan lets go, since it holds the data; then the ways part."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.rand(1, generator=self.generator)
        with torch.no_grad():
            y = self.inner(F.gelu(self.inner(x)))
        y.scatter_(-1, y.argsort(-1), -0.5)
        if self.way:
            self.scale = 0.9 * self.scale + 0.1 * x.mean()
        sums = z = y @ y.transpose(-1, -2)
        for _ in range(3):
            z = F.gelu(self.inner(z))
        for _ in range(2):
            sums = torch.addcmul(sums, sums, z, value=0.5)
        return (torch.cat([sums, F.scaled_dot_product_attention(z, z, y, dropout_p=0.2)]),)


class Meant(Ways):
    """A mean of data is written into them. One of its ways reads these in the backward, the other does not."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.rand(1, generator=self.generator)
        y = x.cos() * self.inner.bias
        y.select(-1, 0).copy_(y.mean(-1))
        return (torch.tanh(self.inner(y)) @ self.inner.weight if self.way else y,)


class Dropped(Ways):
    """Draws masks. Its largest gradients come when the last saved tensor has been read."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.rand(1, generator=self.generator)
        y = self.inner.weight.expand(48, 8, 8).clone().neg_().neg_().sum(-1) + x * self.inner.bias
        for _ in range(3):
            y = F.dropout(y, 0.3)
        return (y.sin() if self.way else y,)


class Counted(Ways):
    """Its ways take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(8, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.way += 1
        y = self.inner(F.gelu(self.inner(x))) if self.way % 2 else x
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = self.layer(y.detach().softmax(-1) * y)[0]
        return found


class Sums(Steps):
    """The loss reads the first result."""

    def run(self) -> None:
        self.loss = self.model(self.x)[0].sum()
        self.loss.backward()


def over(make: type[Ways], ways: list[int], budget: int | str, x: torch.Tensor = X) -> list[int]:
    """Steps that compute in these ways, with eager mode's results: by how much the last four are above their plans."""
    eager, ours = Sums(make, x), Sums(make, x)
    torch.manual_seed(1)
    for way in ways:
        eager.model.way = way  # type: ignore[assignment]
        eager.step()
    handle = rockmate.attach(ours.model, budget, costs="flops", cache=False)
    torch.manual_seed(1)
    found = []
    for k, way in enumerate(ways):
        ours.model.way = way  # type: ignore[assignment]
        peak = ours.step(measured=k >= len(ways) - 4)
        if peak:
            assert handle.plan is not None
            found.append(peak - handle.plan.predicted_peak)
    assert not ours.differ(eager)
    return found


@pytest.mark.parametrize("budget", [7720, 9000, 10500, 12000])
def test_ways_that_alternate_begin_under_their_own_plans(budget: int) -> None:
    assert max(over(Noise, [0, 1] * 6, budget)) <= NUMBERS


def test_a_way_that_takes_over_is_planned_for_the_budget_of_now() -> None:
    """Its plan was for the budget of before, which it took."""
    steps = Steps(Deep, X)
    handle = rockmate.attach(steps.model, "100%", costs="flops", cache=False)
    for way in [0, 1] * 2 + [1] * 4:
        steps.model.way = way  # type: ignore[assignment]
        steps.step()
    handle.budget = "80%"
    steps.model.way = 0  # type: ignore[assignment]
    assert steps.step(measured=True) <= handle.budget + NUMBERS  # type: ignore[operator]


@pytest.mark.parametrize("budget", [9000, 10500, 12000])
def test_a_way_computes_with_what_another_one_holds_which_let_random_numbers_go(budget: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rockmate.BudgetWarning)
        over(Noise, [0, 1] * 4 + [0, 0, 0, 0, 1, 1, 1, 0], budget)


@pytest.mark.parametrize("last", [[0, 0, 0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 1]])
def test_a_way_that_takes_over_holds_what_lives_and_no_copy(last: list[int]) -> None:
    assert max(over(Lives, [0, 1] * 4 + last, "100%")) <= NUMBERS


@pytest.mark.parametrize("budget", [15000, 18000, 24000, 28000])
def test_a_way_that_comes_first_keeps_what_a_plan_has_left_nothing_to_make_it_of(budget: int) -> None:
    """It raised an error in the second step."""
    assert max(over(Sorted, [1, 0] * 5, budget, randn(6, 8, 8, seed=0))) <= NUMBERS


@pytest.mark.parametrize("budget", [6000, 7000])
def test_a_way_that_misses_what_its_plan_holds_is_decided_as_it_takes_place(budget: int) -> None:
    """What was to be made of it could not be made, and the backward raised an error. Plans follow from times that were
    measured: not each of them comes to that, and warns.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rockmate.BudgetWarning)
        above = over(Meant, [0, 1] * 4 + [0, 0, 1, 1, 1, 1], budget)
    assert max(above[1:]) <= NUMBERS


def test_random_numbers_that_nothing_needs_any_more_are_no_gradients() -> None:
    """The first step held them to the end of the backward; its plan was below later steps by that."""
    assert max(over(Dropped, [0] * 6, "100%")) <= NUMBERS


def test_ways_that_were_rehearsed_are_observed_in_training() -> None:
    """A loss may take more than the rehearsed one."""
    model, x = Counted(), randn(6, 8, 8, seed=0)
    rk = rockmate.Rockmate(model, x, 28816, costs="flops", cache=False)

    def step() -> None:
        found = rk(x)
        found.float().sum().backward()

    for _ in range(8):
        step()
        model.zero_grad()
    for _ in range(2):
        peak = measure_peak(step, "cpu")
        assert peak <= rk.plan.predicted_peak + NUMBERS
        model.zero_grad()


def test_a_way_that_is_never_planned_since_its_graph_is_retained_is_warned_of() -> None:
    """Another way of the same call has a plan."""
    model = Lives()
    rockmate.attach(model, "100%", costs="flops", cache=False)

    def step(way: int) -> None:
        model.way = way
        loss = model(X)[0].sum()
        if way:
            loss.backward(retain_graph=True)
        loss.backward()

    for _ in range(3):
        step(0)
    with pytest.warns(rockmate.BudgetWarning, match="retain_graph"):
        step(1)


class Retried(Ways):
    """One of its ways lets what it computed go, and computes it again; the other one reads it in the backward."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = F.dropout(F.gelu(self.inner(x)), 0.3) + 0.1 * torch.randn(8, generator=self.generator)
        return x

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.body(x)
        try:
            if self.way:
                raise ValueError
        except ValueError:
            del y
            y = self.body(x) * 7
        return (y.sin() / 400,)


@pytest.mark.parametrize("budget", ["100%", 20_000])
@pytest.mark.parametrize("ways", [[1, 1, 1, 0, 1, 0, 0, 1], [1, 0] * 4, [0, 0, 1, 1, 0, 1]])
def test_a_way_that_comes_later_reads_random_numbers_that_the_first_one_lets_go(
    ways: list[int], budget: int | str
) -> None:
    """The backward raised an error: they were gone within the forward."""
    eager, ours = Sums(Retried, X), Sums(Retried, X)
    handle = rockmate.attach(ours.model, budget, costs="flops", cache=False)
    for steps in (eager, ours):
        torch.manual_seed(1)
        for way in ways:
            steps.model.way = way  # type: ignore[assignment]
            steps.step()
    assert not ours.differ(eager)
    for way in (0, 1, 0, 1):
        ours.model.way = way  # type: ignore[assignment]
        ours.step()
    for way in (0, 1):
        ours.model.way = way  # type: ignore[assignment]
        assert ours.step(measured=True) <= handle.budget + NUMBERS  # type: ignore[operator]


class Derived(Ways):
    """Random numbers are saved for what nobody reads, which lets them go, and again for a derivative within forward."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.rand(1, generator=self.generator)
        y = F.rrelu(self.inner(x), training=True)
        assert y.isfinite().all()
        z = y.detach().requires_grad_()
        return ((torch.autograd.grad((z.sin() * z).sum(), z)[0] * y).sin(),)


@pytest.mark.parametrize("budget", ["100%", "80%"])
def test_random_numbers_that_are_saved_again_after_they_were_let_go_are_there(budget: str) -> None:
    """The derivative raised an error."""
    eager, ours = Sums(Derived, X), Sums(Derived, X)
    handle = rockmate.attach(ours.model, budget, costs="flops", cache=False, on_infeasible="least")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rockmate.BudgetWarning)
        for steps in (eager, ours):
            torch.manual_seed(1)
            for _ in range(4):
                steps.step()
    assert not ours.differ(eager)
    assert handle.plan is not None
    assert ours.step(measured=True) <= handle.plan.predicted_peak + NUMBERS


class Drops(Ways):
    """Layers whose parameters take more than their results, of which some are random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(1, generator=self.generator)
        for layer in self.layers:
            x = F.dropout(F.relu(layer(x)), 0.5)
        return x


def test_a_step_under_a_large_budget_lets_random_numbers_go_as_the_backward_does() -> None:
    model, x = Drops(), randn(32, 64, seed=0)
    eager = measure_peak(lambda: model(x).sum().backward())
    model.zero_grad()
    rockmate.attach(model, 16 * eager, cache=False)
    assert measure_peak(lambda: model(x).sum().backward()) <= eager


class Chosen(nn.Module):
    """Two experts: for the rows whose first number is positive, and for the others."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleList(nn.Linear(32, 32) for _ in range(6)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for expert, chosen in zip(self.experts, (x[:, 0] > 0, x[:, 0] <= 0), strict=True):
            rows = torch.where(chosen)[0]
            z = x[rows]
            for layer in expert:
                z = F.gelu(layer(z)).sin()
            y = y.index_add(0, rows, z)
        return y


def test_sizes_that_follow_from_values_take_over_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What experts compute is the same, whatever the numbers of their rows."""
    searched: list[int] = []
    find = rockmate.follow.solving.find

    def counted(problem: Any, budget: int, *rest: Any) -> Any:
        searched.append(budget)
        return find(problem, budget, *rest)

    monkeypatch.setattr(rockmate.follow.solving, "find", counted)
    torch.manual_seed(0)
    model = Chosen()

    def step(rows: int) -> None:
        x = randn(512, 32, seed=1)
        x[:, 0] = torch.where(torch.arange(512) < rows, x[:, 0].abs(), -x[:, 0].abs())
        model.zero_grad()
        model(x).square().sum().backward()

    handle = rockmate.attach(model, "75%", costs="flops", cache=False)
    chosen = (256, 240, 270, 250, 262, 244)
    for rows in chosen:
        step(rows)
    assert 0 < len(searched) < len(chosen) / 2
    assert measure_peak(lambda: step(262)) <= handle.budget


class Numbered(Ways):
    """A number decides which layer's result is bent."""

    def forward(self, x: torch.Tensor, at: int = 0) -> torch.Tensor:
        torch.rand(1, generator=self.generator)
        for k in range(5):
            x = F.gelu(self.inner(x))
            x = x.sin() if k == at else x
        return x


@pytest.mark.parametrize("what", ["sizes", "numbers"])
def test_the_line_of_many_plans_blames_what_changed(what: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rockmate")
    model = Numbered()
    rockmate.attach(model, 2**14, costs="flops", cache=False, on_infeasible="least")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(5):
            model(X[: 48 - 8 * k] if what == "sizes" else X, 0 if what == "sizes" else k).sum().backward()
            model.zero_grad()
    said = [line for line in caplog.messages if "This is plan" in line]
    assert said
    assert all(("Pad inputs" in line) == (what == "sizes") for line in said)
    assert all(("decides by numbers" in line) == (what == "numbers") for line in said)
