"""Budgets that are many times what a step takes: nothing is captured, and what changes is noticed."""

from __future__ import annotations

import copy
import logging
import warnings
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from models import randn
from torch import nn
from torch.utils.checkpoint import checkpoint

from rockmate import Attachment, BudgetWarning, InfeasibleBudgetError, attach, measure_peak
from rockmate.calls.roomy import RoomyCalls

GIB = 2**30


class Net(nn.Module):
    """Layers, dropout, running statistics and a counter. ``times``: how often the last layer runs."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.norm, self.drop, self.times, self.calls = nn.BatchNorm1d(64), nn.Dropout(0.1), times, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns as many rows as ``x`` has."""
        self.calls += 1
        for layer in self.layers:
            x = self.drop(F.gelu(layer(x)))
        for _ in range(self.times):
            x = F.gelu(self.layers[-1](self.norm(x)))
        return x


class Checkpointed(Net):
    """Its first layers are checkpointed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As in ``Net``."""

        def first(x: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.layers[0](x))

        return super().forward(checkpoint(first, x, use_reentrant=False))


class Printing(Net):
    """What TorchDynamo captures no one graph of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As in ``Net``."""
        print(end="")  # noqa: T201
        return super().forward(x)


class Nested(Net):
    """Gets and returns dicts."""

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """As in ``Net``."""
        return {"y": super().forward(batch["x"])}


def captured(handle: Attachment) -> int:
    """How many graphs were captured."""
    return len(handle._capture.graphs)


def step(model: nn.Module, x: torch.Tensor) -> None:
    """One backward; gradients add up."""
    given = {"x": x} if isinstance(model, Nested) else x
    out = model(given)
    (out["y"] if isinstance(out, dict) else out).square().mean().backward()


def state(model: nn.Module) -> list[torch.Tensor]:
    """Everything that a step changes."""
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*gradients, *(b.clone() for b in model.buffers()), torch.get_rng_state(), torch.tensor(model.calls)]


def trained(model: nn.Module, rows: list[int], change: Callable[[nn.Module, int], None]) -> list[list[torch.Tensor]]:
    torch.manual_seed(1)
    found = []
    for k, n in enumerate(rows):
        change(model, k)
        step(model, randn(n, 64, seed=k))
        found.append(state(model))
        if k % 2:
            model.zero_grad()
    return found


def nothing(_: nn.Module, __: int) -> None:
    """No change."""


