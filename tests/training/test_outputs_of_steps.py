"""What a followed step does with outputs: it drops some, and computes its loss inside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import randn
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from rockmate import attach, measure_peak
from rockmate.follow.plan import FollowedPlan

WIDTH, CLASSES = 32, 1024


class Layer(nn.Module):
    """It returns keys, too, as layers with a cache do."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self.keys(x)
        return x + self.down(F.gelu(self.up(keys.sigmoid()))), keys


class Head(nn.Module):
    """It returns the loss and the scores that this is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.scores(x)
        loss = F.cross_entropy(scores.view(-1, CLASSES), torch.zeros(len(x), dtype=torch.long))
        return loss, scores


class Tagger(nn.Module):
    """Layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(4)), Head()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache = []
        for layer in self.layers:
            x, keys = layer(x)
            cache.append(keys)
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        loss, scores = self.head(x)
        return loss, scores


def trained(model: nn.Module, x: torch.Tensor) -> StorageWeakRef:
    """One step, whose scores nobody reads; their memory."""
    loss, scores = model(x)
    memory = StorageWeakRef(scores.untyped_storage())
    del scores
    loss.backward()
    model.zero_grad()
    return memory


@pytest.mark.parametrize("share", ["90%", "80%"])
def test_outputs_that_nobody_reads_are_not_counted(share: str) -> None:
    """Neither their memory once the step has let them go, nor gradients of scores whose loss is in the graph."""
    x = randn(512, WIDTH, seed=0)
    torch.manual_seed(0)
    model = Tagger()
    trained(model, x)
    eager = measure_peak(lambda: trained(model, x), "cpu")
    handle = attach(model, share, costs="flops")
    for _ in range(3):
        trained(model, x)
    plan = handle.plan
    assert isinstance(plan, FollowedPlan)
    assert plan.recomputed
    labels = 8 * len(x)  # counted until the backward of the loss is over
    assert eager <= plan.eager_peak <= eager + labels
    measured = measure_peak(lambda: trained(model, x), "cpu")
    assert measured <= plan.predicted_peak <= measured + labels


def test_what_a_loss_runs_again_from_goes_with_the_backward_of_its_graph() -> None:
    model = Tagger()
    attach(model, "80%", costs="flops")
    loss, scores = model(randn(512, WIDTH, seed=0))  # the first step has the least memory: the loss runs again
    memory = StorageWeakRef(scores.untyped_storage())
    del scores
    gone: list[bool] = []
    next(model.parameters()).register_hook(lambda _: gone.append(memory.expired()))  # the first layer's
    loss.backward()
    assert gone == [True]


@pytest.mark.parametrize("odd", ["scores are kept", "scores are regularized"])
def test_steps_that_use_outputs_now_and_then_are_observed(odd: str) -> None:
    """A plan counts on what the steps so far did. One that does more is noticed, and from some on planned for."""
    x = randn(512, WIDTH, seed=0)
    torch.manual_seed(0)
    model = Tagger()
    kept: list[torch.Tensor] = []

    def step(number: int) -> None:
        loss, scores = model(x)
        if number % 4 == 3:
            kept[:] = [scores.detach()] if odd == "scores are kept" else []
            loss = loss + (0 if kept else scores.square().mean())
        del scores
        loss.backward()
        kept.clear()
        model.zero_grad()

    handle = attach(model, "90%", costs="flops")
    for number in range(24):
        step(number)
    plan = handle.plan
    assert isinstance(plan, FollowedPlan)
    for number in (2, 3):
        assert measure_peak(lambda number=number: step(number), "cpu") <= plan.budget  # type: ignore[misc]
    assert measure_peak(lambda: step(3), "cpu") > measure_peak(lambda: step(2), "cpu")


class TwoHeads(nn.Module):
    """One head is in the graph of the trunk, the other behind the value that Python reads."""

    def __init__(self) -> None:
        super().__init__()
        layers = (m for k in range(4) for m in (nn.Linear(24 if k == 0 else 128, 128), nn.Tanh()))
        self.trunk, self.policy, self.value, self.largest = (
            nn.Sequential(*layers),
            nn.Linear(128, 4),
            nn.Linear(128, 1),
            0,
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(x)
        policy = self.policy(h)
        self.largest = policy.detach().max().item()
        return policy, self.value(h)


def test_a_gradient_that_waits_for_another_is_counted_once() -> None:
    """That of what both heads read: it is there when the backward comes to the first output of the graph."""
    torch.manual_seed(0)
    model, x = TwoHeads(), randn(1792, 24, seed=0)

    def step() -> None:
        sum(y.mean() for y in model(x)).backward()
        model.zero_grad()

    step()
    eager = measure_peak(step)
    handle = attach(model, int(0.95 * eager), costs="flops")
    for _ in range(5):
        step()
    measured, half_an_activation = measure_peak(step), 1792 * 128 * 2
    assert handle.plan is not None
    assert measured <= handle.plan.predicted_peak < measured + half_an_activation
    handle.budget = int(0.75 * eager)
    step()
    assert measure_peak(step) <= handle.budget
