"""Backwards of parts of a graph, one after another, under the least budget and above, against eager mode."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from typing import Any

import pytest
import torch
from against_eager import assert_in_budget, assert_trains_as_eager
from models import part_way, randn, square_loss
from torch import nn
from torch.nn import functional as F

from rockmate import BudgetWarning, Rockmate, frontier, measure_peak


def under(model: nn.Module, x: torch.Tensor, fraction: float = 0.0) -> Rockmate:
    """``model`` under a budget between the least (0) and that of no recomputation (1)."""
    found = frontier(model, x, costs="flops")
    rk = Rockmate(model, x, part_way(found, fraction), costs="flops")
    assert rk.plan.recomputed > 0, "the budget forces nothing"
    return rk


class Branches(nn.Module):
    """Three outputs of one random tensor, whose making autograd saves nothing for: eager mode takes them one by one."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads  # whether the last one's backward reads the random tensor
        self.weight, self.head = nn.Parameter(torch.rand(32, 32)), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        drawn = self.weight + torch.rand_like(self.weight)
        first = second = drawn
        for _ in range(3):
            first = torch.tanh(first.sin().exp() * 0.2) * x
        for _ in range(3):
            second = torch.tanh(second.cos().exp() * 0.2) * x
        return first, self.head(second), drawn.sin() if self.reads else drawn * 2


@pytest.mark.parametrize("fraction", [0.2, 0.3])
@pytest.mark.filterwarnings("ignore:a backward of a part of the graph", "ignore:a backward left outputs out")
def test_one_output_after_the_other_in_any_order(fraction: float) -> None:
    torch.manual_seed(0)
    eager, x = Branches(reads=False), randn(32, 32, seed=0)
    rk = under(copy.deepcopy(eager), x, fraction)
    for order in itertools.permutations(range(3)):

        def train(model: nn.Module, call: nn.Module, order: tuple[int, ...] = order) -> Any:
            model.zero_grad()
            outs = call(x)
            for k in order:
                square_loss(outs[k]).backward()
                yield model.weight.grad.clone()

        assert_trains_as_eager(eager, rk, train)


@pytest.mark.parametrize("used", [(0, 2), (0, 1), (1,)])
def test_an_output_left_out_is_within_the_budget(used: tuple[int, ...]) -> None:
    """What runs again for its part goes where the schedule deletes it; what it would run for others, they run."""
    torch.manual_seed(0)
    x = randn(32, 32, seed=0)
    rk = under(Branches(reads=True), x)

    def train() -> None:
        outs = rk(x)
        square_loss([outs[k] for k in used]).backward()

    assert_in_budget(rk, train)


class Recurring(nn.Module):
    """One layer applied again and again; three outputs of its last result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.layer, self.norm = nn.Linear(16, 32), nn.Linear(32, 32), nn.BatchNorm1d(32)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.up(x)
        for _ in range(4):
            h = h + F.gelu(self.norm(self.layer(h)))
        return self.down(h), h.mean(0), torch.softmax(h, -1)


def test_a_second_backward_under_autocast() -> None:
    """What it computes again is computed as in the forward, whatever the first backward ran under."""
    torch.manual_seed(0)
    eager, x = Recurring(), randn(32, 16, seed=0)
    rk = under(copy.deepcopy(eager), x)

    def train(model: nn.Module, call: nn.Module) -> Any:
        outs = call(x)
        for first, second in itertools.permutations(outs, 2):
            first.backward(torch.ones_like(first), retain_graph=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                second.backward(torch.ones_like(second), retain_graph=True)
            yield model.up.weight.grad.clone()

    with pytest.warns(BudgetWarning, match="memory budget"):
        assert_trains_as_eager(eager, rk, train)


def test_a_spent_graph_gets_the_error_of_autograd() -> None:
    """Also where nothing behind the outputs was saved, so that the first to be asked is the schedule."""
    torch.manual_seed(0)
    x = randn(32, 16, seed=0)
    for fraction in (0.0, 0.3):
        rk = under(Recurring(), x, fraction)
        total = sum(out.sum() for out in rk(x))
        total.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            total.backward()


class Tangle(nn.Module):
    """Random operations on random earlier values, some of them drawing; some values are the outputs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chosen = random.Random(seed)
        self.weights = nn.ParameterList([nn.Parameter(torch.rand(1 << 8)) for _ in range(3)])
        self.steps: list[tuple[str, int, int]] = []
        for made in range(3, 3 + chosen.randrange(6, 22)):
            name = chosen.choice(("sin", "cos", "tanh", "dropout", "rand", "mul", "mul", "add", "turned"))
            self.steps.append((name, chosen.randrange(max(0, made - 5), made), chosen.randrange(made)))
        last = made
        self.outputs = sorted({last, *(chosen.randrange(3, last + 1) for _ in range(chosen.randrange(1, 4)))})

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, third = self.weights
        values = [first * x, second + x, third.sin()]
        for name, i, j in self.steps:
            a, b = values[i], values[j]
            if name in ("sin", "cos", "tanh"):
                values.append(getattr(torch, name)(a))
            elif name == "dropout":
                values.append(F.dropout(a, 0.3))
            elif name == "rand":
                values.append(a + torch.rand_like(a))
            elif name == "turned":
                values.append(a.view(16, 16).t().reshape(-1))
            else:
                values.append(a * b if name == "mul" else a + b)
        return tuple(values[k] for k in self.outputs)


