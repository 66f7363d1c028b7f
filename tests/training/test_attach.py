"""A model under a budget in place: training scripts as people write them, against eager mode, with recomputation."""

from __future__ import annotations

import argparse
import collections
import contextlib
import contextvars
import copy
import dataclasses
import io
import logging
import pickle
import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_same, snapshot
from models import Turned, randn, tokens
from torch import nn

import rockmate
from rkgb.sample import Call
from rockmate import (
    BudgetWarning,
    InfeasibleBudgetError,
    InputError,
    PlanningWarning,
    attach,
    attached,
    detach,
    measure_peak,
)
from rockmate.calls.free import RememberedCall
from rockmate.planning.plan import Plan
from rockmate.planning.wrappers import OwnCall

Train = Callable[[nn.Module], Iterator[Any]]


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x + mlp(norm(x))."""
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Four blocks; tests derive from it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 8)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks."""
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> Any:
        """Logits."""
        return self.head(self.body(x))


X = randn(256, 32, seed=1)
BATCHES = [randn(256, 32, seed=k) for k in range(4)]
TIGHT = "1 MiB"
"""Less than a step of ``Net`` takes."""


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """The model, the same on every call."""
    torch.manual_seed(0)
    return make()


def plain(model: nn.Module) -> Iterator[Any]:
    """Four steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in BATCHES:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def one_peak(model: nn.Module, train: Train) -> int:
    """The peak of the script on a model that nothing else has run, as far as it is the model's."""
    list(train(model))
    model.zero_grad()
    return measure_peak(lambda: list(train(model)), "cpu")


def trains_as_eager(
    make: Callable[[], nn.Module], train: Train = plain, fraction: float = 0.6, recomputes: bool = True, **options: Any
) -> rockmate.Attachment:
    """``train`` yields the same with a model that is attached, at ``fraction`` of the peak, and leaves the same."""
    budget = int(fraction * one_peak(made(make), train))
    eager, ours = made(make), made(make)
    handle = attach(ours, budget, costs="flops", on_infeasible="least", **options)
    results = []
    for model in (eager, ours):
        torch.manual_seed(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)  # a script's peak is not that of one step
            results.append([*train(model), *snapshot(model)])
    assert_same(results[1], results[0])
    if recomputes:
        assert any(p.plan is not None and p.plan.recomputed for p in handle.plans), "the budget forces nothing"
    return handle


# ------------------------------------------------------------------------------------- what forward does beside


def test_within_the_budget_at_every_step() -> None:
    model, eager = made(Net), made(Net)

    def step(m: nn.Module) -> None:
        m.zero_grad()
        m(X).square().mean().backward()

    step(eager)
    budget = int(0.6 * measure_peak(lambda: step(eager), "cpu"))
    handle = attach(model, budget, costs="flops")
    peaks = []
    handle.plan_for(Call((X,), {}))
    for _ in range(3):
        step(model)
        peaks.append(measure_peak(lambda: step(model), "cpu"))
    assert handle.plan is not None and handle.plan.recomputed
    assert max(peaks) <= budget
    assert peaks[-1] == pytest.approx(handle.plan.predicted_peak, abs=64)


def test_an_attribute_that_the_loop_reads() -> None:
    class Aux(Net):
        def forward(self, x: torch.Tensor) -> Any:
            y = self.body(x)
            self.aux_loss = y.square().mean()
            return self.head(y)

    def train(model: Any) -> Iterator[Any]:
        for x in BATCHES:
            loss = model(x).square().mean() + 0.1 * model.aux_loss
            loss.backward()
            yield loss.detach()
            yield model.aux_loss.detach()

    trains_as_eager(Aux, train)


def test_counters_lists_and_dicts_that_forward_fills() -> None:
    class Logs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.sizes, self.means = 0, [], {}  # type: ignore[var-annotated]

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            self.sizes.append(x.shape[0])
            y = super().forward(x)
            self.means[f"call {self.calls % 2}"] = y.detach().mean()
            return y

    def train(model: Any) -> Iterator[Any]:
        yield from plain(model)
        yield model.calls
        yield len(model.sizes)
        yield from model.means.values()

    trains_as_eager(Logs, train)


