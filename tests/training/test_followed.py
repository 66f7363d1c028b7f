"""Models whose forward no capture carries: their own Python runs, and is followed, behind both doors."""

from __future__ import annotations

import copy
import functools
import logging
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from against_eager import WAYS
from models import in_turn, randn
from torch import nn
from torch.nn import functional as F

import rockmate
from rockmate import Rockmate, measure_peak
from rockmate.follow import solving
from rockmate.follow.known import Watch
from rockmate.follow.plan import FollowedPlan, find_least
from solvers import InfeasibleError

X = randn(512, 64, seed=0)
STEPS = 7


class Layers(nn.Module):
    """Six layers in a loop; subclasses do something between them that TorchDynamo does not capture."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        for k, layer in enumerate(self.layers):
            x = self.between(k, F.gelu(layer(x)))
        return x

    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        return x


class OwnGenerator(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(3)

    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(x.shape, generator=self.noise) if k == 2 else x


class SeededInForward(OwnGenerator):
    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        self.noise.manual_seed(7 + self.calls % 2)
        self.calls += k == 5
        return super().between(k, x)


class Item(Layers):
    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        return x * min(1.0, 1 + float(x.detach().mean().item())) if k == 2 else x


class CumulativeAverage(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64, momentum=None)

    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(x) if k == 2 else x
        return result


class Cached(Layers):
    @functools.cached_property
    def scale(self) -> float:
        return 0.5

    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Prints(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return super().forward(x)

    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        sys.stdout.write(f"{k} {self.calls}")
        return x


class Argsort(Layers):
    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        order = np.argsort(x.detach().mean(1).numpy(), kind="stable")
        return x[torch.from_numpy(order)]


class ForkRng(Layers):
    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(k)
            return F.dropout(x, 0.1)


class KeyOfText(Layers):
    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        kind = f"{(x.detach().sum() > 0).long()}"
        return {"tensor(0)": x.sin, "0": x.sin, "tensor(1)": x.cos, "1": x.cos}[kind]()


class RetainGrad(Layers):
    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        if k == 3:
            x.retain_grad()
            self.inside = x
        return x


class HookOnFunction(Layers):
    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        assert x.grad_fn is not None
        if k == 4:
            self.calls += 1
        if k == 4 and self.calls > 2:
            x.grad_fn.register_prehook(lambda g: (g[0] * 1.5,))
        return x


class ReadsGradients(Layers):
    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        sys.stdout.write(f"{k}")
        gradient = self.layers[0].weight.grad
        return x if gradient is None else x * (1 + gradient.norm())


class LeavesInside(Layers):
    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        if k != 2:
            return x
        sys.stdout.write(f"{k}")
        self.leaf = torch.full((64,), 0.5 + self.calls).requires_grad_()
        self.calls += 1
        return x * self.leaf


class PackedInside(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        for k, layer in enumerate(self.layers):
            if k in (2, 3):
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
                    x = F.gelu(layer(x))
            else:
                x = F.gelu(layer(x))
        return x


class DrawsSometimes(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        DrawsSometimes.calls += 1
        return x + torch.rand_like(x) if DrawsSometimes.calls % 3 == 0 else x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * 2


class OwnFunction(Layers):
    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        sys.stdout.write(f"{k}")
        return DrawsSometimes.apply(x) if k == 2 else x


class WritesInPlace(Layers):
    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        sys.stdout.write(f"{k}")
        if k % 2:
            return x
        y = x.clone()
        y[:, ::2] *= 0.5
        return y.add_(x, alpha=0.1)


class WritesBuffer(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))

    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        sys.stdout.write(f"{k}")
        y = x + self.mean  # before it is written
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return y


class WritesThroughNumpy(Layers):
    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        if k == 2:
            x.detach().numpy()[:, 0] *= 0.5
        return x


class RecordsFunctions(Layers):
    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        with torch.profiler.record_function(f"layer {k}"):
            return x.sin() if self.calls % 4 else x


class DetachedPart(Layers):
    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        sys.stdout.write(f"{k}")
        with torch.no_grad():
            weight = (x * 2).softmax(-1)
        return x * weight if k == 3 else x


class Dictionary(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        sys.stdout.write(f"{len(y)}")
        return {"out": y, "unused": [y.cos(), None], "n": 3}


class Memory(Layers):
    """Values shared between calls through an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        sys.stdout.write(f"{k}")
        if k == 3:
            x = x if self.last is None else x + self.last
            self.last = x.detach()
        return x


