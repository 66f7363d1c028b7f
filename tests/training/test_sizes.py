"""Batches of any length under one plan: nothing is traced or measured again, and nothing is silently wrong."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_same, snapshot, tight_budget
from models import BasicBlock, Cube, ResNet, part_way, randn, tokens
from torch import nn

import rkgb.Btools
import rkgb.Dtools
import rkgb.probe.resize
import rockmate
import rockmate.calls.captured_calls
import solvers.block.ilp
from rkgb.cost import memory
from rkgb.cost.measure import Cost, Known, measure_nodes
from rkgb.cost.scaled import choosing_anew, scaled_costs
from rkgb.cost.usage import supposed
from rkgb.device import Cpu, Cuda
from rkgb.graphs import Node
from rkgb.pipeline import make_S
from rkgb.probe.resize import (
    graph_of_a_run,
    graph_without_data,
    is_same,
    is_same_program,
    program_without_data,
    resized,
)
from rkgb.probe.skeleton import skeleton
from rkgb.sample import Call
from rkgb.trace.meta import without_data
from rkgb.trees import tensors_of
from rockmate import InfeasibleBudgetError, MeasureError, attach, frontier, measure_peak
from rockmate.demo.gpt import GPT
from rockmate.planning.plan import Plan


class Language(nn.Module):
    """Attention with a causal mask made of sizes, positions, dropout, and a loss inside."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, width), nn.Embedding(128, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                    "drop": nn.Dropout(0.1),
                }
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 64)

    def forward(self, ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        batch, length = ids.shape
        x = self.tokens(ids) + self.positions(torch.arange(length))
        mask = torch.ones(length, length, dtype=torch.bool).triu(1) | ~keep[:, None, None, :]
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm"](x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(mask, -1e9).softmax(-1)
            x = x + layer["drop"](layer["out"]((scores @ v).transpose(1, 2).reshape(batch, length, -1)))
            x = x + layer["down"](F.gelu(layer["up"](x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def text(batch: int, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    keep = torch.ones(batch, length, dtype=torch.bool)
    keep[0, length - length // 3 :] = False
    return tokens(batch, length, high=64, seed=seed), keep


class Counted:
    """How often calls were traced for planners of their own, and how often torch recorded a program at all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = self.recorded = 0
        record = rkgb.Btools.record

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.recorded += 1
            return record(*args, **kwargs)

        monkeypatch.setattr(rkgb.Btools, "record", recorded)
        original = rockmate.calls.made.make_planner

        def make(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(rockmate.calls.made, "make_planner", make)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def train(model: nn.Module, batches: list[tuple[torch.Tensor, ...]]) -> Iterator[Any]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        loss = model(*batch)
        loss = loss if loss.dim() == 0 else loss.square().mean()
        loss.backward()
        yield loss.detach().clone()
        yield from snapshot(model)
        optimizer.step()


def assert_equal(model: nn.Module, budget: int | str, batches: list[tuple[torch.Tensor, ...]]) -> rockmate.Attachment:
    """Training ``model`` under ``budget`` is eager mode's; the handle."""
    eager = copy.deepcopy(model)
    handle = attach(model, budget, costs="flops")
    assert_same(list(train(model, batches)), list(train(eager, batches)))  # one after the other: they draw
    return handle


class LowPrecision(Language):
    """In low precision."""

    def forward(self, ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids, keep)


@pytest.mark.parametrize("kind", [Language, LowPrecision])
def test_other_lengths_and_batches_are_not_traced_again(kind: type[Language], traced: Counted) -> None:
    model = kind()
    budget = tight_budget(model, text(4, 40), fraction=0.2)
    sizes = [(4, 40), (4, 23), (4, 37), (3, 40), (4, 12), (2, 31), (4, 39)]  # there are four heads, too
    handle = assert_equal(model, budget, [text(b, n, seed=k) for k, (b, n) in enumerate(sizes)])
    assert traced.count == 1
    assert len(handle.plans) == len(sizes)
    assert any(p.plan is not None and p.plan.recomputed for p in handle.plans[:-1]), "nothing was carried over"
    for b, n in sizes:
        batch = text(b, n)

        def step(batch: tuple[torch.Tensor, ...] = batch) -> None:
            model.zero_grad()
            model(*batch).backward()

        step()
        peak = measure_peak(step)
        assert handle.plan is not None
        assert peak <= handle.plan.predicted_peak <= budget, (b, n)
    before = traced.recorded
    for b, n in [(4, 29), (3, 17), (2, 38)]:
        model(*text(b, n)).backward()
    assert traced.count == 1
    assert traced.recorded == before, "one trace is of all sizes"


class Reshaped(torch.autograd.Function):
    """Both parts compute with sizes, and forward takes memory for all pairs of rows meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.tanh(x.reshape(x.shape[0] * x.shape[1])).view(x.shape) + (x @ x.mT).sum() * 0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient.reshape(x.shape[0], -1) * (1 - torch.square(torch.tanh(x)))


class OfFunctions(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layers, self.function = nn.ModuleList(nn.Linear(16, 16) for _ in range(6)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.function.apply(torch.tanh(layer(x)))
        return x


@pytest.mark.parametrize("function", [Cube, Reshaped])
def test_sizes_of_a_model_with_functions_are_planned_once(function: Any, caplog: pytest.LogCaptureFixture) -> None:
    """TorchDynamo captures the first size alone, and then all sizes."""
    caplog.set_level(logging.INFO, "rockmate")
    torch.manual_seed(0)
    model = OfFunctions(function)
    budget = part_way(frontier(model, randn(96, 16, seed=0), costs="flops"), 0.5)
    caplog.clear()
    handle = assert_equal(model, budget, [(randn(n, 16, seed=n),) for n in (64, 96, 64, 96, 64, 80)])
    planned = [r.getMessage() for r in caplog.records if r.getMessage().startswith("planned OfFunctions")]
    assert len(planned) <= 2, planned  # sizes that are smaller than one with a plan need none of their own
    for n in (64, 80, 96):
        x = randn(n, 16, seed=n)

        def step(x: torch.Tensor = x) -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        step()
        peak = measure_peak(step)
        assert isinstance(handle.plan, Plan)
        assert peak <= handle.plan.predicted_peak <= budget, n


def test_one_trace_serves_all_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured again with symbolic sizes, the program is traced at all sizes, and compared where it ran."""
    traces = []

    def counted(name: str) -> None:
        trace = getattr(rkgb.probe.resize, name)

        def traced(*args: Any) -> Any:
            traces.append(name)
            return trace(*args)

        monkeypatch.setattr(rkgb.probe.resize, name, traced)

    counted("trace_without_data")
    counted("trace_of_any_size")
    model = Language()
    attach(model, tight_budget(Language(), text(4, 40), fraction=0.2), costs="flops")
    model(*text(4, 40)).backward()
    traces.clear()
    for batch in (text(4, 23), text(4, 31), text(3, 37), text(2, 29)):  # lengths, and then batches, become symbolic
        model(*batch).backward()
    assert traces == ["trace_of_any_size"] * 2


def test_a_budget_that_is_set_does_not_forget_other_lengths(traced: Counted) -> None:
    model = Language()
    handle = assert_equal(model, tight_budget(model, text(4, 40), fraction=0.5), [text(4, n) for n in (40, 23)])
    handle.budget = tight_budget(Language(), text(4, 40), fraction=0.3)
    for n in (23, 37, 40, 31):
        model(*text(4, n)).backward()
    assert traced.count == 1


def test_longer_batches_than_before_are_solved_for_and_stay_in_the_budget(traced: Counted) -> None:
    model = Language()
    budget = tight_budget(model, text(4, 60), fraction=0.3)
    sizes = [(4, 20), (4, 60), (4, 44), (4, 58)]
    handle = assert_equal(model, budget, [text(b, n, seed=k) for k, (b, n) in enumerate(sizes)])
    assert traced.count == 1
    batch = text(4, 60)

    def step() -> None:
        model.zero_grad()
        model(*batch).backward()

    step()
    assert measure_peak(step) <= budget
    assert handle.plan is not None
    assert handle.plan.recomputed > 0


def test_blocks_are_not_solved_again_for_longer_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step showed what its loss reads; a longer batch, for which no schedule fits, runs blocks as before."""
    solved: list[int] = []
    grid_points = solvers.block.ilp.grid_points

    def counted(view: Any, *args: Any) -> Any:
        solved.append(len(view.nodes))
        return grid_points(view, *args)

    monkeypatch.setattr(solvers.block.ilp, "grid_points", counted)
    model = Language()
    model.forward = lambda ids, keep: (Language.forward(model, ids, keep), model.tokens.weight.square())  # type: ignore[method-assign]
    handle = attach(model, tight_budget(Language(), text(4, 60), fraction=0.3), costs="flops")
    runs = []
    for n in (50, 58, 60):
        solved.clear()
        model(*text(4, n))[0].backward()
        assert handle.plan is not None
        assert handle.plan.recomputed and handle.plan.solver == "chain"
        runs.append(len(solved))
    assert runs[0] > 0 and runs[1:] == [0, 0]


def test_the_smaller_last_batch_of_a_residual_network(traced: Counted) -> None:
    model = ResNet(BasicBlock, (16, 32), 2)
    budget = tight_budget(model, (randn(16, 3, 16, 16, seed=0),), fraction=0.3)
    batches = [(randn(size, 3, 16, 16, seed=k),) for k, size in enumerate((16, 16, 7, 16, 7))]
    handle = assert_equal(model, budget, batches)
    assert traced.count == 1
    assert handle.plans_made == 1


def test_images_of_other_sizes() -> None:
    """Sizes behind strided convolutions are rounded; where a fit is wrong, the graph is traced."""
    model = ResNet(BasicBlock, (16, 32), 2)
    budget = tight_budget(model, (randn(4, 3, 33, 33, seed=0),), fraction=0.3)
    assert_equal(model, budget, [(randn(4, 3, size, size, seed=size),) for size in (33, 24, 31, 17, 30)])


class Bounds(nn.Module):
    """Has a constant that happens to be the batch's size, and a way of its own for long inputs; neither has an effect
    on small values."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 16)
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads and float(x.detach().sum()) > 1e9:  # TorchDynamo does not capture this as one graph
            return x
        h = torch.relu(self.first(x)).clamp(max=8)
        if x.shape[1] > 6:
            h = h.clamp(max=2.5)
        h = torch.tanh(self.second(h))
        return self.third(h)


@pytest.mark.filterwarnings("ignore:the forward of Bounds runs other graphs")  # its way for long inputs is one
@pytest.mark.parametrize("reads", [False, True], ids=["one graph", "followed"])
def test_numbers_and_ways_without_effect_on_the_first_values_are_not_mistaken(reads: bool) -> None:
    model = Bounds(reads)
    budget = tight_budget(model, (randn(8, 7, 16, seed=0),), fraction=0.5)
    calls = [(8, 5, 0.1), (5, 5, 0.1), (5, 5, 100.0), (8, 7, 0.1), (8, 7, 100.0), (4, 6, 0.1), (4, 6, 100.0)]
    assert_equal(model, budget, [(scale * randn(b, n, 16, seed=k),) for k, (b, n, scale) in enumerate(calls)])


def test_a_module_traced_as_a_whole_is_not_traced_again(traced: Counted) -> None:
    model = nn.Transformer(16, 2, 2, 2, 32, dropout=0.1, batch_first=True)

    def batch(source: int, target: int, seed: int) -> tuple[torch.Tensor, ...]:
        return randn(3, source, 16, seed=seed), randn(3, target, 16, seed=seed + 1)

    sizes = [(9, 7), (9, 5), (11, 8), (6, 7), (13, 13)]
    budget = tight_budget(model, batch(13, 13, 0), fraction=0.4)
    assert_equal(model, budget, [batch(a, b, k) for k, (a, b) in enumerate(sizes)])
    assert traced.count <= 2


class Averaged(nn.Module):
    """Keeps an average of a weight in a parameter, and a statistic in a buffer; both change in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.average = nn.Parameter(torch.zeros(32, 16), requires_grad=False)
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        with torch.no_grad():
            self.average.mul_(0.9).add_(self.first.weight, alpha=0.1)
            self.seen.add_(y.mean(0))
        result: torch.Tensor = self.second(y)
        return result


class Attending(nn.Module):
    """Attention of each place to all."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.heads(x, x, x, need_weights=False)[0]
        return y


class Patches(nn.Module):
    """Patches of an image, whose number is rounded, and the image that they make up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.layer(x))
        return F.fold(F.unfold(x, 3, stride=2), x.shape[-2:], 3, stride=2).mean((2, 3))


class Summed(nn.Module):
    """A parameter, and sums over the rows of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        return x.logsumexp(-1) + x.std(-1)


class Solved(Summed):
    """Linear equations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        return torch.linalg.solve(x @ x.mT + torch.eye(len(x[0])), x)


class Mixed(nn.Module):
    """A product of three tensors, which keeps one of all pairs of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bnd,bmd,bme->bne", self.q(x), self.k(x), self.v(x))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[torch.Tensor, ...]], list[tuple[int, int]]]] = {
    "gpt": (lambda: GPT(2, 24, 2, 64, 64), lambda n: (tokens(3, n, high=64, seed=0),), [(17, 23), (23, 17), (17, 64)]),
    "text": (Language, lambda n: text(5, n), [(17, 40), (40, 17), (12, 13)]),
    "averaged": (Averaged, lambda n: (randn(n, 16, seed=0),), [(8, 12)]),
    "resnet": (
        lambda: ResNet(BasicBlock, (16, 32), 2),
        lambda n: (randn(n, 3, 16, 16, seed=0),),
        [(4, 8), (8, 4), (3, 16)],
    ),
    "attention": (  # takes larger blocks from 192 and from 768 on
        Attending,
        lambda n: (randn(2, n, 16, seed=0),),
        [(191, 192), (700, 768), (192, 180), (110, 100)],
    ),
    "convolutions": (  # another algorithm, by the size of the input
        lambda: nn.Sequential(nn.Conv2d(8, 48, 1), nn.Conv2d(48, 48, 3, padding=1, groups=48), nn.Conv2d(48, 8, 1)),
        lambda n: (randn(n, 8, 24, 24, seed=0),),
        [(4, 16), (8, 9)],
    ),
    "one image": (  # takes more than two
        lambda: nn.Conv2d(96, 8, 3, padding=1),
        lambda n: (randn(n, 96, 14, 14, seed=0),),
        [(2, 1)],
    ),
    "low precision": (  # fewer rows take more
        lambda: nn.Linear(32, 32).bfloat16(),
        lambda n: (randn(n, 32, seed=0).bfloat16(),),
        [(320, 256), (160, 92)],
    ),
    "recurrent": (lambda: nn.LSTM(16, 32, 2, batch_first=True), lambda n: (randn(4, n, 16, seed=0),), [(10, 12)]),
    "pooled": (  # the results have one size
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 4)),
        lambda n: (randn(2, 3, n, n, seed=0),),
        [(32, 16), (16, 32)],
    ),
    "statistics": (
        Summed,
        lambda n: (randn(40, n, seed=0),),
        [(200, 100), (100, 400)],
    ),
    "patches": (Patches, lambda n: (randn(2, 1, n, n, seed=0),), [(28, 56), (56, 28), (13, 57)]),
    "product of three": (Mixed, lambda n: (randn(2, n, 16, seed=0),), [(64, 256), (128, 64)]),
    "solved": (Solved, lambda n: (randn(4, n, n, seed=0),), [(16, 8), (8, 16)]),
}


def costs_at_another_size(name: str, here: int, there: int) -> list[tuple[str, Cost, Cost]]:
    """For each node its name, and its costs at one size as they follow from those at another, and as they are."""
    make, call, _ = MODELS[name]
    model = make()
    graphs, costs = [], []
    for size in (here, there):
        _, d, s = make_S(model, call(size))
        graphs.append(s)
        costs.append(measure_nodes(s, model, list(call(size)), "flops", supposed(d), Known()))
    assert skeleton(graphs[0]) == skeleton(graphs[1])
    known = Known(lambda _: scaled_costs(*graphs, costs[0]), choosing_anew(*graphs))
    found = measure_nodes(graphs[1], model, list(call(there)), "flops", supposed(graphs[1].d), known)
    return list(zip((node.name for node in graphs[0].nodes), found, costs[1], strict=True))


SIZES = [(name, *pair) for name, (_, _, pairs) in MODELS.items() for pair in pairs]


@pytest.mark.parametrize(("name", "here", "there"), [x for x in SIZES if x[0] != "solved"])  # which refuses zeros
def test_memory_at_another_size_is_that_of_its_kernels(
    name: str, here: int, there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, where any kernel may be chosen by the size."""
    monkeypatch.setattr(Cpu, "choosing", Cuda.choosing)
    for what, found, measured in costs_at_another_size(name, here, there):
        for field in ("forward_peak", "backward_peak", "held_peak", "together_peak", "inputs"):
            assert getattr(found, field) == getattr(measured, field), (what, field)


@pytest.mark.parametrize(("name", "here", "there"), SIZES)
def test_scaled_memory_is_never_below_what_is_measured(name: str, here: int, there: int) -> None:
    for what, scaled, measured in costs_at_another_size(name, here, there):
        assert scaled.forward_peak >= measured.forward_peak, what
        assert scaled.incoming == measured.incoming, what
        for field in ("backward_peak", "held_peak", "together_peak"):
            assert getattr(scaled, field) >= getattr(measured, field), (what, field)
        for ours, theirs in zip(scaled.inputs, measured.inputs, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or theirs is None or ours.bytes >= theirs.bytes


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_of_the_meta_device_is_the_traced_one(name: str) -> None:
    """At the sizes at which it ran, and at others; what kernels of a CPU keep otherwise, a run shows."""
    make, call, pairs = MODELS[name]
    model, cpu = make(), torch.device("cpu")
    bare = copy.deepcopy(model).to("meta")
    graphs = {size: make_S(model, call(size)) for size in pairs[0]}
    b, _, s = graphs[pairs[0][0]]
    for size, (traced, _, known) in graphs.items():
        inputs = without_data(call(size))
        assert inputs is not None
        without = Call(tuple(inputs), {})
        program = program_without_data(bare, without, cpu)
        assert program is not None
        assert is_same_program(program, traced, cpu)
        assert is_same_program(program, b, cpu) == (str(traced) == str(b))
        d = graph_without_data(program, bare, without, cpu)
        by_a_run = resized(s, skeleton(s), graph_of_a_run(program, model, Call(call(size), {}), cpu))
        found = None if d is None else resized(s, skeleton(s), d)
        assert by_a_run is not None
        for graph in (by_a_run,) if name in ("recurrent", "patches") else (by_a_run, found):
            assert graph is not None
            assert is_same(graph, known)
            assert [n.saved.private for n in graph.nodes] == [n.saved.private for n in known.nodes]


def test_the_room_for_the_loss_is_that_of_the_largest_step_in_whatever_order_sizes_come() -> None:
    """In proportion to the outputs of the step in which it was seen, not to those of the step before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Linear(32, 50))
    handle = attach(model, "1400 KiB", costs="flops")

    def room(rows: int) -> int:
        x = tokens(4, rows, high=50, seed=rows)
        for _ in range(2):
            nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
            model.zero_grad()
        assert isinstance(handle.plan, Plan)
        assert handle.plan.room.seen
        return handle.plan.room.between + handle.plan.room.kept

    longest = room(64)
    assert all(room(rows) == longest for rows in (32, 63, 16, 62, 8, 61))
    assert longest < room(128) <= 2 * (longest + 2 * Cpu.scalars) + 2  # what stayed, too, may have been numbers


def test_a_share_of_a_small_first_batch_is_told_where_no_plan_fits() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))
    attach(model, "80%", costs="flops")
    model(randn(64, 16, seed=0)).square().mean().backward()
    with pytest.raises(
        InfeasibleBudgetError, match=r"The budget is 80% of the first step that was planned, which takes"
    ):
        model(randn(1600, 16, seed=0)).square().mean().backward()


class Ignoring(nn.Module):
    """A loss that leaves a target out, which an attribute names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))
        self.ignored = -1

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), target, ignore_index=self.ignored)


def test_another_constant_at_another_size_is_not_mistaken() -> None:
    """Before any target is left out, two constants give the same results."""
    model = Ignoring()
    eager = copy.deepcopy(model)
    handle = attach(model, tight_budget(model, (randn(64, 16, seed=0), tokens(64, high=9, seed=0))), costs="flops")
    for size, ignored, high in ((64, -1, 9), (40, 12, 9), (40, 12, 16), (50, 12, 9), (50, 3, 9), (30, 3, 9)):
        x, target = randn(size, 16, seed=size), tokens(size, high=high, seed=size)
        found = []
        for m in (model, eager):
            m.ignored = ignored
            m.zero_grad()
            loss = m(x, target)
            loss.backward()
            found.append([loss.detach(), *snapshot(m)])
        assert_same(*found)
    assert handle.plans_made > 0


class Queue(nn.Module):
    """MoCo's queue: Python reads where it stands from a buffer, writes there, and moves it on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
        self.register_buffer("queue", torch.zeros(256, 16))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        with torch.no_grad():
            at = int(self.at)
            self.queue[at : at + len(x)] = y
            self.at[0] = (at + len(x)) % 256
        return y


def test_what_is_written_into_buffers_is_compared() -> None:
    """The outputs are right wherever the queue stands."""
    model = Queue()
    eager = copy.deepcopy(model)
    found = frontier(model, randn(64, 16, seed=0), costs="flops")
    handle = attach(model, part_way(found, 0.5), costs="flops")
    for seed in range(6):
        for m in (model, eager):
            m(randn(64, 16, seed=seed)).square().mean().backward()
        assert_same(snapshot(model), snapshot(eager))
    assert handle.plan is not None
    assert handle.plan.recomputed > 0


def test_a_size_is_measured_and_solved_for_when_its_runs_again_have_paid_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Until then its plan is carried over, with costs that were scaled. Nothing of the training is other than eager."""
    caplog.set_level(logging.INFO, "rockmate")
    model, eager = (Language() for _ in range(2))
    eager.load_state_dict(model.state_dict())
    handle = attach(model, tight_budget(model, text(4, 60), fraction=0.3), costs="flops", cache=False)
    list(train(model, [text(4, 40)]))
    eager.load_state_dict(model.state_dict())
    batch = text(4, 60)

    def trained(model: nn.Module) -> list[torch.Tensor]:
        return list(train(model, [batch]))

    def accumulated(model: nn.Module) -> list[Any]:
        torch.manual_seed(0)
        model(*batch).backward()
        return list(snapshot(model))

    assert_same(trained(model), trained(eager))
    first = handle.runnable
    assert first is not None
    assert first.is_provisional
    assert first.family is not None
    steps = 3
    first.family.measured.seconds = {"measure": (steps - 0.5) * first.plan.rerun_time / 1e9}
    for step in range(1, steps + 2):
        if step == steps:  # solved for in this step, in which gradients are there already
            assert_same(accumulated(model), accumulated(eager))
        else:
            assert_same(trained(model), trained(eager))
        now = handle.runnable
        assert now is not None
        assert now.planner.scaled == (step < steps)
        assert ("measured and planned anew" in caplog.text) == (step >= steps)
    assert now.number == first.number
    assert now.plan.rerun_time <= first.plan.rerun_time
    assert measure_peak(lambda: trained(model)) <= handle.budget


# ------------------------------------------------------------------ sizes that need no plan


def room_for(model: nn.Module, *batch: torch.Tensor) -> int:
    """A budget in which a step of this size keeps everything, with some room for the plan's guess of the loss."""
    eager = copy.deepcopy(model)
    return int(1.1 * measure_peak(lambda: eager(*batch).sum().backward()))


def test_smaller_sizes_than_one_that_fits_run_nothing_again() -> None:
    torch.manual_seed(0)
    model = Language()
    sizes = [40, 48, 44, 30, 64, 60, 30, 64, 46]
    batches = [text(4, n, seed=k) for k, n in enumerate(sizes)]
    budget = room_for(model, *batches[1])
    handle = assert_equal(model, budget, batches)
    planned = [x.plan.recomputed if x.plan else 0 for x in handle.plans]
    assert len(planned) == len(set(sizes))
    assert len([x for x in planned if x]) == 2  # 64 and 60
    for k in range(len(batches)):
        model.zero_grad(set_to_none=True)
        assert measure_peak(lambda k=k: model(*batches[k]).backward()) <= budget  # type: ignore[misc]


def test_a_smaller_input_with_larger_results_is_planned() -> None:
    """What is padded or cut out may be larger where the input is smaller."""

    class Rest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.new_ones(8, 128 - x.shape[1], 16)
            return self.second(self.first(y).sin().exp().tanh()).sum() + self.first(x).sum()

    torch.manual_seed(0)
    model = Rest()
    sizes = (64, 80, 72, 54, 90)
    batches = [(randn(8, n, 16, seed=n),) for n in sizes]
    budget = room_for(model, *batches[2])
    handle = assert_equal(model, budget, batches)
    kinds = {x.name.split("[")[1].split("]")[0]: x.plan for x in handle.plans}
    assert kinds["8, 54, 16"] is not None
    assert kinds["8, 54, 16"].recomputed
    model.zero_grad(set_to_none=True)
    assert measure_peak(lambda: model(*batches[3]).backward()) <= budget


def test_a_number_that_does_not_follow_from_sizes_asks_for_no_more_memory_than_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was repeated 200 times in a call of one row is not tried with 120 rows."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.gelu(self.first(x)).repeat_interleave(200 // x.shape[0], 0)
            return self.second(y.sin().exp().tanh() * y)

    largest = 0
    run = rkgb.Dtools.computed

    def watched(node: Node, value: Callable[[int], Any]) -> tuple[Any, ...]:
        nonlocal largest
        results = run(node, value)
        largest = max([largest, *(t.numel() for t in tensors_of(results) if not t.is_meta)])
        return results

    monkeypatch.setattr(rkgb.Dtools, "computed", watched)
    torch.manual_seed(0)
    model = Repeated()
    x = randn(90, 16, seed=0)
    budget = int(0.9 * measure_peak(lambda: model(x).square().mean().backward()))
    model.zero_grad()
    attach(model, budget, costs="flops", on_infeasible="least")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rockmate.BudgetWarning)
        for n in (90, 3, 1, 120, 90, 3, 1, 70, 120):
            model(randn(n, 16, seed=n)).square().mean().backward()
    assert 0 < largest <= 200 * 64


