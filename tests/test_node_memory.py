"""What the backward of a node takes, where operations in place, or gradients that are views, share memory.

Predicted and measured peaks are the same but for the numbers of the loss (64 bytes).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from models import part_way, randn, square_loss
from torch import nn
from torch.nn import functional as F

from rkgb.cost import layouts
from rkgb.cost.alone import NodeRun
from rkgb.cost.layouts import Outgoing, Passed
from rkgb.cost.measure import measure_nodes
from rockmate import InfeasibleBudgetError, Rockmate, frontier, measure_peak, rotor
from rockmate.planning.options import PlanOptions
from rockmate.planning.prepare import make_planner
from solvers import Bwd, walk


class Residual(nn.Module):
    """Batch norms with a ReLU in place, and a sum in place, between convolutions: a ReLU saves its node's result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.convolutions[0](x)), inplace=True)
        y = self.norms[1](self.convolutions[1](y))
        y += x
        return F.relu(y, inplace=True)


class Dense(nn.Module):
    """A layer of a DenseNet: the gradients of what ``cat`` reads are views of one."""

    def __init__(self, inputs: int, grows: int) -> None:
        super().__init__()
        self.norm, self.convolution = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, grows, 3, padding=1)

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.convolution(F.relu(self.norm(torch.cat(xs, 1)), inplace=True))
        return y


class DenseBlock(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dense((k + 1) * width, width) for k in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        xs = [x]
        for layer in self.layers:
            xs.append(layer(*xs))
        return torch.cat(xs, 1)


def classifier(*layers: nn.Module) -> nn.Module:
    """Its output is so small that no loss comes near the peak."""
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(2))


def stem(activation: nn.Module) -> nn.Module:
    """Much larger than what follows."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 1, bias=False), nn.BatchNorm2d(32), activation, nn.MaxPool2d(4), nn.Conv2d(32, 8, 1)
    )


# ReLU in place saves its result; ReLU6 in place a copy of what it changes: one of several tensors that only its node's
# backward reads.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: classifier(stem(nn.ReLU(inplace=True)), Residual(8), Residual(8)),
    "relu6": lambda: classifier(stem(nn.ReLU6(inplace=True)), Residual(8), Residual(8)),
    "dense": lambda: classifier(nn.Conv2d(3, 8, 3, padding=1), DenseBlock(8, 6)),
}


@pytest.mark.parametrize(("fraction", "allocated"), [(0.0, False), (0.0, True), (1.0, False)])
@pytest.mark.parametrize("name", MODELS)
def test_predicted_peak_is_the_measured_one(name: str, fraction: float, allocated: bool) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), randn(4, 3, 32, 32, seed=0)
    model(x)  # the last layer learns its size
    for p in model.parameters() if allocated else ():
        p.grad = torch.zeros_like(p)
    planner = make_planner(model, x, PlanOptions("flops"))
    found = planner.frontier()
    rk = Rockmate(model, x, part_way(found, fraction), costs="flops")
    assert fraction == 1 or name == "relu" or rk.plan.recomputed > 0
    step = rk.plan.schedule[walk(planner.problem, rk.plan.schedule).peak_step]
    assert isinstance(step, Bwd), "the test is about backwards"

    def train() -> None:
        model.zero_grad(set_to_none=not allocated)
        out = rk(x)  # held to the end
        square_loss(out).backward()

    train()
    assert rk.plan.predicted_peak <= measure_peak(train, "cpu") <= rk.plan.predicted_peak + 64


@pytest.mark.parametrize("wrong", [False, True])
def test_strides_that_the_meta_device_gives_are_checked_by_measuring(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large nodes run on the meta device for the strides of their gradients; what is measured decides."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.Unflatten(1, (6, 8)), Swapped(8, 4), nn.Flatten(), nn.Linear(24, 3))
    x = randn(64, 24, seed=0)
    s = make_planner(model, x, PlanOptions("flops")).graphs.S
    runs: list[NodeRun] = []

    def turned(run: NodeRun, k: int, passed: Passed) -> Passed:
        """Strides that are not those of ``passed``."""
        first, *rest = run.d.values[run.node.reads[k]].shape
        strides = None if passed.strides else (1, *(first * n for n in torch.empty(rest).stride()))
        return dataclasses.replace(passed, strides=strides)

    def on_meta(run: NodeRun) -> Outgoing:
        found = of_run(run)
        if {t.device.type for t in run.values.values()} != {"meta"}:
            return found
        runs.append(run)
        return {k: turned(run, k, passed) for k, passed in found.items()} if wrong else found

    of_run = layouts._of_run
    costs = measure_nodes(s, model, [x], "flops")
    monkeypatch.setattr(layouts, "_of_run", on_meta)
    monkeypatch.setattr(layouts, "_LARGE", 0)
    assert measure_nodes(s, model, [x], "flops") == costs
    assert len(runs) >= 5, "nodes ran on the meta device"


class Swapped(nn.Module):
    """The gradient of its convolution's input has other strides than the input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x.exp()).tanh().transpose(1, 2)
        return y


class Ends(nn.Module):
    """Returns what its last operation in place saves: the caller holds it while the backward goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.convolution(x)), inplace=True)


class Turned(nn.Module):
    """The gradients of its two halves, which one node makes, are views of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x))
        z: torch.Tensor = self.head(torch.cat([y[8:], y[:8]]))
        return z


