"""Planning leaves the model and torch as they were, refuses no valid model, and tells calls apart that differ."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from models import case
from torch import nn

from rkgb import make_all_graphs
from rkgb.cost.measure import measure_nodes, runs
from rockmate import InputError, Rockmate, frontier, rotor


class After(nn.Module):
    """A linear layer, and a function of its result and the other arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        return self.function(self.linear(x), *others)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 2 * g


class Negative(torch.autograd.Function):
    """Refuses positive numbers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if (x > 0).any():
            raise ValueError("positive")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


class WritesElsewhere(nn.Module):
    """Writes a parameter and a plain tensor where the first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.held = torch.ones(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] > 0:
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
                self.linear.bias.data = torch.zeros(8)
                self.held.mul_(0.5)
        return self.linear(x).sin() * self.held


def test_what_forward_writes_for_other_values_is_put_back() -> None:
    model, x = WritesElsewhere(), torch.randn(4, 8)
    x[:, 0] = torch.tensor([-1.0, 1, 1, 1])
    before = [t.clone() for t in (*model.parameters(), model.held)]
    versions = [t._version for t in (*model.parameters(), model.held)]
    Rockmate(model, x, "1 MiB", costs="flops")
    assert all(torch.equal(a, b) for a, b in zip(before, (*model.parameters(), model.held), strict=True))
    assert versions == [t._version for t in (*model.parameters(), model.held)]


def test_inputs_that_overlap_in_memory_are_planned() -> None:
    model, x = nn.Linear(8, 8), torch.randn(1, 8).expand(6, 8)
    assert torch.equal(Rockmate(model, x, "1 MiB", costs="flops")(x), model(x))


def test_gradients_that_are_not_a_number_are_no_change() -> None:
    model = After(Doubled.apply)
    model.linear.weight.grad = torch.full((8, 8), float("nan"))
    assert Rockmate(model, torch.randn(4, 8), "1 MiB", costs="flops").plan.predicted_peak > 0


def test_two_booleans_as_numbers() -> None:
    model = After(lambda x: x * torch.where(x > 0, True, False))
    x = torch.randn(4, 8)
    assert torch.equal(Rockmate(model, x, "1 MiB", costs="flops")(x), model(x))


def test_arrays_of_other_shapes_and_types_are_other_calls() -> None:
    model, x = After(lambda x, a: x.sum() * torch.from_numpy(a)), torch.randn(3, 8)
    rk = Rockmate(model, (x, numpy.zeros((2, 3))), "1 MiB", costs="flops")
    for array in (numpy.zeros((3, 2)), numpy.zeros((2, 3), "int64")):
        assert rk(x, array).shape == array.shape
    assert len(rk._front.plans) == 3


def test_threads_that_plan_leave_torch_as_it_is() -> None:
    models = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))) for _ in range(3)]
    before = torch.autograd.graph.disable_saved_tensors_hooks
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda m: make_all_graphs(m, torch.ones(2, 8), costs="flops").S, models))
    assert len({str(s) for s in found}) == 1
    assert torch.autograd.graph.disable_saved_tensors_hooks is before


def test_other_threads_may_differentiate_while_one_plans() -> None:
    """``torch.func.grad`` switches off the hooks that a step is followed with, in its own thread."""
    found = {}

    def elsewhere(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: found.update(slope=torch.func.grad(torch.sin)(torch.tensor(0.0))))
        thread.start()
        thread.join()
        return x

    rk = Rockmate(After(elsewhere), torch.ones(2, 8), "1 MiB", costs="flops")
    assert found == {}, "what planning did is put back"
    rk(torch.ones(2, 8))
    assert found == {"slope": torch.tensor(1.0)}


def through_negative(x: torch.Tensor) -> torch.Tensor:
    """Of the two products the first stands in for the second where costs are measured."""
    first = x.square() * 2.0
    result: torch.Tensor = Negative.apply(first * -3.0)
    return result


def test_operations_may_refuse_what_stands_in() -> None:
    model, x = After(through_negative), torch.randn(4, 8)
    assert torch.equal(Rockmate(model, x, "1 MiB", costs="flops")(x), model(x))