def same(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> bool:
    return all(len(s) == len(t) and all(map(torch.equal, s, t)) for s, t in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", [Net, Checkpointed, Printing, Nested])
def test_nothing_is_captured(kind: type[Net]) -> None:
    """Whatever sizes come."""
    torch.manual_seed(0)
    eager = kind()
    model = copy.deepcopy(eager)
    handle = attach(model, GIB, costs="flops", cache=False)
    rows = [32, 48, 48, 16, 64, 32, 8, 64, 63]
    assert same(trained(model, rows, nothing), trained(eager, rows, nothing))
    assert captured(handle) == 0 and handle.plan is None and not handle.reason
    assert {known.plan for known in handle.plans} == {None}


def test_one_line_tells_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """Not one for each size."""
    model = Net()
    attach(model, GIB, costs="flops", cache=False)
    with caplog.at_level(logging.INFO, "rockmate"):
        trained(model, [32, 64, 16, 48, 128], nothing)
    assert [r.message for r in caplog.records if "needs no plan" in r.message] == [caplog.records[0].message]
    assert len(caplog.records) == 1


def test_a_smaller_size_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger one is."""
    model, looks = Net(), []
    handle = attach(model, GIB, costs="flops", cache=False)
    original = handle._roomy.held
    monkeypatch.setattr(handle._roomy, "held", lambda *given: looks.append(given) or original(*given))
    trained(model, [64], nothing)
    trained(model, [16], nothing)  # the second call is measured again, whatever it is
    assert len(looks) == 2
    trained(model, [24], nothing)
    assert len(looks) == 2
    trained(model, [128], nothing)  # the fourth, and larger
    trained(model, [256], nothing)
    assert len(looks) == 4


@pytest.mark.parametrize("kind", [Net, Printing])
def test_a_first_step_that_takes_more_is_within_the_budget(kind: type[Net]) -> None:
    """Small parameters and inputs say nothing of many layers."""
    torch.manual_seed(0)
    eager = kind(times=60)
    x = randn(512, 64, seed=0)
    model, other = copy.deepcopy(eager), copy.deepcopy(eager)
    peak = measure_peak(lambda: step(eager, x))
    budget = peak * 6 // 10
    handle = attach(model, budget, costs="flops", cache=False)
    torch.manual_seed(1)
    first = measure_peak(lambda: step(model, x))
    assert first <= budget < peak
    assert captured(handle) == 0
    ours = [state(model)]
    torch.manual_seed(1)
    step(other, x)
    assert same(ours, [state(other)])
    rows = [512] * 4
    assert same(trained(model, rows, nothing), trained(other, rows, nothing))
    assert handle.plan is not None
    assert handle.plan.predicted_peak <= budget
    assert measure_peak(lambda: step(model, x)) <= budget


@pytest.mark.parametrize("times", [2, 20])
def test_what_its_python_does_grows(times: int) -> None:
    """Nothing of the call tells. The step after it is measured."""
    torch.manual_seed(0)
    eager = Net()
    model, x = copy.deepcopy(eager), randn(512, 64, seed=0)
    before = measure_peak(lambda: step(copy.deepcopy(eager), x))
    budget = 6 * before
    handle = attach(model, budget, costs="flops", cache=False)

    def grow(model: nn.Module, k: int) -> None:
        model.times = 1 if k < 4 else times

    rows = [512] * 8
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours = trained(model, rows, grow)
    assert same(ours, trained(eager, rows, grow))
    told = [str(w.message) for w in said if w.category is BudgetWarning]
    after = copy.deepcopy(eager)
    if measure_peak(lambda: step(after, x)) > budget:
        assert len(told) == 1 and "computes more than in the step that was measured" in told[0]
        assert handle.plan is not None
    else:
        assert told == []
    assert measure_peak(lambda: step(model, x)) <= budget


def test_layers_that_begin_to_train() -> None:
    """With their gradients the step takes more."""
    torch.manual_seed(0)
    eager = Net()
    model = copy.deepcopy(eager)
    handle = attach(model, GIB, costs="flops", cache=False)

    def thaw(model: nn.Module, k: int) -> None:
        for layer in list(model.layers)[:2]:
            layer.requires_grad_(k >= 3)

    rows = [32] * 6
    assert same(trained(model, rows, thaw), trained(eager, rows, thaw))
    assert len(handle.plans) == 2 and captured(handle) == 0


def test_a_budget_that_is_set_later_binds() -> None:
    """And one that does not again."""
    torch.manual_seed(0)
    eager, x = Net(times=6), randn(512, 64, seed=0)
    model = copy.deepcopy(eager)
    peak = measure_peak(lambda: step(copy.deepcopy(eager), x))
    handle = attach(model, GIB, costs="flops", cache=False)
    budgets = [GIB, GIB, int(0.7 * peak), int(0.7 * peak), GIB, GIB]
    torch.manual_seed(1)
    ours = []
    for k, budget in enumerate(budgets):
        handle.budget = budget
        step(model, randn(512, 64, seed=k))
        ours.append(state(model))
        assert handle.ran_freely == (k not in (2, 3))
        model.zero_grad()
    torch.manual_seed(1)
    theirs = []
    for k in range(len(budgets)):
        step(eager, randn(512, 64, seed=k))
        theirs.append(state(eager))
        eager.zero_grad()
    assert same(ours, theirs)


def test_no_tensor_of_the_caller_stays() -> None:
    """Nor of the graph."""
    model = Net()
    attach(model, GIB, costs="flops", cache=False)
    for k in range(3):
        x = randn(32, 64, seed=k).requires_grad_()
        y = model(x)
        held = weakref.ref(x), weakref.ref(y)
        y.sum().backward()
        del x, y
        assert [ref() for ref in held] == [None, None]


def test_a_forward_that_fails_leaves_nothing() -> None:
    """The next call is as the first one."""
    model = Net()
    handle = attach(model, GIB, costs="flops", cache=False)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(randn(3, 5, seed=0))
    step(model, randn(32, 64, seed=0))
    assert len(handle.plans) == 1 and handle.terms.steps.held() == 0


@pytest.mark.parametrize("kind", [Net, Printing])
def test_its_frontier_can_be_asked_for(kind: type[Net]) -> None:
    """That is planned apart, and changes nothing."""
    torch.manual_seed(0)
    model = kind(times=6)
    handle = attach(model, GIB, costs="flops", cache=False)
    step(model, randn(512, 64, seed=0))
    before, calls = state(model), model.calls
    found = handle.frontier()
    assert same([before], [state(model)]) and model.calls == calls
    assert found.min_budget < 0.8 * found.max_budget
    assert handle.plan is None and handle.frontier() == found


def test_numbers_that_change_are_no_new_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not measured again, and however many come, they are all known."""

    class Scaled(Net):
        def forward(self, x: torch.Tensor, rate: float = 1.0) -> torch.Tensor:
            """As in ``Net``."""
            return super().forward(x) * rate

    torch.manual_seed(0)
    eager = Scaled()
    model, looks = copy.deepcopy(eager), []
    handle = attach(model, GIB, costs="flops", cache=False)
    original = handle._roomy.held
    monkeypatch.setattr(handle._roomy, "held", lambda *given: looks.append(given) or original(*given))
    monkeypatch.setattr("rockmate.calls.roomy.MOST_KINDS", 8)
    found = []
    for m in (model, eager):
        torch.manual_seed(0)
        for k in range(20):
            m(randn(16, 64, seed=k), 0.1 * k).sum().backward()
        found.append(state(m))
    assert same([found[0]], [found[1]])
    assert captured(handle) == 0
    assert len(looks) <= 2 + 5 + 2  # the first, those of all calls whose number is a power of two, and after a clear


@pytest.mark.filterwarnings("ignore:the budget '200%' is more:rockmate.BudgetWarning")
def test_a_backward_of_a_backward_is_said_where_the_budget_may_not_hold() -> None:
    """Also where the calls themselves need no plan."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())))
    attach(model, "200%", costs="flops", cache=False)
    x = randn(256, 64, seed=0).requires_grad_()
    for _ in range(3):
        model(x).square().mean().backward()
    with pytest.warns(BudgetWarning, match="create_graph=True"):
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.square().mean().backward()


@pytest.mark.parametrize("share", [True, False])
def test_calls_that_are_no_smaller_than_one_that_comes_near_the_budget_are_planned_at_once(share: bool) -> None:
    model, x = Net(times=40), randn(1024, 64, seed=0)
    peak = measure_peak(lambda: step(copy.deepcopy(model), x))
    handle = attach(model, "60%" if share else int(0.6 * peak), costs="flops", cache=False)
    first = 1 if share else 2  # bytes: the first step is measured, which shows that they bind
    for rows in [1024] * first + [1026, 1028, 1030]:
        step(model, randn(rows, 64, seed=0))
        model.zero_grad()
    found = [kind.call[0] for kind in handle.plans if kind.plan is not None]
    assert sorted(found) == [f"x float32[{rows}, 64]" for rows in (1024, 1026, 1028, 1030)]


def test_steps_that_fit_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their caller may keep more of the results than in the first one: that exceeded the budget in silence. Behind the
    first step, whose plan runs nothing again, the 1st, the 2nd, the 4th and the 8th are measured.
    """
    measured: list[int] = []
    run = RoomyCalls.run_measured
    monkeypatch.setattr(RoomyCalls, "run_measured", lambda *args: measured.append(k) or run(*args))
    model, x = Net(), randn(64, 64, seed=0)
    budget = int(3.5 * measure_peak(lambda: step(model, x)))
    attach(model, budget, costs="flops", cache=False)
    for k in range(1, 10):  # noqa: B007 - read above
        step(model, x)
    assert measured == [2, 3, 5, 9]


class Counts(nn.Module):
    """Counts its calls, so that its second one is captured again."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)))
        self.counts, self.calls = counts, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.counts
        result: torch.Tensor = self.net(x)
        return result


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("budget", ["60%", "10 MiB"])
def test_a_loss_that_no_plan_fits_is_refused_where_the_model_counts(counts: bool, budget: str) -> None:
    """The plan of the second capture took the first one's loss for known, which no plan had fitted."""
    model, x = Counts(counts), randn(1024, 64, seed=1)
    attach(model, budget, costs="flops")

    def contrast() -> None:
        z = F.normalize(model(x), dim=1)
        F.cross_entropy(z @ z.T / 0.1, (torch.arange(1024) + 512) % 1024).backward()

    with warnings.catch_warnings(), pytest.raises(InfeasibleBudgetError, match="no plan fits a budget"):
        warnings.simplefilter("ignore", BudgetWarning)
        for _ in range(4):
            contrast()


class Carries(nn.Module):
    """Begins without a hidden state, and is given its last one afterwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.lstm, self.head = (
            nn.Embedding(50, 32),
            nn.LSTM(32, 32, batch_first=True),
            nn.Linear(32, 50),
        )

    def forward(self, x: torch.Tensor, h: tuple[torch.Tensor, ...] | None = None) -> tuple[torch.Tensor, ...]:
        y, h = self.lstm(self.embedding(x), h)
        assert h is not None
        return self.head(y), *h


@pytest.mark.parametrize("measured", [False, True])
def test_a_step_that_exceeded_without_a_plan_is_planned_next(measured: bool) -> None:
    """Its graph was taken to fit again; where its steps are measured, for ever."""
    model, ids, h = Carries(), torch.randint(50, (64, 20)), None
    attach(model, "60%", costs="flops")
    states: list[tuple[torch.Tensor, ...]] = []

    def train() -> None:
        y, *state = model(ids, h)
        F.cross_entropy(y.flatten(0, 1), ids.flatten()).backward()
        states.append(tuple(t.detach() for t in state))

    exceeded = 0
    with warnings.catch_warnings(record=True) as said, pytest.raises(InfeasibleBudgetError):
        warnings.simplefilter("always")
        for k in range(5):
            measure_peak(train) if measured and k > 1 else train()
            h = states[-1]
            exceeded = sum("Later steps like it are planned" in str(w.message) for w in said)
    assert exceeded == 1


class Scores(nn.Module):
    """Computes with an image, and with each of some boxes, how many no size of the image tells."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(4)))

    def forward(self, image: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        y = self.body(image)
        return y.mean() + sum(float(box.sum()) * y.amax() for box in boxes)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.levelno >= logging.INFO]


def test_a_few_more_boxes_beside_an_image_are_not_many_images(caplog: pytest.LogCaptureFixture) -> None:
    """Twelve times as many were supposed to take 144 times as much, and all that came was followed for ever."""
    model, image = Scores(), randn(2, 8, 32, 32, seed=0)
    peak = measure_peak(lambda: model(image, randn(12, 4, seed=0)).backward())
    model.zero_grad()
    handle = attach(model, 12 * peak, costs="flops", cache=False)
    with caplog.at_level(logging.INFO, "rockmate"):
        for n in (1, 12, 3, 8, 5):
            model(image, randn(n, 4, seed=n)).backward()
            model.zero_grad()
            assert handle.ran_freely
    assert len(logged(caplog)) == 1 and "needs no plan" in logged(caplog)[0]


class Decides(nn.Module):
    """Attention, and a branch for which TorchDynamo captures no one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(100, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embedding(x)
        if y.detach().sum() > 1e9:
            y = y * 2
        for _ in range(4):
            y = torch.tanh(self.linear(torch.softmax(y @ y.transpose(1, 2), -1) @ y))
        return y


def lengths(model: nn.Module, *found: int) -> None:
    for n in found:
        model(torch.randint(100, (2, n), generator=torch.Generator().manual_seed(n))).square().mean().backward()
        model.zero_grad()


def test_steps_of_a_followed_model_that_stay_far_below_the_budget_are_not_planned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Their sizes were supposed to take more than a quarter of it: each new one was observed and planned."""
    torch.manual_seed(0)
    eager = Decides()
    model = copy.deepcopy(eager)
    peak = measure_peak(lambda: lengths(eager, 128))
    handle = attach(model, 5 * peak, costs="flops", cache=False)
    with caplog.at_level(logging.INFO, "rockmate"):
        for n in (16, 128, 100, 120, 64):
            lengths(model, n)
            assert handle.ran_freely and handle.plan is None
    assert [
        said
        for line in logged(caplog)
        for said in ("needs no plan", "is followed operation by operation")
        if said in line
    ] == ["needs no plan", "is followed operation by operation"]
    assert len(logged(caplog)) == 2
    assert {known.plan for known in handle.plans} == {None} and "the budget does not bind" in repr(handle)
    assert handle.frontier().max_budget > 0


@pytest.mark.parametrize("part", [0.9, 2, 3])
def test_lengths_of_a_followed_model_that_grow_stay_within_the_budget(part: float) -> None:
    """The first of each is held within it; those that come near it are planned."""
    torch.manual_seed(0)
    eager = Decides()
    budget = int(part * measure_peak(lambda: lengths(eager, 256)))
    came = (16, 90, 128, 256, 250, 256, 16)
    for k, n in enumerate(came):
        model = copy.deepcopy(eager)
        attach(model, budget, costs="flops", cache=False)
        lengths(model, *came[:k])
        assert measure_peak(partial(lengths, model, n)) <= budget
