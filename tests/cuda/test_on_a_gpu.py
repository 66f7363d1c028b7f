"""What only a GPU shows: each test skips itself where there is none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from rkgb.device import Cuda, kind_of
from rkgb.pipeline import make_all_graphs
from rkgb.randomness import random_state, set_random_state
from rockmate import Rockmate, attach, estimate, measure_peak, measure_step, rotor
from rockmate.demo.gpt import GPT
from rockmate.planning.options import PlanOptions
from rockmate.planning.prepare import make_planner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

DEVICE = "cuda:0"


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers), torch.randn(2048, 512)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(16, 16, 64, 64)


def gpt() -> tuple[nn.Module, torch.Tensor]:
    return GPT(4, 256, 4, 128, 1024), torch.randint(1024, (8, 128))


MODELS = pytest.mark.parametrize("make", [perceptron, convolutions, gpt], ids=lambda make: make.__name__)
Make = Callable[[], tuple[nn.Module, torch.Tensor]]


def on_gpu(make: Make) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = make()
    return model.to(DEVICE), x.to(DEVICE)


def under_budget(model: nn.Module, x: torch.Tensor) -> Rockmate:
    """Half-way between the least memory and keeping everything, for a loss that takes its gradient only."""
    found = make_planner(model, x, PlanOptions("flops", loss_memory=0)).frontier()
    return Rockmate(model, x, (found.min_budget + found.max_budget) // 2, costs="flops", loss_memory=0)


def step(call: nn.Module, x: torch.Tensor) -> None:
    call.zero_grad()
    output = call(x)
    (2 * output).sum().backward()  # makes the gradient when it is asked for, and holds nothing


def trained(call: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients and buffers after a step, and the device's generator."""
    torch.manual_seed(1)
    step(call, x)
    gradients = [p.grad.clone() for p in call.parameters() if p.grad is not None]
    return [*gradients, *(b.clone() for b in call.buffers()), random_state(torch.device(DEVICE))]


def assert_as_near_as_its_own(found: list[torch.Tensor], eager: list[torch.Tensor], again: list[torch.Tensor]) -> None:
    """Each tensor is no further from eager mode's than twice what a second run of eager mode is."""
    for ours, theirs, repeated in zip(found, eager, again, strict=True):
        gap, own = ((a.double() - theirs.double()).abs().max() for a in (ours, repeated))
        assert gap <= 2 * own


def test_generator_states_are_small_and_come_back() -> None:
    device = torch.device(DEVICE)
    state = random_state(device)
    drawn = torch.rand(100, device=device)
    assert state.device.type == "cpu"
    assert state.numel() <= 64
    assert not torch.equal(state, random_state(device))
    set_random_state(device, state)
    assert torch.equal(torch.rand(100, device=device), drawn)


@MODELS
def test_results_are_eagers_or_as_near_as_its_own(make: Make) -> None:
    model, x = on_gpu(make)
    eager, again = copy.deepcopy(model), copy.deepcopy(model)
    rk = under_budget(model, x)
    assert rk.plan.recomputed > 0
    assert_as_near_as_its_own(*(trained(call, x) for call in (rk, eager, again)))


@MODELS
def test_requested_bytes_are_as_predicted(make: Make) -> None:
    model, x = on_gpu(make)
    rk = under_budget(model, x)
    run = partial(step, rk, x)
    run()
    rk.zero_grad()
    peak = measure_peak(run, rk)
    assert peak <= rk.budget
    assert 0.99 * rk.plan.predicted_peak <= peak <= rk.plan.predicted_peak + Cuda.scalars
    held = torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    unused = torch.cuda.memory_reserved() - held  # of segments that are in use
    assert peak <= measure_peak(run, rk, reserved=True) + unused