class BatchNorms(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(6))

    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        sys.stdout.write(f"{k}")
        result: torch.Tensor = self.norms[k](x)
        return result


MODELS = [
    OwnGenerator,
    SeededInForward,
    Item,
    CumulativeAverage,
    Cached,
    Prints,
    Argsort,
    ForkRng,
    KeyOfText,
    RetainGrad,
    HookOnFunction,
    ReadsGradients,
    LeavesInside,
    PackedInside,
    OwnFunction,
    WritesInPlace,
    WritesBuffer,
    WritesThroughNumpy,
    RecordsFunctions,
    DetachedPart,
    Dictionary,
    Memory,
    BatchNorms,
]

AT_60 = [OwnGenerator, Item, CumulativeAverage, Cached, Prints, Argsort]
"""Must be planned at 60 % of eager's peak."""


def loss_of(result: Any) -> torch.Tensor:
    tensor = result["out"] if isinstance(result, dict) else result
    return tensor.square().mean()


def train(model: nn.Module, call: Callable[..., Any]) -> Iterator[Any]:
    """Some steps; what they show."""
    torch.manual_seed(1)
    DrawsSometimes.calls = 0
    for _ in range(STEPS):
        loss = loss_of(call(X))
        loss.backward()
        yield loss.detach()
        inside = getattr(model, "inside", None)
        yield None if inside is None or not isinstance(inside, torch.Tensor) else inside.grad
        leaf = getattr(model, "leaf", None)
        yield None if leaf is None else leaf.grad
        for p in model.parameters():
            yield None if p.grad is None else p.grad.clone()
        yield from (b.clone() for b in model.buffers())
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
                p.grad = None
        del loss, inside, leaf
    yield torch.get_rng_state()
    yield getattr(model, "calls", None)


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def planned(door: str, model: nn.Module, budget: Any) -> tuple[Callable[..., Any], Any]:
    """The call, and what has the plan."""
    if door == "attach":
        return model, rockmate.attach(model, budget, cache=False)
    rk = Rockmate(model, X, budget, cache=False)
    return rk, rk


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        same = torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b
        assert same, f"item {k} differs"


@pytest.mark.parametrize(("kind", "door"), in_turn(MODELS, WAYS))
def test_trains_as_eager(kind: type[nn.Module], door: str) -> None:
    eager = made(kind)
    expected = list(train(eager, eager))
    model = made(kind)
    call, handle = planned(door, model, "75%")
    assert_equal(list(train(model, call)), expected)
    assert handle.plan is not None


@pytest.mark.parametrize(("kind", "door"), in_turn(AT_60, WAYS))
def test_six_tenths_of_the_memory(kind: type[nn.Module], door: str) -> None:
    """The measured peak is the predicted one, within the budget."""
    model = made(kind)
    call, handle = planned(door, model, "60%")
    DrawsSometimes.calls = 0
    list(train(model, call))
    assert handle.plan.recomputed > 0
    peak = measure_peak(lambda: loss_of(call(X)).backward(), "cpu")
    assert peak == handle.plan.predicted_peak
    assert peak <= handle.budget <= 0.6 * handle.plan.eager_peak


def test_eager_peak_is_predicted() -> None:
    model = made(Item)
    eager = copy.deepcopy(model)
    handle = rockmate.attach(model, "60%", cache=False)
    list(train(model, model))
    assert measure_peak(lambda: loss_of(eager(X)).backward(), "cpu") == handle.plan.eager_peak


@pytest.mark.parametrize("kind", [OwnGenerator, Item, CumulativeAverage])
def test_the_frontier_of_a_model_is_that_of_its_rockmate_and_leaves_it_as_it_was(kind: type[Layers]) -> None:
    torch.manual_seed(0)
    model = kind()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    states = [v.get_state() for v in vars(model).values() if isinstance(v, torch.Generator)]
    found = rockmate.frontier(model, X, costs="flops")
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(
        torch.equal(v.get_state(), state)
        for v, state in zip((v for v in vars(model).values() if isinstance(v, torch.Generator)), states, strict=True)
    )
    assert model.calls == 0
    assert all(p.grad is None for p in model.parameters())
    rk = Rockmate(model, X, "100%", costs="flops")
    assert (found.min_budget, found.max_budget) == (rk.frontier().min_budget, rk.frontier().max_budget)
    assert 0 < found.min_budget < found.max_budget


@pytest.mark.parametrize("kind", [Layers, OwnGenerator])
def test_an_answer_says_nothing_of_trainings(kind: type[Layers], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "rockmate")
    rockmate.frontier(kind(), X, costs="flops")
    rockmate.estimate(kind(), X[:8], [16, 64])
    assert not [r.getMessage() for r in caplog.records if r.name == "rockmate"]


