"""Models whose forward is no one graph, and differs from step to step: one plan for each kind of step."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import importlib.util
import logging
import random
import re
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_same, snapshot
from models import randn
from torch import nn
from torch.utils.checkpoint import checkpoint

from rockmate import BudgetWarning, InfeasibleBudgetError, InputError, PlanError, attach, attached, measure_peak
from rockmate.calls.look import MOST_CALLS
from rockmate.calls.reasons import reason_of
from rockmate.follow.plan import FollowedPlan

WIDTH = 32


class Layer(nn.Module):
    """A residual layer with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)
        return result


class Layers(nn.Module):
    """Layers, of which ``drop`` says whether one is left out."""

    def __init__(self, drop: Callable[[], Any], layer: Callable[[], nn.Module] = Layer, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.drop():
                continue
            x = layer(x)
        return x


class Breaks(nn.Module):
    """Between its layers something is computed that TorchDynamo leaves to Python, and tensors are kept there."""

    def __init__(self, between: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.between = between
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
            x = self.between(self, x)
        return x


class Experts(nn.Module):
    """Rows go to the experts that a gate chooses; how many, follows from their values.

    ``asks``: Python asks whether there are rows. If not, TorchDynamo can capture all of it as one graph.
    """

    def __init__(self, plain: bool, asks: bool = True) -> None:
        super().__init__()
        self.asks = asks
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) if plain else Layer()
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == k)
            if not self.asks or len(rows) > 1:
                y = y.index_add(0, rows, expert(x[rows]) * best[rows, None])
        return x + y


class Chooses(nn.Module):
    """Rows are chosen by their values, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = layer(x)
            if k % 3 == 1:
                x = x[x.mean(-1) > -0.2]
        return x


class Ends(nn.Module):
    """Layers, and what NumPy then makes of their result."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers, self.then = nn.Sequential(*(Layer() for _ in range(4))), then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.layers(x))


class Checkpointed(nn.Module):
    """Every second layer is a reentrant checkpoint, whose backward runs another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=True) if k % 2 else layer(x)
            if x.detach().sum() > 1e9:
                x = x * 0
        return x


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH)


def noise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(numpy.random.randn(WIDTH).astype("float32"))


def median(x: torch.Tensor) -> torch.Tensor:
    return x + float(numpy.median(x.detach().numpy()))


def remembers(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.seen.append(float(x.detach().sum()))  # type: ignore[union-attr, operator]
    return x


def in_python(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numpy.random.rand(1), dtype=x.dtype) * x.sin() if random.random() < 2 else x


def branches(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x.relu() if float(x.detach().mean()) > 0 else x * 2


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers dropped by torch": lambda: Layers(lambda: torch.rand([]) < 0.3),
    "layers dropped by Python": lambda: Layers(lambda: random.random() < 0.3),
    "layers dropped by NumPy": lambda: Layers(lambda: numpy.random.rand() < 0.3),
    "torch's own layers dropped": lambda: Layers(lambda: torch.rand([]) < 0.3, encoder_layer),
    "remembers": lambda: Breaks(remembers),
    "draws in Python": lambda: Breaks(in_python),
    "branches": lambda: Breaks(branches),
    "experts": lambda: Experts(plain=False),
    "sequential experts": lambda: Experts(plain=True),
    "experts in one graph": lambda: Experts(plain=True, asks=False),
    "chosen rows": Chooses,
    "noise of NumPy": lambda: Ends(noise),
    "a median by NumPy": lambda: Ends(median),
    "reentrant checkpoints": Checkpointed,
}


def made(name: str) -> nn.Module:
    """The model, the same on every call."""
    torch.manual_seed(0)
    return MODELS[name]()


def batches(count: int, rows: int = 512) -> list[torch.Tensor]:
    """One for each step."""
    return [randn(rows, WIDTH, seed=k) for k in range(count)]


def seeded() -> None:
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)


def one(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A step; its loss."""
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()  # type: ignore[no-any-return]


def trained(model: nn.Module, steps: int) -> list[Any]:
    """Everything that must be equal."""
    seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: list[Any] = []
    for x in batches(steps):
        found.append(one(model, x))
        found += (None if p.grad is None else p.grad.clone() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *snapshot(model), random.getstate(), str(numpy.random.get_state()), str(getattr(model, "seen", ""))]


def eager_peak(name: str, steps: int) -> int:
    """The largest of some steps."""
    model, peaks = made(name), []
    seeded()
    for x in batches(steps):
        peaks.append(measure_peak(lambda x=x: one(model, x), "cpu"))  # type: ignore[misc]
        model.zero_grad()
    return max(peaks)