def test_gradients_that_are_views_of_one_memory_go_together() -> None:
    torch.manual_seed(0)
    model, x = Turned(), randn(512, 16, seed=0)
    rk = Rockmate(model, x, "1 GiB", costs="flops")
    step = rk.plan.schedule[walk(rk.plan.problem, rk.plan.schedule).peak_step]
    assert isinstance(step, Bwd) and rk.plan.problem.nodes[step.node].name == "second"

    def train() -> None:
        model.zero_grad()
        out = rk(x)  # held to the end
        square_loss(out).backward()

    train()
    assert rk.plan.predicted_peak <= measure_peak(train, "cpu") <= rk.plan.predicted_peak + 64


class Normed(nn.Module):
    """Adds what two batch norms give: where the first runs again, the most memory is in use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, z = self.norms[0](x.roll(1, 0)), self.norms[1](x.flip(0))
        y += z
        return F.relu(y, inplace=True)


class Halves(nn.Module):
    """What one node makes is used in two parts: joined the other way round, or each on its own."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.joined = joined
        self.wide, self.narrow, self.heads = nn.Linear(16, 512), nn.Linear(512, 64), nn.ModuleList()
        self.heads.extend(nn.Linear(width, 2) for width in (48, 16, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.narrow(self.wide(x))
        y = y if self.joined else F.relu(y, inplace=True)
        parts = y[:, :48], y[:, 48:]
        if self.joined:
            z: torch.Tensor = self.heads[2](torch.cat(parts[::-1], 1))
            return z
        return torch.cat([head(part) for head, part in zip(self.heads, parts, strict=False)], 1)


class Scaled(nn.Module):
    """Multiplies by numbers, which autograd saves as tensors where they are no constants."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * (0.5 + k)
        return x.sum(0)


# What is in use at the peak: copies of statistics, in a second run; gradients that are views of one memory and overlap,
# so that less is released than the sum of what they span; gradients of views that were taken after a write; numbers.
COUNTED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "copies of statistics": (lambda: classifier(nn.Conv2d(3, 64, 1), *(Normed(64) for _ in range(4))), (2, 3, 4, 4)),
    "overlapping views": (lambda: Halves(joined=True), (64, 16)),
    "views after a write": (lambda: Halves(joined=False), (64, 16)),
    "numbers": (lambda: Scaled(20), (64, 16)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_else_is_in_use_at_the_peak_is_counted(name: str) -> None:
    torch.manual_seed(0)
    make, shape = COUNTED[name]
    model, x = make(), randn(*shape, seed=0)
    model(x)  # the last layer learns its size
    rk = Rockmate(model, x, "100%", costs="flops")
    gradient, found = torch.ones_like(model(x)), rk.frontier()

    def train() -> None:
        model.zero_grad()
        rk(x).backward(gradient)

    for fraction in (0.0, 0.5, 1.0):
        rk.budget = part_way(found, fraction)
        train()
        model.zero_grad()
        assert measure_peak(train, "cpu") == rk.plan.predicted_peak <= rk.budget


def test_a_result_that_the_caller_holds_counts_to_the_end() -> None:
    torch.manual_seed(0)
    model, x = Ends(), randn(4, 3, 16, 16, seed=0)
    rk = Rockmate(model, x, frontier(model, x, costs="flops").max_budget, costs="flops")

    def train() -> None:
        model.zero_grad()
        out = rk(x)
        out.sum().backward()

    train()
    assert measure_peak(train, "cpu") <= rk.plan.predicted_peak + 64
    problem = make_planner(model, x, PlanOptions("flops", time_limit=1)).problem
    last = problem.nodes[-1].backward
    assert last is not None
    size = 4 * 8 * 16 * 16 * 4
    assert last.peak >= last.before + 2 * size, "two gradients beside the one that came, as nothing else goes"


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "a number": lambda v, x: v[0].fill_(0.0),
    "a part": lambda v, x: v[0].copy_(v[1]),
    "an input": lambda v, x: v[0].copy_(x[:8]),
    "everything": lambda v, x: v.mul_(2),
}


class WritesView(nn.Module):
    """Writes through a view, and uses both the view and what it is one of."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], object], joined: bool) -> None:
        super().__init__()
        self.write, self.joined = write, joined
        self.before, self.behind = (
            nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(32, 32), nn.GELU()))) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.before(x).clone()
        v = h.view(8, 8, 32)
        self.write(v, x)
        return (self.behind(h) + v.sum(),) if self.joined else (self.behind(h), v.sum(1))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_gradients_of_written_views_are_as_large_as_the_memory(write: str, joined: bool) -> None:
    """Autograd makes them when it meets the view, not when it comes to what was written."""
    torch.manual_seed(0)
    model, x = WritesView(WRITES[write], joined), randn(64, 32, seed=0)
    rk = Rockmate(model, x, "100%", costs="flops")
    gradients, found = [torch.ones_like(t) for t in model(x)], rk.frontier()

    def train() -> None:
        model.zero_grad()
        torch.autograd.backward(rk(x), gradients)

    for fraction in (0.0, 0.3):
        rk.budget = part_way(found, fraction)
        train()
        assert measure_peak(train, "cpu") <= rk.plan.predicted_peak


def test_the_least_budget_is_that_of_rotor() -> None:
    """A ResNet's stages are nodes and groups of nodes of our graph, so that what rotor can do, Rockmate can do; but for
    room for what a loss keeps during the backward, as many bytes as the output has, which rotor does not leave.
    """
    torch.manual_seed(0)
    model, x = rotor.models.resnet18(num_classes=10), randn(2, 3, 64, 64, seed=0)
    with pytest.raises(InfeasibleBudgetError) as error:
        rotor.Checkpointable(model, x, mem_limit=1, costs="flops")
    assert frontier(model, x, costs="flops").min_budget - model(x).nbytes <= error.value.min_budget