def test_after_a_plan_ahead_of_training_one_step_is_observed_and_nothing_solved_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches, looks = [], []
    found, look = solving.find, Watch.look
    monkeypatch.setattr(solving, "find", lambda *args: searches.append(0) or found(*args))
    monkeypatch.setattr(Watch, "look", lambda *args: looks.append(0) or look(*args))
    model = OwnGenerator()
    curve = rockmate.frontier(model, X, costs="flops")
    searches.clear(), looks.clear()
    rk = Rockmate(model, X, (curve.min_budget + curve.max_budget) // 2, costs="flops")
    supposed = rk.plan
    assert (len(searches), len(looks)) == (1, 1)
    for _ in range(5):
        rk(X).sum().backward()  # it takes less than was supposed
        rk.zero_grad()
    assert (len(searches), len(looks)) == (1, 2)
    assert rk.plan.recomputed > 0
    assert rk.plan.predicted_peak < supposed.predicted_peak
    assert measure_peak(lambda: rk(X).sum().backward(), "cpu") == rk.plan.predicted_peak


def test_a_plan_that_is_known_runs_and_is_told_where_a_later_search_ends_at_a_slower_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made(Item)
    with pytest.warns(rockmate.BudgetWarning, match="The plan of least memory runs instead"):
        handle = rockmate.attach(model, "1%", cache=False, on_infeasible="least")
        for _ in range(2):
            loss_of(model(X)).backward()
    least = handle.plan
    assert isinstance(least, FollowedPlan)
    slow = find_least(least.problem)
    assert least.predicted_overhead < slow.walk.overhead
    for module in ("plan", "solving"):
        monkeypatch.setattr(f"rockmate.follow.{module}.find", lambda *args: slow)
    curve = handle.frontier()
    assert least.predicted_peak == curve.min_budget
    assert curve.overhead(curve.min_budget) == least.predicted_overhead
    handle.budget = least.predicted_peak
    assert isinstance(handle.plan, FollowedPlan)
    assert (handle.plan.predicted_peak, handle.plan.schedule) == (least.predicted_peak, least.schedule)


def test_the_least_budget_of_the_frontier_holds_where_a_search_for_it_ends_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing_is_found(*args: Any) -> None:
        raise InfeasibleError("no schedule fits", 1, "")

    model = made(Item)
    handle = rockmate.attach(model, "100%", cache=False)
    for _ in range(2):
        loss_of(model(X)).backward()
    found = handle.frontier()
    monkeypatch.setattr(solving, "find", nothing_is_found)
    handle.budget = found.min_budget
    loss_of(model(X)).backward()
    assert handle.plan is not None
    assert handle.plan.predicted_peak == found.min_budget


def test_the_least_memory_is_that_of_steps_that_took_longer_elsewhere() -> None:
    model = made(Item)
    handle = rockmate.attach(model, "100%", cache=False)
    loss_of(model(X)).backward()
    assert isinstance(handle.plan, FollowedPlan)
    problem, draw = handle.plan.problem, random.Random(0)
    times = [[replace(n, time=draw.randrange(1000)) for n in problem.nodes] for _ in range(2)]
    first, second = (find_least(replace(problem, nodes=tuple(nodes))).schedule for nodes in times)
    assert first == second


class Warns(Layers):
    def between(self, k: int, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("seen", stacklevel=1)
        return x


class ReturnsALeafsSum(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        self.leaf = torch.zeros(64).requires_grad_()
        return super().forward(x + self.leaf)


def test_the_reason_of_leaves_made_inside_says_what_to_write_instead() -> None:
    model = made(ReturnsALeafsSum)
    handle = rockmate.attach(model, "100%", cache=False)
    loss_of(model(X)).backward()
    assert re.search(r"requires_grad_\(\) at test_followed.py:\d+: make that tensor outside of forward", handle.reason)


@pytest.mark.filterwarnings("ignore:seen")
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (ForkRng, "fork_rng"),
        (OwnGenerator, "Generator"),
        (Prints, "write"),
        (Argsort, "argsort"),
        (Warns, "_warnings.warn"),
    ],
)
def test_the_reason_names_what_is_not_captured_and_its_line(kind: type[Layers], named: str) -> None:
    model = made(kind)
    handle = rockmate.attach(model, "100%", cache=False)
    loss_of(model(X)).backward()
    assert re.match(rf".*\b{named}\b.* at test_followed.py:\d+.*: \w+", handle.reason)


class Masked(nn.Module):
    def __init__(self, **causal: bool) -> None:
        super().__init__()
        self.inner, self.causal = nn.Transformer(16, 2, 1, 1, 32, batch_first=True), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.inner(x, x, tgt_mask=mask, **self.causal)


def test_the_reason_of_masks_that_torch_reads_says_which_argument_to_give() -> None:
    x = randn(4, 12, 16, seed=0)
    reason = Rockmate(Masked(), x, 2**30, costs="flops").reason
    assert re.search(r"at test_followed.py:\d+: say whether each mask is causal", reason)
    for causal in (True, False):
        assert not Rockmate(Masked(tgt_is_causal=causal), x, 2**30, costs="flops").reason


def test_the_least_budget_that_a_sample_states_holds_in_training() -> None:
    """It was one of steps that find gradients there, as the first step on the sample had made them."""
    with pytest.raises(rockmate.InfeasibleBudgetError) as error:
        Rockmate(made(Prints), X, "5%", cache=False)
    rk = Rockmate(made(Prints), X, error.value.min_budget, cache=False)
    for _ in range(3):
        rk.zero_grad()
        loss_of(rk(X)).backward()
    assert rk.budget == error.value.min_budget


class EndsLarge(Prints):
    """Its outputs are there when its last backward takes most."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return (y @ torch.ones(64, 640)).tanh().reshape(-1, 64, 10).amax(-1).tanh()


def test_and_where_later_steps_hold_the_outputs_that_the_first_has_let_go() -> None:
    def step(model: nn.Module, hold: bool) -> None:
        model.zero_grad()
        held = model(X)
        loss = held.sum()
        if not hold:
            del held
        loss.backward()

    model = made(EndsLarge)
    rockmate.attach(model, "5%", cache=False)
    step(model, hold=False)
    with pytest.raises(rockmate.InfeasibleBudgetError, match="where outputs are held") as error:
        step(model, hold=False)
    again = made(EndsLarge)
    handle = rockmate.attach(again, error.value.min_budget, cache=False)
    for hold in (False, True, True, True):
        step(again, hold)
    assert handle.plan.predicted_peak <= error.value.min_budget == handle.budget


def test_a_schedule_that_is_known_serves_where_a_search_comes_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches end with their time, so that a second one may not find what the first has stated."""

    def ended(*_: Any) -> Any:
        raise InfeasibleError("no schedule fits", 10**9, "", None)

    model = made(Prints)
    handle = rockmate.attach(model, "70%", cache=False)
    loss_of(model(X)).backward()
    peak = handle.plan.predicted_peak
    monkeypatch.setattr("rockmate.follow.solving.find", ended)
    handle.budget = peak
    assert handle.plan.predicted_peak == peak == handle.budget
    with pytest.raises(rockmate.InfeasibleBudgetError):
        handle.budget = peak - 1


@dataclass
class Answer:
    """What a model may return."""

    logits: torch.Tensor
    seen: int


class Answers(OwnGenerator):
    def forward(self, x: torch.Tensor) -> Answer:
        return Answer(super().forward(x), len(x))


def test_outputs_in_attributes_are_planned_for_ahead_of_the_first_step() -> None:
    model, eager = made(Answers), made(Answers)
    handle = rockmate.attach(model, "70%", sample=X, cache=False)
    assert isinstance(handle.plan, FollowedPlan)
    for _ in range(3):
        losses = [loss_of(m(X).logits) for m in (model, eager)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Auxiliary(OwnGenerator):
    """Returns a number beside the output, which is computed from the first layers alone, or from the output."""

    def __init__(self, of_output: bool) -> None:
        super().__init__()
        self.of_output = of_output

    def forward(self, x: torch.Tensor) -> Any:
        early = self.between(2, F.gelu(self.layers[0](x)))
        y = early
        for layer in self.layers[1:]:
            y = F.gelu(layer(y))
        return y, (y if self.of_output else early).square().mean()


@pytest.mark.parametrize("of_output", [False, True])
def test_a_number_is_the_loss_of_those_outputs_only_that_it_is_computed_from(of_output: bool) -> None:
    torch.manual_seed(0)
    model = Auxiliary(of_output)
    handle = rockmate.attach(model, "70%", sample=X, costs="flops", cache=False)

    def step() -> None:
        y, number = model(X)
        (number if of_output else number + y.square().mean()).backward()

    for _ in range(2):
        assert 0.6 * handle.budget < measure_peak(step, "cpu") <= handle.budget
        model.zero_grad()