class Products(nn.Module):
    """A large and a small matrix product: 2 ** 37 and 2 ** 19 operations."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(4096, 4096, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.large(x), self.small(y)


def test_times_of_a_large_and_a_small_product() -> None:
    """The large one takes at least what its operations take at 2 PFLOPS; the small one less than a launch, 10 µs."""
    model = Products().to(DEVICE)
    sample = torch.randn(4096, 4096, device=DEVICE), torch.randn(64, 64, device=DEVICE)
    large, small = (node.time for node in make_all_graphs(model, sample).K.nodes)
    assert large > 2**37 / 2e6
    assert small < 10_000
    assert large > 5 * small


def test_a_millisecond_is_held() -> None:
    """Cycles are given to the device; its clock may run slower than two of them a nanosecond."""
    device = torch.device(DEVICE)
    kind = kind_of(device)
    kind.hold(device)
    start = kind.mark(device)
    kind.hold(device)
    assert kind.between(start, kind.mark(device)) >= 900_000


class Attached(nn.Module):
    """The GPT with its loss inside, as scripts call it."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(4, 256, 4, 128, 1024)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.gpt(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


LENGTHS = (128, 96, 128, 61, 96)


def losses(model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], scaled: bool = False) -> list[float]:
    """Of training with batches of several lengths."""
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=scaled)
    found = []
    for k, length in enumerate(LENGTHS):
        ids = torch.randint(1024, (8, length), generator=torch.Generator().manual_seed(k)).to(DEVICE)
        loss = forward(ids)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16], ids=["float", "bfloat16", "float16"])
def test_an_attached_model_trains_as_it_is(half: torch.dtype | None) -> None:
    """Several lengths, under autocast and with a scaler of gradients."""
    torch.manual_seed(0)
    model = Attached().to(DEVICE)
    copies = [copy.deepcopy(model) for _ in range(3)]

    def trained_with(made: nn.Module) -> list[float]:
        def forward(ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", half, enabled=half is not None):
                loss: torch.Tensor = made(ids)
            return loss

        return losses(made, forward, half is torch.float16)

    eager, again = (trained_with(made) for made in copies[:2])
    peak = measure_peak(partial(trained_with, copies[2]), torch.device(DEVICE))
    handle = attach(model, peak // 2, costs="flops", cache=False)
    found = trained_with(model)
    assert handle.plan is not None and handle.plan.recomputed > 0
    own = max(abs(a - b) for a, b in zip(again, eager, strict=True))
    assert max(abs(a - b) for a, b in zip(found, eager, strict=True)) <= 2 * own
    assert str(handle.plan)


def test_memory_is_as_predicted_at_each_operation() -> None:
    """Of a step under a plan, and of the peaks between its moments."""
    model, x = on_gpu(perceptron)
    rk = under_budget(model, x)
    run = partial(step, rk, x)
    run()
    run()
    measured = measure_step(run, DEVICE)
    assert rk.plan.recomputed < len(measured.steps)
    assert measured.peak <= rk.plan.predicted_peak + Cuda.scalars


def test_a_chain_is_as_its_layers() -> None:
    model, x = on_gpu(perceptron)
    eager, again = copy.deepcopy(model), copy.deepcopy(model)
    peak = measure_peak(partial(step, copy.deepcopy(model), x), torch.device(DEVICE))
    chain = rotor.Checkpointable(model, x, int(0.7 * peak))
    assert_as_near_as_its_own(*(trained(call, x) for call in (chain, eager, again)))
    chain.zero_grad()
    assert measure_peak(partial(step, chain, x), torch.device(DEVICE)) <= 0.7 * peak


def test_large_batches_are_estimated_from_a_small_one() -> None:
    """The table says where a library took other kernels as the size grew."""
    torch.manual_seed(0)
    model, x = perceptron()
    model, x = model.to(DEVICE), x.repeat(4, 1).to(DEVICE)
    found = estimate(model, x[:1024], sizes=[len(x)], loss_memory=0)
    run = partial(step, model, x)
    run()
    model.zero_grad()
    peak = measure_peak(run, torch.device(DEVICE))
    assert peak <= found.sizes[0].peak * 1.01
    assert found.rough or found.sizes[0].peak <= peak * 1.01