def again(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """The same step every time that it is called: random numbers are those of now."""
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()

    def run() -> None:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])
        one(model, x)
        model.zero_grad()

    return run


@pytest.mark.parametrize("name", MODELS)
def test_trains_as_eager_and_within_the_budget(name: str) -> None:
    """A step that was not seen before may exceed the budget; it is planned from the next such step on."""
    budget = int(0.75 * eager_peak(name, 8))
    model = made(name)
    handle = attach(model, budget, costs="flops")
    assert_same(trained(model, 8), trained(made(name), 8))
    seeded()
    for k, x in enumerate(batches(6)):
        step = again(model, x)
        step()
        step()
        peak = measure_peak(step, "cpu")
        assert peak <= budget, f"step {k}: {peak} of {budget}"
    plans = [planned.plan for planned in handle.plans]
    assert all(isinstance(plan, FollowedPlan) and plan.predicted_peak <= budget for plan in plans)
    assert max(plan.recomputed for plan in plans if plan is not None) > 0
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def always_the_same() -> nn.Module:
    torch.manual_seed(0)
    return Breaks(remembers)


def ready(budget: int | str, **options: Any) -> nn.Module:
    """A model whose step has a plan."""
    model = always_the_same()
    attach(model, budget, costs="flops", **options)
    for x in batches(3):
        one(model, x)
        model.zero_grad()
    return model


def plain_peak() -> int:
    model, (x,) = always_the_same(), batches(1)
    return measure_peak(lambda: one(model, x), "cpu")


def test_the_predicted_peak_is_the_measured_one() -> None:
    model = ready(int(0.7 * plain_peak()))
    handle = attached(model)
    assert handle is not None
    plan = handle.plan
    assert isinstance(plan, FollowedPlan)
    (x,) = batches(1)
    assert measure_peak(lambda: one(model, x), "cpu") == plan.predicted_peak


class Deep(nn.Module):
    """Twelve residual blocks; what one returns is read by the next one, and by the sum after that."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            torch._dynamo.graph_break()
            x = x + y
        return x


@pytest.mark.parametrize("share", ["90%", "60%", "40%"])
def test_memory_that_is_read_twice_is_counted_once(share: str) -> None:
    (x,) = batches(1)
    torch.manual_seed(0)
    model = Deep()
    again(model, x)()
    eager = measure_peak(again(model, x), "cpu")
    handle = attach(model, share, costs="flops")
    for _ in range(3):
        again(model, x)()
    plan = handle.plan
    assert isinstance(plan, FollowedPlan)
    assert plan.recomputed
    assert (plan.eager_peak, plan.predicted_peak) == (eager, measure_peak(again(model, x), "cpu"))


def test_a_share_is_of_the_step_without_recomputation() -> None:
    model = ready("70%")
    handle = attached(model)
    assert handle is not None
    assert isinstance(handle.plan, FollowedPlan)
    assert abs(handle.budget / (0.7 * plain_peak()) - 1) < 0.05
    assert handle.plan.recomputed > 0


def test_another_budget_needs_the_solver_only() -> None:
    model = ready("70%")
    handle = attached(model)
    assert handle is not None
    made_before = handle.plans_made
    frontier = handle.frontier()
    assert frontier.min_budget < handle.budget < frontier.max_budget
    overheads = [overhead for _, overhead in frontier.points]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[-1] == 0
    handle.budget = frontier.max_budget
    assert isinstance(handle.plan, FollowedPlan)
    assert handle.plan.recomputed == 0
    handle.budget = frontier.min_budget
    one(model, batches(1)[0])
    assert handle.plan.recomputed > 0
    assert handle.plans_made == made_before
    with pytest.raises(InfeasibleBudgetError, match="the smallest that can be planned"):
        handle.budget = frontier.min_budget // 2
    one(model, batches(1)[0])
    assert handle.plan.budget == frontier.min_budget
    handle.detach()
    with pytest.raises(InputError, match="was detached, and its plans are gone"):
        handle.frontier()


def test_a_budget_far_above_the_step_keeps_everything_and_a_later_one_does_not() -> None:
    model, eager = always_the_same(), always_the_same()
    handle = attach(model, "100 GiB", costs="flops")
    assert_same(trained(model, 3), trained(eager, 3))
    assert handle.plan is None  # nothing was captured
    handle.budget = int(0.7 * plain_peak())
    assert_same(trained(model, 3), trained(eager, 3))
    assert isinstance(handle.plan, FollowedPlan)
    assert handle.plan.recomputed > 0
    (x,) = batches(1)
    assert measure_peak(lambda: one(model, x), "cpu") <= handle.budget


def test_that_steps_in_other_threads_have_no_plan_is_said() -> None:
    model = always_the_same()
    attach(model, "70%", costs="flops")
    (x,) = batches(1)
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.warns(BudgetWarning, match="in another thread than the main one") as said,
    ):
        for _ in range(6):
            pool.submit(one, model, x).result()
    assert len(said) == 1


def test_values_that_are_read_need_no_setting_of_torchdynamo() -> None:
    """TorchDynamo logs, once in a process, what to set for such values to be in its graph."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            if x.detach().max() > 0:
                x = x + torch.ones(int((x > 0).sum())).mean()
            result: torch.Tensor = self.layers[1](x)
            return result

    from torch._dynamo.variables.tensor import TensorVariable

    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._dynamo.variables.tensor")
    logger.addHandler(handler)
    try:
        model = Reads()
        attach(model, "90%", costs="flops")
        for called, said in ((model, False), (torch.compile(Reads(), backend="eager"), True)):
            TensorVariable._warn_capture_scalar_outputs.cache_clear()
            for seed in range(3):
                called(randn(64, WIDTH, seed=seed)).sum().backward()
            assert any("capture_scalar_outputs" in str(record.msg) for record in logged) == said
    finally:
        logger.removeHandler(handler)