def test_a_size_that_comes_while_memory_is_measured_is_planned_later() -> None:
    """With the plan of least memory, too: it is no reason to run without a budget."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())))

    def step(n: int) -> None:
        model(randn(n, 32, seed=n)).square().mean().backward()
        model.zero_grad(set_to_none=True)

    budget = int(0.6 * measure_peak(lambda: step(400)))
    attach(model, budget, costs="flops", on_infeasible="least")
    for n in (400, 400, 350, 350):
        step(n)
    with pytest.raises(MeasureError, match="already"):
        memory.measure_peak(lambda: step(500))
    step(500)
    step(400)
    assert measure_peak(lambda: step(400)) <= budget


def test_a_place_in_a_queue_is_a_number_of_one_graph() -> None:
    """As in MoCo: the pointer is a buffer, read as a number, and where to write."""

    class Queued(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())))
            self.register_buffer("queue", torch.randn(48, 32))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, place = self.net(x), int(self.place)
            logits = h @ self.queue.clone().T
            with torch.no_grad():
                self.queue[place : place + 4] = h[:4].detach()
                self.place[0] = (place + 4) % 48
            return logits

    torch.manual_seed(0)
    eager = Queued()
    model = copy.deepcopy(eager)
    x = randn(256, 32, seed=0)
    budget = int(0.8 * measure_peak(lambda: copy.deepcopy(eager)(x).square().mean().backward()))
    handle = attach(model, budget, costs="flops")
    for k in range(30):
        for m in (eager, model):
            m.zero_grad()
            m(randn(256, 32, seed=k)).square().mean().backward()
        assert_same(snapshot(model), snapshot(eager))
    assert handle.plan is not None
    assert handle.plan.recomputed
    assert handle.plans_made <= 4  # the first and the last place are others than those between


class HeadsOfOneClass(nn.Module):
    """A trunk and heads that are the same blocks; the loss reads some of them."""

    def __init__(self) -> None:
        super().__init__()

        def block(width: int) -> nn.Module:
            inside = nn.Linear(24, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 24), nn.BatchNorm1d(24)
            return nn.Sequential(*inside, nn.Linear(24, width))

        self.trunk, self.heads = block(24), nn.ModuleList(block(4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """One output for each head."""
        x = self.trunk(x)
        return [head(x) for head in self.heads]


@pytest.mark.parametrize("sizes", [(64,), (64, 48), (48, 64)])
def test_blocks_of_one_class_of_which_the_loss_reads_some(sizes: tuple[int, ...]) -> None:
    """Heads without gradients have no backward, so their blocks have other options. Sizes and heads come in turns."""
    read = [(0,), (0, 2), (1,), (0, 1, 2), (0,), (2,)]
    results = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = HeadsOfOneClass()
        if attached:
            handle = attach(model, "60%", costs="flops", on_infeasible="least")
        found: list[Any] = []
        torch.manual_seed(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rockmate.BudgetWarning)
            for size in sizes:
                for heads in read:
                    model.zero_grad()
                    outputs = model(randn(size, 24, seed=size))
                    sum(outputs[k].square().mean() for k in heads).backward()
                    found += [p.grad for p in model.parameters()]
        results.append([*found, *snapshot(model)])
    assert_same(results[1], results[0])
    assert any(p.plan is not None and p.plan.recomputed for p in handle.plans)


def test_a_share_is_not_settled_by_a_call_without_a_backward() -> None:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))))
    handle = attach(model, "60%", costs="flops")
    with pytest.warns(
        rockmate.BudgetWarning, match="The budget is a share of one call, as no step has shown yet how many"
    ):
        model(torch.empty(0, 16))
    model(randn(256, 16, seed=0)).sum().backward()
    assert handle.budget > 100_000