@pytest.mark.parametrize("seed", range(10, 20))
@pytest.mark.filterwarnings("ignore:a backward of a part of the graph", "ignore:a backward left outputs out")
def test_no_order_of_backwards_fails_that_eager_mode_has(seed: int) -> None:
    """Without retain_graph eager mode refuses many; then there is an error here too, and never another gradient."""
    torch.manual_seed(seed)
    model, x = Tangle(seed), torch.rand(1 << 8)
    found = frontier(model, x, costs="flops")
    rk = Rockmate(model, x, found.min_budget, costs="flops")

    def gradients(call: nn.Module, order: tuple[int, ...]) -> list[list[torch.Tensor | None] | None]:
        model.zero_grad()
        torch.manual_seed(1)
        outputs, grads = call(x), []
        for k in order:
            try:
                outputs[k].sum().backward()
            except RuntimeError as error:
                assert any(words in str(error) for words in ("second time", "must run again", "does not require"))
                return [*grads, None]
            grads.append([None if w.grad is None else w.grad.clone() for w in model.weights])
        return grads

    for fraction in (0.0, 0.3):
        rk.budget = part_way(found, fraction)
        for order in itertools.permutations(range(len(model.outputs))):
            for theirs, ours in zip(gradients(model, order), gradients(rk, order), strict=True):
                assert (theirs is None) == (ours is None)
                for a, b in zip(theirs or (), ours or (), strict=True):
                    assert a is b is None or torch.equal(a, b)


class EarlyAndLate(nn.Module):
    """An output of the middle and one of the end."""

    def __init__(self, before: int, behind: int) -> None:
        super().__init__()
        self.before, self.behind = (
            nn.Sequential(*(m for _ in range(n) for m in (nn.Linear(32, 32), nn.Tanh(), nn.GELU())))
            for n in (before, behind)
        )
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = self.before(x)
        return self.head(middle), self.behind(middle)


@pytest.mark.parametrize(("before", "behind"), [(3, 3), (3, 1), (2, 2)])
def test_what_left_out_outputs_take_beyond_the_budget_is_said(before: int, behind: int) -> None:
    """The forward has kept something for them, which autograd holds: only a warning can tell."""
    torch.manual_seed(0)
    x = randn(64, 32, seed=0)
    found = frontier(EarlyAndLate(before, behind), x, costs="flops")
    over, may, said = set(), set(), set()
    for fraction in (0.0, 0.3, 0.6):
        rk = Rockmate(EarlyAndLate(before, behind), x, part_way(found, fraction), costs="flops")
        kept = sum(t.nbytes for t in rk.original(x))  # as a loss may, which this one does not
        for used in ((0,), (1,), (0, 1)):

            def train(rk: Rockmate = rk, used: tuple[int, ...] = used) -> None:
                outputs = rk(x)
                sum(outputs[k].sum() for k in used).backward()

            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                peak = measure_peak(train)
            if any(isinstance(w.message, BudgetWarning) for w in caught):
                said.add((fraction, used))
            if peak > rk.budget:
                over.add((fraction, used))
            if peak + kept > rk.budget and len(used) == 1:
                may.add((fraction, used))
    assert over <= may <= said
    assert all(used != (0, 1) for _, used in said)
    if (before, behind) == (3, 3):
        assert 0 < len(said) < 6  # of those that leave one out, not all


class Heads(nn.Module):
    """Two outputs of one ReLU in place, whose result both heads' backwards read, and its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 512, bias=False), nn.BatchNorm1d(512)
        self.first, self.second = nn.Linear(512, 2), nn.Linear(512, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.relu(self.norm(self.up(x)), inplace=True)
        return self.first(h), self.second(h)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_what_a_left_out_head_holds_does_not_go_in_the_backward_below(used: tuple[int, ...]) -> None:
    """Then the node's own result stays while its backward goes on, which the peak supposes to go."""
    torch.manual_seed(0)
    x = randn(256, 8, seed=0)
    rk = Rockmate(Heads(), x, frontier(Heads(), x, costs="flops").min_budget, costs="flops")

    def train() -> None:
        rk.zero_grad()
        outputs = rk(x)
        sum(outputs[k].sum() for k in used).backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
        peak = measure_peak(train)
    said = any(isinstance(w.message, BudgetWarning) for w in caught)
    assert (peak > rk.budget) == said == (len(used) == 1)