def test_a_list_that_grows_is_captured_again_at_each_step_and_this_is_said() -> None:
    class Keeps(Net):
        def __init__(self) -> None:
            super().__init__()
            self.means: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            self.means.append(y.detach().mean())
            return y

    model = Keeps()
    handle = attach(model, "90%", costs="flops")
    message = r"captured for the 9th time, .* \(len\(model.means\) == \d+ does not hold\)"
    with pytest.warns(PlanningWarning, match=message) as warned:
        for _ in range(12):
            model(BATCHES[0]).square().mean().backward()
            model.zero_grad()
    assert len(warned) == 1
    assert len(model.means) == 12
    assert handle.plans_made == 1


def test_a_number_that_forward_moves_on_needs_no_other_plan() -> None:
    class Anneals(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 0.5

        def forward(self, x: torch.Tensor) -> Any:
            self.scale = self.scale * 1.25
            return super().forward(x) * self.scale

    def train(model: Any) -> Iterator[Any]:
        yield from plain(model)
        yield model.scale
        yield type(model.scale)

    trains_as_eager(Anneals, train)
    model = Anneals()
    handle = attach(model, "90%", costs="flops")
    for _ in range(6):
        model(BATCHES[0]).square().mean().backward()
        model.zero_grad()
    assert handle.plans_made <= 2  # the number is a constant at first


def test_features_kept_in_a_list() -> None:
    class Features(Net):
        def __init__(self) -> None:
            super().__init__()
            self.features: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> Any:
            self.features.clear()
            for block in self.blocks:
                x = block(x)
                self.features.append(x)
            return self.head(x)

    def train(model: Any) -> Iterator[Any]:
        for x in BATCHES:
            loss = model(x).square().mean() + sum(f.mean() for f in model.features)
            loss.backward()
            yield loss.detach()
        yield from (f.detach() for f in model.features)

    trains_as_eager(Features, train)


CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
LOCAL = threading.local()


@dataclasses.dataclass
class Settings:
    """What a model may be configured by."""

    scale: float = 1.0


@pytest.mark.parametrize("way", ["namespace", "deque", "contextvar", "local", "dataclass", "dict", "global", "closure"])
def test_settings_that_change_are_seen(way: str) -> None:
    box: dict[str, Any] = {}

    class Configured(Net):
        def __init__(self) -> None:
            super().__init__()
            self.options = argparse.Namespace(scale=1.0)
            self.queue = collections.deque([1.0], maxlen=1)
            self.settings, self.table = Settings(), {"scale": 1.0}

        def scale(self) -> float:
            found = {
                "namespace": lambda: self.options.scale,
                "deque": lambda: self.queue[0],
                "contextvar": CONTEXT.get,
                "local": lambda: LOCAL.scale,
                "dataclass": lambda: self.settings.scale,
                "dict": lambda: self.table["scale"],
                "global": lambda: SCALE[0],
                "closure": lambda: box["scale"],
            }
            return float(found[way]())

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * self.scale()

    def train(model: Any) -> Iterator[Any]:
        for x, scale in zip(BATCHES, (1.0, 1.0, 2.0, 1.0), strict=True):
            model.options.scale = model.settings.scale = model.table["scale"] = LOCAL.scale = box["scale"] = scale
            SCALE[0] = scale
            model.queue.append(scale)
            CONTEXT.set(scale)
            loss = model(x).square().mean()
            loss.backward()
            yield loss.detach()

    trains_as_eager(Configured, train)


SCALE = [1.0]


def test_the_learning_rate_read_in_forward() -> None:
    class Rate(Net):
        optimizer: Any = None

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * (1 + self.optimizer.param_groups[0]["lr"])

    def train(model: Any) -> Iterator[Any]:
        model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, rate in zip(BATCHES, (0.1, 0.05, 0.05, 0.1), strict=True):
            model.optimizer.param_groups[0]["lr"] = rate
            loss = model(x).square().mean()
            loss.backward()
            model.optimizer.step()
            yield loss.detach()

    trains_as_eager(Rate, train)


# ---------------------------------------------------------------------------------------------- aliasing


def test_the_same_tensor_twice() -> None:
    class Two(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
            z = self.body(x) + (2 * y if x is y else y)
            return self.head(z)

    def train(model: Any) -> Iterator[Any]:
        for k, x in enumerate(BATCHES):
            x = x.clone().requires_grad_()
            loss = model(x, x if k % 2 else x.detach().clone()).square().mean()
            loss.backward()
            yield loss.detach()
            yield x.grad

    trains_as_eager(Two, train)


# ----------------------------------------------------------------------------------------------- hooks


def test_hooks_that_capture_and_return() -> None:
    def train(model: Any) -> Iterator[Any]:
        seen: list[torch.Tensor] = []

        def keep(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            seen.append(output.detach().mean())
            return output

        handle = model.blocks[1].register_forward_hook(keep)
        yield from plain(model)
        handle.remove()
        yield from plain(model)
        yield len(seen)
        yield from seen

    trains_as_eager(Net, train)


def test_hooks_that_come_and_go() -> None:
    def train(model: Any) -> Iterator[Any]:
        yield from plain(model)
        handle = model.blocks[2].register_forward_pre_hook(lambda _, args: (2 * args[0],))
        yield from plain(model)
        handle.remove()
        yield from plain(model)

    trains_as_eager(Net, train)


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("budget", ["90%", "55%"])
def test_a_hook_that_splits_the_model_and_goes(kind: str, first: bool, budget: str) -> None:
    """Under backward hooks of submodules the forward is followed, and no plan fits the smaller budget."""

    def train(model: Any) -> Iterator[Any]:
        seen: list[str] = []
        if not first:
            yield from plain(model)
        handle = getattr(model.blocks[1], f"register_{kind}")(lambda module, *_: seen.append(type(module).__name__))
        if budget == "90%":
            yield from plain(model)
            yield len(seen)
        else:
            with contextlib.suppress(InfeasibleBudgetError):
                model(X).square().mean().backward()
            model.zero_grad()
            torch.manual_seed(6)
        handle.remove()
        yield from plain(model)

    eager, model = made(Net), made(Net)
    handle = attach(model, budget, costs="flops")
    results = []
    for m in (eager, model):
        torch.manual_seed(5)
        results.append([*train(m), *snapshot(m)])
    assert_same(results[1], results[0])
    assert isinstance(handle.plan, Plan)
    assert handle.reason == ""
    assert handle.plan.recomputed


def test_hooks_of_the_model_itself() -> None:
    def train(model: Any) -> Iterator[Any]:
        calls = []
        model.register_forward_hook(lambda _, __, output: calls.append(1) or 2 * output)
        yield from plain(model)
        yield len(calls)

    trains_as_eager(Net, train)


# ----------------------------------------------------------------------------------- ways to call a model


def test_eval_with_gradients_is_planned() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(32)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.batch_norm(self.body(x)))

    def train(model: Any) -> Iterator[Any]:
        yield from plain(model.eval())

    handle = trains_as_eager(Normed, train)
    assert handle.plans[0].call[-1] == "eval"


def test_train_and_eval_in_turn() -> None:
    def train(model: Any) -> Iterator[Any]:
        for _ in range(2):
            yield from plain(model.train())
            model.eval()
            with torch.no_grad():
                yield model(X)
        with torch.inference_mode():
            yield model(X).clone()

    trains_as_eager(Net, train)


def test_indexing_and_new_attributes() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(32, 8))

    def train(model: Any) -> Iterator[Any]:
        yield from plain(model)
        model.note = "new"
        model[4] = nn.Linear(32, 8)
        with torch.no_grad():
            model[4].weight.fill_(0.1)
            model[4].bias.zero_()
        yield len(model)
        yield from plain(model)
        yield model.note

    trains_as_eager(make, train)


def test_copies_and_pickles_are_plain() -> None:
    model = made(Net)
    handle = attach(model, TIGHT, costs="flops", on_infeasible="least")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        list(plain(model))
    assert handle.plan is not None
    for other in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert attached(other) is None
        assert type(other) is Net
        other.eval()
        model.eval()
        assert torch.equal(other(X), model(X))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert attached(torch.load(buffer, weights_only=False)) is None
    assert list(model.state_dict()) == list(made(Net).state_dict())


@pytest.mark.parametrize("within", [False, True])
def test_copies_and_pickles_of_modules_with_a_state_of_their_own_are_plain(within: bool) -> None:
    """``nn.LSTM`` has a ``__getstate__`` that takes all of its attributes."""
    lstm = torch.nn.LSTM(8, 8)
    model = torch.nn.Sequential(lstm) if within else lstm
    attach(model, TIGHT, costs="flops")
    x = torch.randn(3, 2, 8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert attached(other) is None
        assert not any(isinstance(m.__dict__.get("_compiled_call_impl"), OwnCall) for m in other.modules())
        with torch.no_grad():
            assert torch.equal(other(x)[0], model(x)[0])


class OwnState(torch.nn.Linear):
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("made", [lambda: torch.nn.LSTM(8, 8), lambda: OwnState(8, 8)])
def test_shallow_copies_of_modules_with_a_state_of_their_own_run_themselves(
    within: bool, made: Callable[[], torch.nn.Module]
) -> None:
    part = made()
    model = torch.nn.Sequential(part) if within else part
    before = set(vars(part))
    attach(model, TIGHT, costs="flops")
    other = copy.copy(part)
    assert not {"_compiled_call_impl", "__getstate__"} & set(vars(other))
    calls: list[torch.nn.Module] = []
    other._forward_hooks = collections.OrderedDict({0: lambda module, *_: calls.append(module)})
    other(torch.randn(3, 2, 8))
    assert calls == [other]
    detach(model)
    assert set(vars(part)) == before


def test_autocast_and_accumulation() -> None:
    def train(model: Any) -> Iterator[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for k, x in enumerate(BATCHES):
            with torch.autocast("cpu", torch.bfloat16, enabled=k > 0):
                loss = model(x).float().square().mean() / 2
            loss.backward()
            if k % 2:
                optimizer.step()
                optimizer.zero_grad()
            yield loss.detach()

    trains_as_eager(Net, train)


def test_checkpoints_inside_draw_the_same_masks() -> None:
    class Checkpointed(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    trains_as_eager(Checkpointed, fraction=0.9)


def test_eleven_lambdas() -> None:
    class Lambdas(Net):
        def __init__(self) -> None:
            super().__init__()
            self.functions = [lambda x, k=k: x + k / 100 for k in range(11)]

        def forward(self, x: torch.Tensor) -> Any:
            for f in self.functions:
                x = f(x)
            return super().forward(x)

    trains_as_eager(Lambdas)


@pytest.mark.parametrize(
    "write",
    [
        lambda a, b: a.add_(b, alpha=0.1),
        lambda a, b: a.add_(b, alpha=b.mean()),
        lambda a, b: a.addcmul_(a, b, value=0.1),
        lambda a, b: a.addcdiv_(a, b.abs() + 1.0, value=0.1),
        lambda a, b: torch._foreach_lerp_([a], [b], 0.1),
        lambda a, b: torch._foreach_addcdiv_([a], [b], [a.abs() + 1.0], value=0.1),
    ],
)
def test_writes_that_torchdynamo_would_decompose(write: Callable[..., Any]) -> None:
    """Into a product and a sum, say, which have other bits."""

    class Averages(Net):
        def __init__(self) -> None:
            super().__init__()
            self.average = nn.Buffer(torch.linspace(-1, 1, 256 * 8).view(256, 8))

        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            with torch.no_grad():
                write(self.average, y.detach())
            return y + self.average

    trains_as_eager(Averages)


@pytest.mark.parametrize("way", ["in place", "data in place", "data assigned"])
def test_a_teacher_that_starts_as_its_student(way: str) -> None:
    """Averaging two equal weights changes nothing, so that only the writes tell the planner what to put back."""

    class Taught(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = Net()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        @torch.no_grad()
        def average(self) -> None:
            for a, b in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if way == "data assigned":
                    a.data = a.data * 0.9 + b.data * 0.1
                else:
                    (a if way == "in place" else a.data).mul_(0.9).add_(b, alpha=0.1)

        def forward(self, x: torch.Tensor) -> Any:
            self.average()
            with torch.no_grad():
                target = self.teacher(x)
            return self.student(x) - target + 0.1 * self.student(2 * x)

    trains_as_eager(Taught)


def test_a_function_that_returns_a_view() -> None:
    class Adversarial(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return self.head(Turned.apply(self.body(x), -0.5))  # type: ignore[no-untyped-call]

    trains_as_eager(Adversarial)


def test_vmap_inside() -> None:
    class Mapped(Net):
        def forward(self, x: torch.Tensor) -> Any:
            y = self.body(x)
            return torch.vmap(torch.dot)(y, y)[:, None].sigmoid() + self.head(y)

    trains_as_eager(Mapped)


# ------------------------------------------------------------------------------------------ the handle


def test_attach_and_detach() -> None:
    model = made(Net)
    assert attached(model) is None
    handle = attach(model, "1 MiB")
    assert attached(model) is handle
    with pytest.raises(InputError, match="attached already"):
        attach(model, "2 MiB")
    detach(model)
    assert attached(model) is None
    assert "_compiled_call_impl" not in vars(model)
    with pytest.raises(InputError, match="not attached"):
        detach(model)
    with pytest.raises(InputError, match="Net was detached"):
        handle.budget = "2 MiB"  # type: ignore[assignment]
    attach(model, "1 MiB").detach()
    assert attached(model) is None


def test_a_sample_plans_at_once_and_runs_nothing() -> None:
    class Counting(Net):
        calls = 0

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            return super().forward(x)

    model = made(Counting)
    before = torch.get_rng_state()
    handle = attach(model, TIGHT, sample=X, costs="flops", on_infeasible="error")
    assert handle.plan is not None and handle.plan.recomputed
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert handle.frontier().min_budget <= handle.budget
    model(X).sum().backward()
    assert len(handle.plans) == 1
    assert handle.plans[0].call == ("x float32[256, 32]", "train")


def test_a_budget_that_does_not_bind_needs_no_plan(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rockmate"):
        handle = trains_as_eager(Net, fraction=50.0, recomputes=False)
    assert handle.plan is None
    assert [p.plan for p in handle.plans] == [None]
    assert repr(handle).endswith(", 0 plans: the budget does not bind>")
    assert "needs no plan" in caplog.text


@pytest.mark.parametrize("budget", ["auto", "1 GiB", "60%"])
def test_the_frontier_is_there_after_the_first_step_whatever_the_budget(budget: str) -> None:
    model, x = made(Net), BATCHES[0].clone()
    handle = attach(model, budget, costs="flops", loss_memory=0)
    with pytest.raises(InputError, match=r"Call the model with gradients once.* rockmate\.frontier\(model, sample\)"):
        handle.frontier()
    model(x).sum().backward()
    given = weakref.ref(x)
    del x
    assert given() is None  # it is not held for those who may ask
    before = [torch.get_rng_state(), *(p.grad for p in model.parameters())]
    found = handle.frontier()
    assert_same(before, [torch.get_rng_state(), *(p.grad for p in model.parameters())])
    if handle.plan is not None:  # it is for the loss that the step has shown
        assert budget == "60%" and found.max_budget > handle.budget
    else:
        assert found.points == rockmate.frontier(made(Net), BATCHES[0], costs="flops", loss_memory=0).points


@pytest.mark.parametrize("budget", ["auto", "60%"])
def test_the_frontier_is_there_when_a_sample_was_planned(budget: str) -> None:
    model = made(Net)
    handle = attach(model, budget, sample=X, costs="flops", loss_memory=0)
    assert handle.frontier().points == rockmate.frontier(made(Net), X, costs="flops", loss_memory=0).points


class Picks(Net):
    """Reads its input as indices, in the precision that its caller chose."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(50, 32)

    def forward(self, x: torch.Tensor) -> Any:
        """Logits."""
        return super().forward(self.rows(x))


def test_the_frontier_of_a_step_that_needed_no_plan_is_for_its_values_and_modes() -> None:
    model, ids = made(Picks), tokens(64, 4, high=50, seed=1)
    handle = attach(model, "auto", costs="flops")
    with torch.autocast("cpu", torch.bfloat16):
        model(ids).sum().backward()
        wanted = rockmate.frontier(made(Picks), ids, costs="flops")
    del ids
    assert handle.frontier().points == wanted.points
    model.rows.weight = nn.Parameter(torch.ones(50, 32))
    assert handle.frontier().points == wanted.points  # nothing is measured again
    model(tokens(32, 4, high=50, seed=2)).sum().backward()
    del model.rows
    with pytest.raises(InputError, match=r"the model cannot be called .*no attribute 'rows'"):
        handle.frontier()


def test_what_is_remembered_of_a_call_takes_no_memory_of_its_step() -> None:
    model, ids = made(Picks), tokens(64, 4, high=50, seed=1)
    assert measure_peak(lambda: RememberedCall(model, Call((ids,), {})), "cpu") == 0


def test_without_gradients_the_model_itself_runs() -> None:
    model = made(Net)
    handle = attach(model, 1 << 20, costs="flops")
    with torch.no_grad():
        model(X)
    for p in model.parameters():
        p.requires_grad_(False)
    model(X)
    assert handle.plans == []


def test_the_least_plan_where_none_fits() -> None:
    model = made(Net)
    handle = attach(model, "100 KiB", costs="flops")
    with pytest.raises(InfeasibleBudgetError) as refused:
        model(X)
    detach(model)
    handle = attach(model, "100 KiB", costs="flops", on_infeasible="least")
    with pytest.warns(BudgetWarning, match="plan of least memory runs instead"):
        y = model(X)
    assert handle.plan is not None and handle.plan.budget == refused.value.min_budget
    y.sum().backward()
    assert handle.plan is not None and handle.plan.budget < refused.value.min_budget  # the loss keeps nothing


def test_another_budget() -> None:
    model = made(Net)
    handle = attach(model, TIGHT, sample=X, costs="flops")
    assert handle.plan is not None
    first = handle.plan.predicted_overhead
    handle.budget = handle.frontier().max_budget
    assert handle.plan.predicted_overhead < first


def test_what_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = made(Net)
    with caplog.at_level(logging.INFO, "rockmate"):
        attach(model, TIGHT, costs="flops", on_infeasible="least")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            for size in (256, 320, 400, 500, 630, 400):  # larger each time, so that no plan before fits
                model(randn(size, 32, seed=size)).sum().backward()
                model.zero_grad()
    lines = [record.getMessage() for record in caplog.records if "planned Net" in record.getMessage()]
    assert len(lines) == 5
    assert "for x float32[256, 32], train: " in lines[0]
    assert "new: x float32[320, 32] was float32[256, 32]" in lines[1]
    assert "pad inputs" not in lines[2]
    assert "This is plan 4: pad inputs" in lines[3]


def test_inputs_have_the_names_that_forward_gives_them() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())))

        def forward(self, first: torch.Tensor, *others: torch.Tensor, task: str = "sum", **more: Any) -> torch.Tensor:
            return self.layers(sum(others, first)) * more["factor"]

    model, x = Sums(), randn(64, 16, seed=0)
    handle = attach(model, "80%", costs="flops", cache=False)
    model(x, x + 1, x + 2, factor=x[0]).sum().backward()
    given = {"first float32[64, 16]", "others[0] float32[64, 16]", "others[1] float32[64, 16]", "factor float32[16]"}
    assert given < set(handle.plans[0].call)


def test_kinds_of_calls_have_names_of_their_own() -> None:
    """Also where they differ in what the words for inputs and mode do not say."""

    class Flagged(Net):
        doubles = False

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return super().body(2 * x if self.doubles else x)

    model = made(Flagged)
    handle = attach(model, TIGHT, costs="flops")
    for doubles in (False, True, False):
        model.doubles = doubles
        model(X).sum().backward()
        model.zero_grad()
    assert repr(handle) == "<rockmate.attach: Flagged, budget 1.0 MiB, 2 plans>"
    words = "x float32[256, 32], train"
    assert [kind.name for kind in handle.plans] == [words, f"{words} (2)"]
    model.doubles = True
    model(X).sum().backward()
    assert [kind.name for kind in handle.plans] == [f"{words} (2)", words]
    handle.budget = "80%"
    assert [kind.call for kind in handle.plans] == [("x float32[256, 32]", "train")]


def test_the_seconds_of_planning_are_those_that_the_first_step_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TorchDynamo's capture is part of them, where there was one."""

    def slow(program: torch.fx.GraphModule) -> None:
        time.sleep(0.5)

    monkeypatch.setattr("rockmate.calls.capture.check_capture", slow)
    model = made(Net)
    handle = attach(model, TIGHT, costs="flops", on_infeasible="least")
    with caplog.at_level(logging.INFO, "rockmate"), warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        for size in (256, 320, 400):  # the second capture is for any size
            model(randn(size, 32, seed=size)).sum().backward()
            model.zero_grad()
    last, *_, first = (kind.plan for kind in handle.plans)
    assert isinstance(first, Plan) and isinstance(last, Plan)
    assert next(iter(first.setup_seconds)) == "capture" and first.setup_seconds["capture"] >= 0.5
    assert "capture" not in last.setup_seconds
    said = re.search(r"planned Net in ([\d.]+) s", caplog.text)
    assert said and float(said[1]) + 0.05 >= first.setup_seconds["capture"]


def test_the_model_goes_when_it_is_dropped() -> None:
    model = made(Net)
    attach(model, TIGHT, costs="flops", on_infeasible="least")
    model(X).sum().backward()
    gone = weakref.ref(model.blocks[0].up.weight)
    del model
    import gc

    gc.collect()
    assert gone() is None


def test_the_backend_of_torch_compile() -> None:
    eager, ours = made(Net), made(Net)
    compiled = torch.compile(ours, backend="rockmate", options={"budget": TIGHT, "costs": "flops"})
    torch.manual_seed(5)
    a = list(plain(eager))
    torch.manual_seed(5)
    b = list(plain(compiled))  # type: ignore[arg-type]
    assert_same(b, a)
    with pytest.raises(Exception, match="budget"):
        torch.compile(made(Net), backend="rockmate")(X)


def test_the_frontier_of_a_call_that_needed_no_plan_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It is of a plan that was made apart, and is no training's."""
    model = made(Net)
    handle = attach(model, "1 GiB", costs="flops")
    model(BATCHES[0]).sum().backward()
    with caplog.at_level("INFO", "rockmate"):
        handle.frontier()
    assert "planned" not in caplog.text


class Decides(Net):
    """Followed: Python decides by a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > -1e9 else -x)


@pytest.mark.parametrize("make", [Net, Decides], ids=["captured", "followed"])
def test_what_no_plan_fits_is_told_with_the_name_of_the_model(make: type[torch.nn.Module]) -> None:
    """Of several attached models, it is this one."""
    model = made(make)
    attach(model, "1 KiB", costs="flops")
    with pytest.raises(InfeasibleBudgetError, match=f"^{make.__name__}: no plan fits a budget"):
        for _ in range(3):
            model(BATCHES[0]).sum().backward()
    model = made(make)
    attach(model, "1 KiB", costs="flops", on_infeasible="least")
    with pytest.warns(BudgetWarning, match=f"^{make.__name__}: no plan fits a budget"):
        for _ in range(3):
            model(BATCHES[0]).sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_what_others_make_of_an_attached_model_is_of_the_plain_one() -> None:
    model = made(Net)
    attach(model, "1 GiB", sample=X, costs="flops")
    model.eval()
    wanted = made(Net).eval()(X)
    exported = torch.export.export(model, (X,)).module()
    for other in (torch.jit.trace(model, X), torch.fx.symbolic_trace(model), exported):
        assert_same([wanted], [other(X)])