def test_a_followed_plan_is_not_saved(tmp_path: Path) -> None:
    handle = attached(ready("70%"))
    assert handle is not None and handle.plan is not None
    with pytest.raises(PlanError, match="cannot be saved"):
        handle.plan.save(tmp_path / "plan.json")


def test_a_budget_that_is_too_small() -> None:
    with pytest.raises(
        InfeasibleBudgetError, match=r"the forward of Breaks is followed operation by .* What sets it is "
    ):
        ready("20%")
    with pytest.warns(BudgetWarning, match="The plan of least memory runs instead"):
        model = ready("20%", on_infeasible="least")
    eager = always_the_same()
    for x in batches(3):
        one(eager, x)
        eager.zero_grad()
    assert_same(trained(model, 2), trained(eager, 2))


class Heads(nn.Module):
    """Many small parts, of which each keeps less than a hundredth of what a large one at the end takes."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()) for _ in range(12)
        )
        self.large = nn.Sequential(nn.Linear(WIDTH, 4000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = x[:, :8]
        for head in self.small:
            for _ in range(6):
                z = head(z).sin()
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        return self.large(x).mean() + z.mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("given", ["50%", 300_000])
@pytest.mark.parametrize("sizes", [(16, 17, 18, 19), (16, 12, 8, 4)], ids=["larger", "smaller"])
def test_a_budget_that_cannot_hold_is_refused_at_the_second_call(given: str | int, sizes: tuple[int, ...]) -> None:
    """Also where each step is of another size: what no plan fits may not come again. It is said once."""
    model = Breaks(lambda _, x: x)
    model.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))  # nearly all is gradients
    handle = attach(model, given, costs="flops", cache=False)
    first, *others = [torch.randn(n, 256) for n in sizes]
    model(first).square().mean().backward()
    with pytest.raises(InfeasibleBudgetError, match=r"no plan fits a budget of .*the smallest that can be planned is"):
        model(others[0])
    handle.budget = "100%"
    for x in others:
        model.zero_grad()
        model(x).square().mean().backward()


def test_a_minimum_that_is_stated_holds_when_it_is_asked_for() -> None:
    torch.manual_seed(0)
    eager, x = Heads(), randn(40, WIDTH, seed=0)
    model = copy.deepcopy(eager)
    attach(model, 4000, costs="flops")
    with pytest.raises(InfeasibleBudgetError, match="the smallest that can be planned") as raised:
        for _ in range(3):
            model(x).backward()
            model.zero_grad()
    del model
    model = copy.deepcopy(eager)
    handle = attach(model, raised.value.min_budget, costs="flops")
    for _ in range(4):
        model(x).backward()
        model.zero_grad()
    assert isinstance(handle.plan, FollowedPlan)
    assert measure_peak(lambda: model(x).backward(), "cpu") <= raised.value.min_budget


def test_a_budget_that_no_plan_fits_is_refused_when_it_is_set() -> None:
    model = ready("70%")
    handle = attached(model)
    assert handle is not None
    before, (x,) = handle.budget, batches(1)
    plan = handle.plan
    with pytest.raises(InfeasibleBudgetError, match=r"no plan fits a budget of 1\.00 KiB"):
        handle.budget = "1 KiB"
    assert handle.budget == before
    assert isinstance(plan, FollowedPlan) and isinstance(handle.plan, FollowedPlan)
    assert handle.plan.predicted_peak == plan.predicted_peak
    assert measure_peak(again(model, x), "cpu") <= before


def test_what_a_plan_prints() -> None:
    handle = attached(ready("70%"))
    assert handle is not None
    assert isinstance(handle.plan, FollowedPlan)
    text = str(handle.plan)
    assert text.splitlines()[:2] == ["inputs              x float32[512, 32]", "mode                train, no autocast"]
    assert re.search(r"^predicted peak .* MiB, in the .*(loss|forward|backward)", text, re.MULTILINE)
    assert "followed, since" in text and handle.reason in text
    assert "predicted peak" in handle.plan._repr_html_()
    assert handle.plan.call == ("x float32[512, 32]", "train")
    curve = handle.frontier()
    assert handle.plan.eager_peak == curve.max_budget > handle.plan.predicted_peak
    assert str(curve).count("%") == 2 * len(curve.table()) and curve.baselines == ()
    assert handle.reason
    assert [planned.name for planned in handle.plans] == ["x float32[512, 32], train"]
    assert handle.plan is not None
    assert "fwd." in handle.plan.program()


def test_the_memory_of_a_step_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    handle = attached(ready("70%"))
    assert handle is not None and isinstance(handle.plan, FollowedPlan)
    plan = handle.plan
    axes = plan.plot_memory(tmp_path / "step.png").axes[0]
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    stairs = {patch.get_label(): patch.get_data() for patch in axes.patches}
    assert set(stairs) == {"forward", "run again", "backward", "if everything were kept"}
    assert max(stairs["backward"].values) == pytest.approx(plan.predicted_peak / 2**20)
    assert [line.get_ydata()[0] for line in axes.get_lines()] == [plan.budget / 2**20]


def test_gradients_that_stay_and_graphs_that_are_kept() -> None:
    """Accumulation, and a second backward of one graph."""
    model, eager = ready("70%"), always_the_same()
    for x in batches(3):
        one(eager, x)
        eager.zero_grad()

    def train(model: nn.Module) -> Iterator[Any]:
        seeded()
        for x in batches(3):
            one(model, x)
        loss = model(batches(1)[0]).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        yield loss.detach()
        yield from snapshot(model)

    with pytest.warns(BudgetWarning, match="retain_graph"):
        ours = [*train(model)]
    assert_same(ours, [*train(eager)])


def test_nothing_stays_allocated_and_copies_are_plain() -> None:
    model = ready("70%")
    (x,) = batches(1)
    one(model, x)
    model.zero_grad()

    def without_backward() -> None:
        model(x)

    assert measure_peak(without_backward, "cpu") > 0
    copied = copy.deepcopy(model)
    assert attached(copied) is None
    handle = attached(model)
    assert handle is not None
    handle.detach()
    seeded()
    ours = [one(model, x), *snapshot(model)]
    seeded()
    assert_same([one(copied, x), *snapshot(copied)], ours)


class Casts(nn.Module):
    """Writes into its input, and gives its weights the memory of others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
            y = x + 0
            y *= torch.rand_like(y)
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
            y *= torch.rand_like(y)
            self.last = self.last.to(torch.float32)
            x = x + self.last(y)
        return x