def chosen(x: torch.Tensor) -> torch.Tensor:
    positive = F.softplus(x).neg().neg()
    return positive[positive > 0].sin()


def test_costs_do_not_depend_on_what_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second negation would be measured on the first one's result, of which nothing is chosen."""
    model, x = After(chosen), torch.randn(64, 8)
    s = make_all_graphs(model, x, costs="flops").S
    with_stand_ins = measure_nodes(s, model, [x], "flops")
    monkeypatch.setattr("rkgb.cost.measure.runs", lambda s, keys, stand_ins: runs(s, keys, False))
    assert with_stand_ins == measure_nodes(s, model, [x], "flops")


def test_a_rockmate_within_a_module_that_is_planned_says_nothing() -> None:
    inner = Rockmate(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(4, 8), "1 MiB", costs="flops")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Rockmate(nn.Sequential(nn.Linear(8, 8), inner), torch.ones(4, 8), "1 MiB", costs="flops")
    assert inner.plans_made == 1


def test_reserved_memory_is_predicted_with_the_allocator_of_cuda() -> None:
    """Segments are multiples of 2 MiB and hold what is in use; a plan that takes less makes the allocator hold less."""
    torch.manual_seed(0)
    layers = (m for _ in range(6) for m in (nn.Linear(512, 512), nn.Tanh()))
    model, x = nn.Sequential(*layers), torch.randn(6144, 512)  # 12 MiB a tensor, each a segment of its own
    found = frontier(model, x, costs="flops")
    plans = [Rockmate(model, x, budget, costs="flops").plan for budget in (found.min_budget, found.max_budget)]
    for plan in plans:
        assert plan.predicted_reserved % 2**21 == 0
        assert plan.predicted_reserved >= plan.predicted_peak - 22 * 2**20  # less what segments of parameters have left
    assert plans[0].predicted_reserved < plans[1].predicted_reserved


QUIET = """
import logging
import torch
from torch import nn
from rockmate import InputError, Rockmate, UnsupportedError, frontier, rotor

logging.getLogger("rockmate").setLevel("WARNING")
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 16)
rk = Rockmate(model, x, int(1.02 * frontier(model, x).min_budget))  # the least depends a little on measured times
for _ in range(3):
    optimizer.zero_grad()
    loss = rk(x).square().mean()
    loss.backward()
    optimizer.step()
"""


def test_planning_and_training_write_nothing_to_stderr() -> None:
    """torch's allocator warns, in C++, of a block that goes in a profiler session and came before it."""
    ran = subprocess.run([sys.executable, "-c", QUIET], check=True, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("", "")


def drawing(draw: Callable[[], float], found: list[float], stop: threading.Event) -> None:
    while not stop.wait(1e-5):  # else it holds Python's lock, planning takes many times as long, and draws fill memory
        found.append(draw())


@pytest.mark.parametrize(
    ("seed", "draw"),
    [(random.seed, random.random), (random.seed, lambda: random.gauss(0, 1)), (numpy.random.seed, numpy.random.rand)],
    ids=["random", "gauss", "numpy"],
)
def test_a_thread_may_draw_while_a_plan_is_made(seed: Callable[[int], None], draw: Callable[[], float]) -> None:
    """As those that load data. What it draws is what it would have drawn."""
    seed(3)
    found: list[float] = []
    stop = threading.Event()
    thread = threading.Thread(target=drawing, args=(draw, found, stop))
    model, x = case("gpt").model(), case("gpt").call(0)[0]
    thread.start()
    try:
        Rockmate(model, x, "100%", costs="flops")
        rotor.Checkpointable(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8), "1 MiB", costs="flops")
    finally:
        stop.set()
        thread.join()
    seed(3)
    assert len(found) > 1000
    assert found == [draw() for _ in found]


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_rotor_refuses_a_layer_that_draws_whatever_other_threads_do(draw: Callable[[], float]) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        layers = nn.Sequential(nn.Linear(8, 8), After(lambda y: y * draw()))
        with pytest.raises(InputError, match="random module"):
            rotor.Checkpointable(layers, torch.randn(4, 8), "1 MiB", costs="flops")
    finally:
        stop.set()
        thread.join()
