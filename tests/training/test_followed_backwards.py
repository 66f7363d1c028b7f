"""Followed steps whose backward, or whose forward, is not the one that was observed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from against_eager import WAYS, assert_same, planned_by, snapshot
from models import in_turn, pairs, randn
from torch import nn
from torch.nn import functional as F

from rkgb.device.kind import Moment
from rockmate import BudgetWarning, InfeasibleBudgetError, InputError, Rockmate, attach, measure_peak
from rockmate.follow.observed import Mark, Seen
from rockmate.follow.problem import problem_of
from solvers import InfeasibleError

WIDTH = 64
Loss = Callable[[Any], torch.Tensor]


class Branches(nn.Module):
    """A trunk whose graph breaks, and two branches with masks that cannot be drawn again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for k in range(4):
            x = F.gelu(self.layers[k](x)).sin()
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        a = b = x
        for k in (4, 5):
            a = F.dropout(F.gelu(self.layers[k](a)), 0.1)
        for k in (6, 7):
            b = F.dropout(F.gelu(self.layers[k](b)), 0.1)
        return a, b


def first(found: Any) -> torch.Tensor:
    return found[0].square().mean()  # type: ignore[no-any-return]


def second(found: Any) -> torch.Tensor:
    return found[1].square().mean()  # type: ignore[no-any-return]


def both(found: Any) -> torch.Tensor:
    return (found[0] * found[1]).square().mean()  # type: ignore[no-any-return]


def neither(found: Any) -> torch.Tensor:
    return found[0].detach().sum()  # type: ignore[no-any-return]


def trained(model: nn.Module, losses: list[Loss]) -> Iterator[Any]:
    torch.manual_seed(3)
    x = randn(256, WIDTH, seed=0)
    for loss in losses:
        model.zero_grad()
        value = loss(model(x))
        if value.requires_grad:
            value.backward()
        yield value.detach().clone()
        yield from snapshot(model)


LOSSES = {
    "the first": [first] * 3 + [second, both, first],
    "both": [both] * 3 + [first, second, neither, both],
    "the second": [second] * 3 + [neither, first, both],
    "each in turn": [first, second, both, neither] * 2,
}


@pytest.mark.parametrize(("name", "budget", "way"), pairs(LOSSES, ["70%", "100%"], WAYS))
def test_losses_that_read_other_outputs(name: str, budget: str, way: str) -> None:
    losses, eager = LOSSES[name], Branches()
    model, handle = planned_by(way, copy.deepcopy(eager), budget, randn(256, WIDTH, seed=0))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=BudgetWarning)
        assert_same([*trained(model, losses)], [*trained(eager, losses)])
    assert handle.plan is not None


def test_no_schedule_serves_a_loss_whose_backward_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: Any) -> Any:
        raise InfeasibleError("no schedule fits", 10**9, "", None)

    model, x = Branches(), randn(256, WIDTH, seed=0)
    attach(model, "100%", costs="flops", cache=False)
    for _ in range(2):
        model.zero_grad()
        first(model(x)).backward()
    monkeypatch.setattr("rockmate.follow.solving.find", ended)
    with pytest.raises(InfeasibleBudgetError):
        for _ in range(3):
            model.zero_grad()
            both(model(x)).backward()


def test_memory_that_goes_between_two_reads_does_not_hide_what_was_allocated_before() -> None:
    what = [("begin", 0), ("end", 0), ("asked", 0), ("answered", 0), ("gone", 8), ("asked", 1), ("answered", 1)]
    peaks = (0, 0, 0, 1000, 0, 0, 500, 0)
    seen = Seen(marks=[Mark(*mark, 0, 0) for mark in [*what, ("over", 0)]])
    for mark, peak in zip(seen.marks, peaks, strict=True):
        mark.moment = Moment(0, peak)
    steps = [node.backward for node in problem_of([], [], seen).problem.nodes]
    assert [step.peak for step in steps if step] == [500, 1000]