def test_what_cannot_be_planned_runs_as_it_is_and_was_not_touched() -> None:
    """Also after an optimizer has changed weights, which counts in their versions."""
    models = []
    for k in range(2):
        torch.manual_seed(0)
        models.append(Casts())
        if k:
            attach(models[1], int(3e6), costs="flops", on_infeasible="least")
    assert_same(trained(models[1], 4), trained(models[0], 4))


def test_a_step_in_which_everything_is_left_out() -> None:
    drops = iter([False] * 3 * 6 + [True] * 6 + [False] * 2 * 6)
    torch.manual_seed(0)
    model = Layers(lambda: next(drops))
    handle = attach(model, "90%", costs="flops")
    for k, x in enumerate(batches(6)):
        x.requires_grad_()
        one(model, x)
        model.zero_grad()
        assert k in (0, 1, 3) or isinstance(handle.plan, FollowedPlan)  # of the step of nothing there is none


def test_a_share_is_of_the_largest_step_so_far() -> None:
    depth = iter([3] * 3 + [6] * 4)

    class Deepens(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            count = next(depth)
            for k, layer in enumerate(self.layers):
                torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
                if k < count:
                    x = layer(x)
            return x

    torch.manual_seed(0)
    model = Deepens(lambda: False)
    handle = attach(model, "90%", costs="flops")
    budgets = []
    for x in batches(7):
        one(model, x)
        model.zero_grad()
        budgets.append(handle.budget if handle.plan is not None else 0)
    assert 0 < budgets[2] < budgets[-1]


def test_no_input_is_held() -> None:
    """Not by the error that says why the call is no single graph, nor by what is known of the step."""
    model = always_the_same()
    attach(model, "70%", costs="flops")
    for k in range(3):
        x = randn(512, WIDTH, seed=k)
        one(model, x)
        model.zero_grad()
        gone = weakref.ref(x)
        del x
        gc.collect()
        assert gone() is None, k


def test_other_sizes_carry_the_schedules_over() -> None:
    model, eager = ready("70%"), always_the_same()
    for x in batches(3):
        one(eager, x)
        eager.zero_grad()

    def train(model: nn.Module) -> Iterator[Any]:
        seeded()
        for rows in (512, 300, 512, 128, 300):
            yield one(model, batches(1, rows)[0])
        yield from snapshot(model)

    assert_same([*train(model)], [*train(eager)])


def test_a_size_that_came_often_is_planned_for_once() -> None:
    model = ready("70%")
    plans = []
    for x in batches(14, 480):
        one(model, x)
        plans.append(attached(model).plan)  # type: ignore[union-attr]
        model.zero_grad()
    assert plans[10] is not plans[2]
    assert plans[10:] == [plans[10]] * 4


class Annealed(nn.Module):
    """Layers that Python looks into; a number scales them, another one says how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.name = nn.ModuleList(Layer() for _ in range(6)), ""

    def forward(self, x: torch.Tensor, scale: float, name: str, count: int = 6) -> torch.Tensor:
        self.name = name
        for layer in self.layers[:count]:
            x = layer(x) * scale
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        return x


def test_numbers_that_change_what_is_computed_in_no_way_make_no_plans() -> None:
    """Nor do texts. One that does is told from the others."""

    def train(model: nn.Module) -> Iterator[Any]:
        seeded()
        for k, x in enumerate(batches(12)):
            loss = model(x, 1 + k / 8, f"batch {k}", 6 if k < 8 else 4).square().mean()
            loss.backward()
            yield loss
        yield from snapshot(model)

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Annealed())
    handle = attach(models[0], "70%", costs="flops")
    assert_same([*train(models[0])], [*train(models[1])])
    assert len(handle.plans) < 6
    assert handle.plan is not None


def test_the_reason_after_too_many_captures_says_what_to_do() -> None:
    said = reason_of(RuntimeError("Hard failure due to fullgraph=True"))
    assert said.startswith("it was captured too often")
    assert said.endswith("keep that in a tensor (a buffer), or outside of the model")


class Forces(nn.Module):
    """Energies, and forces by a backward inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = self.layers(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy - force


@pytest.mark.filterwarnings("ignore:.*:rockmate.BudgetWarning")
def test_a_backward_inside_forward_is_not_captured() -> None:
    """Else TorchDynamo breaks up the hooks that it calls, and leaves torch.func's state wrong for the whole process."""
    torch.manual_seed(0)
    model = Forces()
    eager = copy.deepcopy(model)
    attach(model, "80%", costs="flops", on_infeasible="least")
    assert_same(trained(model, 5), trained(eager, 5))
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert torch._C._vmapmode_increment_nesting() == 1
    torch._C._vmapmode_decrement_nesting()


def test_the_largest_sizes_of_all_parts_together_are_no_reason_to_refuse() -> None:
    """Batches of two sizes, whose rows go to experts: a step of the most rows of each expert never comes."""
    sizes = [512, 128] * 6

    def trained(model: nn.Module) -> list[Any]:
        found = []
        for k, rows in enumerate(sizes):
            seeded()
            found.append(one(model, torch.randn(rows, 32, generator=torch.Generator().manual_seed(k))))
            model.zero_grad()
        return found

    torch.manual_seed(0)
    eager = Experts(plain=False)
    model = copy.deepcopy(eager)
    peak = max(measure_peak(again(eager, torch.randn(rows, 32))) for rows in set(sizes))
    eager.zero_grad()
    expected = trained(eager)
    attach(model, int(0.8 * peak), costs="flops")
    assert_same(trained(model), expected)
    model = Experts(plain=False)
    attach(model, int(0.2 * peak), costs="flops")
    with pytest.raises(InfeasibleBudgetError, match="the smallest that can be planned"):
        for x in batches(4):
            one(model, x)


class Packed(nn.Module):
    """Computes with the tokens that ``keep`` keeps, and then with the batch."""

    def __init__(self, grown: bool) -> None:
        super().__init__()
        self.tokens, self.grown = nn.Embedding(64, 16), grown
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)[keep]
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if self.grown:
            return x * x.new_ones(keep.shape[0]).sum()
        return x.sum(0).expand(keep.shape[0], -1) + x.new_zeros(keep.shape[0], 1)


@pytest.mark.parametrize("grown", [False, True])
def test_a_size_that_came_twice_is_no_constant(grown: bool) -> None:
    """Two batches of one size keep other numbers of tokens. That does not show that no number depends on the batch."""

    def losses(budget: str | None) -> Iterator[tuple[torch.Size, float]]:
        torch.manual_seed(0)
        model = Packed(grown)
        if budget:
            attach(model, budget, costs="flops", cache=False)
        drawn = torch.Generator().manual_seed(0)
        for batch, length in ((16, 40), (16, 40), (8, 64), (1, 40), (4, 33), (8, 40)):
            ids = torch.randint(64, (batch, length), generator=drawn)
            keep = torch.arange(length) < torch.randint(1, length + 1, (batch, 1), generator=drawn)
            y = model(ids, keep)
            y.square().sum().backward()
            yield y.shape, float(y.detach().square().sum())

    assert list(losses("5 MiB")) == list(losses(None))


class Derives(nn.Module):
    """Its residual has the derivative of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
        return slope.square().mean()


@pytest.mark.filterwarnings("ignore:.*:rockmate.BudgetWarning")
def test_a_derivative_inside_forward_is_a_part_of_the_step() -> None:
    model = Derives()
    eager = copy.deepcopy(model)
    attach(model, "90%", costs="flops", on_infeasible="least")
    for k in range(5):
        for m in (model, eager):
            m(randn(64, 2, seed=k)).backward()
    assert_same(snapshot(model), snapshot(eager))


def backward_under_a_profiler(loss: torch.Tensor) -> None:
    with torch.profiler.profile():
        loss.backward()


@pytest.mark.filterwarnings("ignore:backward was called with retain_graph")
@pytest.mark.parametrize(
    ("why", "does"),
    [
        ("a profiler was started", backward_under_a_profiler),
        ("backward kept its graph", lambda loss: loss.backward(retain_graph=True)),
        ("no backward came before the next forward", lambda loss: None),
        ("no backward came to their outputs: the loss raised an error", lambda loss: loss.detach_()),
    ],
)
def test_it_is_said_why_steps_cannot_be_observed(why: str, does: Callable[[torch.Tensor], Any]) -> None:
    torch.manual_seed(0)
    model, done = Breaks(lambda model, x: x), []
    attach(model, "50%", costs="flops")
    with pytest.warns(
        BudgetWarning, match=rf"calls with x .*, train: 3 steps could not be observed .*\({why}[^;]*\)\. What"
    ):
        for k in range(4 * MOST_CALLS):  # a call that is looked at waits for so many others
            loss = model(randn(64, WIDTH, seed=k)).square().mean()
            does(loss)
            done.append(loss)  # what has no backward stays


def test_it_is_said_once_that_backwards_fail() -> None:
    """Not that no backward came; and steps that end are planned for."""

    def fails(_: torch.Tensor) -> None:
        raise ValueError

    model = Breaks(lambda model, x: x)
    handle = attach(model, "70%", costs="flops")

    def step(k: int, bad: bool) -> None:
        y = model(randn(64, WIDTH, seed=k))
        if bad:
            y.register_hook(fails)
        with contextlib.suppress(ValueError):
            y.sum().backward()

    with pytest.warns(BudgetWarning, match=r"3 steps raised an error \(backward failed\), and a plan") as said:
        for k in range(8):
            step(k, bad=True)
    assert len(said) == 1
    assert handle.plan is None
    gc.collect()  # the errors hold what forward returned
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        for k in range(3):
            step(k, bad=False)
    assert handle.plan is not None


class Packs(nn.Module):
    """What its backward reads is kept by hooks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            return self.layer(x).sin()


def test_it_is_said_where_hooks_of_the_models_own_keep_everything() -> None:
    model = Packs()
    attach(model, "50%", costs="flops")
    with pytest.warns(BudgetWarning, match=r"could not be observed .*hooks of saved tensors within forward keep it"):
        for k in range(6):
            model(randn(64, WIDTH, seed=k)).square().mean().backward()


def chooses_rows(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x[x.mean(-1) > -1e9]


def prints(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    print(end="")  # noqa: T201
    return x


def branches_on_a_value(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 1e9 else x.sin()


def reads_a_clock(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * (time.time() > 0)


def reads_a_number(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * x.mean().item()


def calls_numpy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + float(numpy.sum(x.detach().numpy()))


def reads_numbers(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + sum(x.detach()[0].tolist())


def decides_in_numpy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * float(numpy.clip(x.mean().item(), 0.5, 2))


def indexes_by_a_number(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + x[x.detach()[:, 0].argmax().item(), :1]


def draws(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * OWN.uniform(0.5, 1)


def draws_from_a_generator(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape, generator=GENERATOR)


def penalizes(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
    return x + slope


def derives(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + torch.func.grad(lambda y: y.square().sum())(x)


def disables_hooks(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        return x.sin()


def is_disabled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return SKIPPED(x)  # type: ignore[no-any-return]


def fills(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    LAST.append(x.shape[0])
    return x + len(LAST)


def catches(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(RuntimeError):
        return x @ torch.zeros(3, 4)
    return x.sin()


OWN, GENERATOR, LAST = random.Random(0), torch.Generator(), collections.deque([0], maxlen=3)
SKIPPED = torch.compiler.disable(torch.sin)


@pytest.mark.parametrize(
    ("between", "instead"),
    [
        (reads_numbers, "Tensor.tolist() with non-integer tensor at {}: compute with the tensor, or return it"),
        (decides_in_numpy, "Python decides, or counts, by values in a tensor at {}: compute with the tensor"),
        (indexes_by_a_number, "Python decides, or counts, by values in a tensor at {}: compute with the tensor"),
        (draws, "draws from a random.Random at {}, whose numbers would be the capture's: draw from torch's generators"),
        (draws_from_a_generator, "(Generator) at {}: draw from torch's own generator"),
        (derives, "derivatives are computed inside forward at {}: leave it there"),
        (penalizes, "autograd_ops=False` at {}: leave it there"),
        (
            disables_hooks,
            "hooks of saved tensors are disabled inside forward (disable_saved_tensors_hooks) at {}: move",
        ),
        (
            is_disabled,
            "`torch.compiler.disable()`d function (_VariableFunctionsClass.sin) at {}: remove torch.compiler.disable",
        ),
        (fills, "a deque with maxlen=3 at {}, which TorchDynamo takes for one without: use a list"),
        (catches, " at {}: move it out of forward"),
        (chooses_rows, "sizes of getitem at {} depend on values: keep all rows and mask them"),
        (prints, "(print) at {}: move it out of forward"),
        (branches_on_a_value, "branching at {}: compute both ways and choose with torch.where"),
        (reads_a_clock, "does not trace time.time at {}: move it out of forward"),
        (reads_a_number, "reads from a tensor at {}: compute with the tensor"),
        (calls_numpy, "NumPy's sum at {} would be computed by torch, whose numbers are others: compute it with torch"),
    ],
)
def test_the_reason_has_the_users_line_and_what_to_write_instead(
    between: Callable[[nn.Module, torch.Tensor], torch.Tensor], instead: str
) -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](between(self, self.layers[0](x)))  # type: ignore[no-any-return]

    model = Calls()
    handle = attach(model, "90%", costs="flops", on_infeasible="least")
    model(randn(8, WIDTH, seed=0))
    within = between in (disables_hooks, catches)  # another block
    place = f"{Path(__file__).name}:{between.__code__.co_firstlineno + 1 + within}"
    assert instead.format(place) in handle.reason
    assert place in handle.reason


def test_the_reason_has_the_line_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user's own code has none, or beside the line that calls the library; it says what the library reads."""
    made = tmp_path / "site-packages" / "parts" / "deep" / "layers.py"
    made.parent.mkdir(parents=True)
    made.write_text(
        "import torch\n\n\nclass Drops(torch.nn.Linear):\n    layerdrop = 0.1\n\n    def forward(self, x):\n"
        "        if torch.rand([]) < self.layerdrop:\n            return x\n        return super().forward(x)\n"
    )
    spec = importlib.util.spec_from_file_location("layers_of_a_library", made)
    assert spec is not None and spec.loader is not None
    parts = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "layers_of_a_library", parts)
    spec.loader.exec_module(parts)
    inside = "in parts/deep/layers.py:8 (if torch.rand([]) < self.layerdrop:): the line is a library's, so look for a"

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = parts.Drops(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x).sin()  # type: ignore[no-any-return]

    line = f" at {Path(__file__).name}:{Around.forward.__code__.co_firstlineno + 1},"
    for model, place in ((parts.Drops(WIDTH, WIDTH), ""), (Around(), line)):
        handle = attach(model, "90%", costs="flops", on_infeasible="least")
        model(randn(8, WIDTH, seed=0))
        assert f"branching{place} {inside}" in handle.reason


class Tasks(nn.Module):
    """Two losses on one body; Python reads which."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Layer() for _ in range(6)))

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if len(rows):
            return x[: int(rows)].square().mean()
        return x.mean().square()


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0, 0, 1), (1, 1, 0)])
def test_kinds_of_steps_that_take_turns_are_all_planned(order: tuple[int, ...]) -> None:
    """The step after one of a new kind is of another kind."""
    torch.manual_seed(0)
    model, x = Tasks(), randn(512, WIDTH, seed=0)
    kinds = [torch.tensor([300]), torch.zeros(0)]

    def train(k: int) -> None:
        model.zero_grad()
        model(x, kinds[k]).backward()

    budget = 7 * min(measure_peak(lambda k=k: train(k)) for k in (0, 1)) // 10
    handle = attach(model, budget, costs="flops", cache=False)
    for _ in range(5):
        for k in order:
            train(k)
    taken = []
    for k in (0, 1):
        train(k)
        model.zero_grad()
        taken.append(measure_peak(lambda k=k: train(k)))
    assert max(taken) <= budget
    assert len(handle.plans) >= 2, "both kinds were observed"
    assert all(isinstance(planned.plan, FollowedPlan) for planned in handle.plans)


class Routed(nn.Module):
    """Experts, some of which get no rows in some steps: the operations are those of other steps, with other sizes."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            (rows,) = (chosen == k).nonzero(as_tuple=True)
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]))
        return x + out


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 127, 129), (94, 89, 73), (125, 131, 0), (0, 126, 130), (90, 87, 79), (130, 126, 0)],
        [(100, 156), (156, 100), (0, 256), (256, 0), (128, 128), (200, 56)],
        [(64, 64, 64, 64), (0, 85, 86, 85), (85, 0, 86, 85), (85, 86, 0, 85), (128, 0, 0, 128), (0, 0, 128, 128)],
    ],
)
def test_ways_that_differ_in_sizes_only_do_not_hand_over_to_each_other_for_ever(rows: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    eager = Routed(len(rows[0]))
    model = copy.deepcopy(eager)
    attach(model, "70%", costs="flops", cache=False, on_infeasible="least")
    for seed, counts in enumerate([*rows, *rows]):
        chosen = torch.cat([torch.full((n,), k) for k, n in enumerate(counts)])
        for m in (model, eager):
            m.zero_grad()
            m(randn(len(chosen), WIDTH, seed=seed), chosen).square().mean().backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])


class Dropping(nn.Module):
    """Layers that are left out at random: as many ways to compute as subsets of them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 128), nn.Linear(128, 300)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 128))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            if torch.rand(()) >= 0.3:
                x = x + layer(x)
        return self.head(x)


def test_ways_that_were_not_seen_are_within_the_budget() -> None:
    """What is made again on the way to something else is not held where that would exceed it."""
    torch.manual_seed(0)
    eager, x, y = Dropping(9), randn(512, 64, seed=0), torch.randint(300, (512,))
    model = copy.deepcopy(eager)

    def step(m: nn.Module, seed: int) -> None:
        m.zero_grad()
        torch.manual_seed(seed)
        F.cross_entropy(m(x), y).backward()

    step(eager, 0)
    budget = 53 * max(measure_peak(lambda k=k: step(eager, k)) for k in range(20)) // 100
    attach(model, budget, costs="flops", cache=False)
    taken = []
    for seed in range(70):
        step(eager, seed)
        if seed < 40:
            step(model, seed)
        else:
            taken.append(measure_peak(lambda seed=seed: step(model, seed)))
        assert_same([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])
    assert max(taken) <= budget
