"""Whole training loops: optimizers, averages of weights, resuming, a thousand steps."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from against_eager import assert_same, assert_trains_as_eager, planned, snapshot
from models import case, randn, square_loss
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rkgb.cost.memory import measure_memory
from rockmate import Rockmate

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    c = case("gpt")
    eager, rk = planned(c)

    def train(_: nn.Module, call: nn.Module) -> Any:
        optimizer = OPTIMIZERS[name](list(call.parameters()))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
        for k in range(3):
            square_loss(call(*c.call(k)[0])).backward()
            yield torch.nn.utils.clip_grad_norm_(call.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=k == 0)

    assert_trains_as_eager(eager, rk, train)


def test_lbfgs() -> None:
    """An optimizer that calls the model several times a step."""
    c = case("mlp")
    eager, rk = planned(c)

    def train(_: nn.Module, call: nn.Module) -> Any:
        optimizer = torch.optim.LBFGS(call.parameters(), max_iter=4)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = square_loss(call(*c.call(1)[0]))
            loss.backward()
            return loss

        yield optimizer.step(closure).detach()

    assert_trains_as_eager(eager, rk, train)


@pytest.mark.parametrize("of", ["the model", "the Rockmate"])
def test_moving_average_of_weights(of: str) -> None:
    c = case("gpt")
    eager, rk = planned(c)

    def train(model: nn.Module, call: nn.Module) -> Any:
        average = AveragedModel(
            model if of == "the model" else call, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        optimizer = torch.optim.SGD(call.parameters(), lr=0.1)
        for k in range(2):
            square_loss(call(*c.call(k)[0])).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(call)
        yield from average.parameters()
        yield average.eval()(*c.call(3)[0]).detach()
        yield square_loss(average.train()(*c.call(3)[0])).detach()

    assert_trains_as_eager(eager, rk, train)


def test_resuming_gives_the_same_losses(tmp_path: Path) -> None:
    """Saved after three steps by one process' model, resumed by another's, against six steps of eager mode."""
    c = case("gpt")
    eager, rk = planned(c)

    def losses(call: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
        found = []
        for k in steps:
            loss = square_loss(call(*c.call(k)[0]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    def adam(call: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(call.parameters(), lr=0.01)

    torch.manual_seed(1)
    expected = losses(eager, adam(eager), range(6))
    torch.manual_seed(1)
    optimizer = adam(rk)
    first = losses(rk, optimizer, range(3))
    state = {"model": rk.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    torch.save(state, tmp_path / "checkpoint.pt")
    rk.plan.save(tmp_path / "plan.json")
    del rk, optimizer
    torch.rand(7)
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    other = Rockmate(c.make(), c.call(0)[0], plan=tmp_path / "plan.json")
    other.load_state_dict(loaded["model"])
    optimizer = adam(other)
    optimizer.load_state_dict(loaded["optimizer"])
    torch.set_rng_state(loaded["random"])
    assert_same([*first, *losses(other, optimizer, range(3, 6))], expected)
    assert_same(other.parameters(), eager.parameters())


def test_a_thousand_steps() -> None:
    """At 40 % of eager's peak: equal to eager to the end, no growth, and the last peak is that of the second step."""
    torch.manual_seed(0)
    layers = [m for _ in range(7) for m in (nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1))]
    eager, x = nn.Sequential(*layers, nn.Linear(16, 4)), randn(256, 16, seed=0)
    target = torch.zeros(256, dtype=torch.int64)
    cpu = torch.device("cpu")
    peaks: dict[str, list[int]] = {}
    nets: dict[str, list[int]] = {}
    results = []
    budget = 0
    for name in ("eager", "rockmate"):
        model: nn.Module = copy.deepcopy(eager)
        if name == "rockmate":
            model = Rockmate(model, x, budget, costs="flops")
            assert model.plan.recomputed > 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(1)
        peaks[name], nets[name] = [], []

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            loss = F.cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        losses = []
        for k in range(1000):
            if k in (1, 499, 999):
                gc.collect()
                loss, peak, net = measure_memory(step, cpu)
                peaks[name].append(peak)
                nets[name].append(net - loss.nbytes)
            else:
                loss = step()
            losses.append(loss)
        results.append([*losses, *snapshot(model)])
        budget = peaks[name][0] * 40 // 100
    assert_same(results[1], results[0])
    assert max(peaks["rockmate"]) <= 0.4 * peaks["eager"][0]
    assert peaks["rockmate"][0] == peaks["rockmate"][2]
    assert nets["rockmate"] == nets["eager"] == [0, 0, 0]