class Returning(nn.Module):
    """Returns what is between its layers, which no operation of autograd has saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        found = []
        for layer in self.layers:
            h = layer(x)
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
            found.append(h)
            x = (F.gelu(h * 2) * 3).sin()
        return x, found


@pytest.mark.parametrize("budget", ["40%", "60%"])
def test_outputs_that_are_changed_before_the_backward(budget: str) -> None:
    """As in plans of one graph: the error of eager mode, also where a second run alone reads the output."""
    model = Returning()
    attach(model, budget, costs="flops", cache=False, on_infeasible="least")
    x = randn(256, WIDTH, seed=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=BudgetWarning)
        for _ in range(3):
            model(x)[0].sum().backward()
    y, found = model(x)
    with torch.no_grad():
        for h in found:
            h.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: a tensor of shape \[256, 64\]"):
        y.sum().backward()


class Alternating(nn.Module):
    """Computes something else in every other call, and keeps what it has computed."""

    def __init__(self, ways: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.count, self.ways, self.last = 0, ways, torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = F.gelu(layer(x)).tanh()
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
            if k == 3 and self.count % self.ways:
                x = F.dropout(x.sin() if self.count % self.ways == 1 else x.cos().exp(), 0.1)
                self.last = x
        self.count += 1
        return x


def last(found: torch.Tensor) -> torch.Tensor:
    return found.square().mean()


def test_a_call_that_computes_something_new_has_no_plan() -> None:
    x = randn(256, WIDTH, seed=0)
    rk = Rockmate(Alternating(2), x, "80%", costs="flops", cache=False)
    rk(x).sum().backward()
    assert rk.plan.recomputed
    rk(x)
    with pytest.raises(InputError, match="the last call has no plan: it computed something new"):
        rk.plan  # noqa: B018 - asking raises


@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize("share", [0.5, 0.75])
def test_ways_that_alternate_are_all_planned(ways: int, share: float) -> None:
    eager = Alternating(ways)
    x = randn(256, WIDTH, seed=0)

    def step(model: nn.Module) -> None:
        last(model(x)).backward()
        model.zero_grad()

    unplanned = copy.deepcopy(eager)
    budget = int(share * max(measure_peak(lambda: step(unplanned), "cpu") for _ in range(ways)))
    model = copy.deepcopy(eager)
    handle = attach(model, budget, costs="flops", cache=False, on_infeasible="least")
    steps = [last] * (4 * ways)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=BudgetWarning)
        assert_same([*trained(model, steps)], [*trained(eager, steps)])
    plans = {id(call.plan) for call in handle.plans}
    assert len(plans) == ways
    for _ in range(2 * ways):
        peak = measure_peak(lambda: step(model), "cpu")
        assert handle.plan is not None
        # Until it is seen which way a call goes, it follows the plan of another one, and may take less than its own.
        assert peak <= min(budget, handle.plan.predicted_peak + 64)


class Normalised(nn.Module):
    """Its graph breaks before a batch norm, whose backward asks for several saved tensors one after another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        layers = (m for _ in range(count) for m in (nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU()))
        self.layers, self.last = nn.Sequential(*layers), nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().sum()) > 1e9:
            x = -x
        return self.last(self.layers(x))


@pytest.mark.parametrize(("share", "count"), [*in_turn(["50%", "70%", "80%", "100%"], [1, 4]), ("70%", 1), ("50%", 4)])
def test_what_one_node_of_autograd_asks_for_in_turn_is_there_at_once(count: int, share: str) -> None:
    torch.manual_seed(0)
    model, x = Normalised(count), randn(64, 48, seed=0)
    try:
        handle = attach(model, share, sample=x, costs="flops", cache=False)
    except InfeasibleBudgetError as error:
        handle = attach(model, error.min_budget, sample=x, costs="flops", cache=False)
    for _ in range(3):
        model.zero_grad()
        assert measure_peak(lambda: model(x).sum().backward(), "cpu") <= handle.budget


class Watched(nn.Module):
    """Its graph breaks before a norm, whose results are written in place after others were computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().sum()) > 1e9:
            x = -x
        x = self.norm(2 * x)
        x += 1
        seen = [x.detach().sin().cos() for _ in range(4)]
        del seen
        return torch.relu_(x)


def peak_when_held(model: nn.Module, steps: int) -> int:
    """The peak of the last step, whose caller holds what forward returned."""
    x, held = randn(2, 2048, seed=0), list[torch.Tensor]()

    def step() -> None:
        model.zero_grad(set_to_none=False)
        held[:] = [model(x)]
        held[0].mean().backward()

    for _ in range(steps):
        step()
    held.clear()
    return measure_peak(step, "cpu")


def test_what_nothing_is_made_from_any_more_is_not_made_where_its_source_is_written() -> None:
    eager, model = peak_when_held(Watched(), 1), Watched()
    handle = attach(model, "100%", costs="flops", cache=False)
    assert peak_when_held(model, 3) == eager
    assert handle.plan is not None
    assert handle.plan.predicted_peak == eager


def test_copies_of_running_statistics_count_where_a_norm_runs_again() -> None:
    model = Watched()
    handle = attach(model, "98%", costs="flops", cache=False)
    peak = peak_when_held(model, 3)
    assert handle.plan is not None
    assert handle.plan.recomputed
    assert peak <= handle.plan.predicted_peak <= handle.budget


@pytest.mark.parametrize(("budget", "refused"), [("3.2 MiB", "70%"), ("85%", "2 KiB")])
def test_a_budget_that_is_refused_leaves_the_one_before(budget: str, refused: str) -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
                if float(x.detach().sum()) < -1e9:
                    x = x * 2
            return x

    def steps(model: nn.Module, rows: int) -> None:
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            model(torch.randn(rows, 256, generator=torch.Generator().manual_seed(0))).sum().backward()

    found = []
    for tries in (False, True):
        torch.manual_seed(0)
        model = Decides()
        handle = attach(model, budget, costs="flops", cache=False)
        steps(model, 512)
        if tries:
            with pytest.raises(InfeasibleBudgetError):
                handle.budget = refused
        try:
            steps(model, 2048)
            found.append((handle.budget, ""))
        except InfeasibleBudgetError:
            found.append((handle.budget, "refused"))
    assert found[0] == found[1]
