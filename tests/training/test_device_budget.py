"""The budget "auto" on devices of which the tests say what they have: training stays within them from the first step
on, whatever the optimizer keeps, and a table says where the memory goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from rkgb.device import Cpu
from rkgb.device.profiled import ProfiledTimeline
from rkgb.trees import tensors_in
from rockmate import Attachment, BudgetWarning, InfeasibleBudgetError, InputError, Rockmate, attach
from rockmate.memory import MARGIN
from rockmate.optimizers import OPTIMIZERS

SMALL = 2**27
"""Bytes of the device of the thirty trainings."""
WIDTH = 64


class Device:
    """A device of ``total`` bytes in the place of the machine: what ``held`` names is on it, and nothing else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int, held: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.total, self.held, self.others = total, held, 0
        monkeypatch.setattr(Cpu, "total", lambda kind, device: self.total)
        monkeypatch.setattr(Cpu, "free", lambda kind, device: self.free())

    def level(self) -> int:
        """Bytes that are taken between steps."""
        return self.others + sum({t.untyped_storage().data_ptr(): t.nbytes for t in self.held()}.values())

    def free(self) -> int:
        """Bytes that are not."""
        return self.total - self.level()


def resident(model: nn.Module, optimizers: list[Optimizer], *others: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    """What is there between steps."""

    def held() -> list[torch.Tensor]:
        own = [*model.parameters(), *model.buffers(), *others]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        states = [t for o in optimizers for state in o.state.values() for t in tensors_in(dict(state))]
        return [*own, *gradients, *states]

    return held


class Residual(nn.Module):
    """Layers whose inputs are added to their outputs."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As wide as ``x``."""
        y: torch.Tensor = x + self.inner(x)
        return y


def layer(k: int) -> list[nn.Module]:
    """Of the ``k``-th model of ``MODELS``."""
    wide = nn.Linear(WIDTH, WIDTH)
    return [
        [wide, nn.GELU()],
        [wide, nn.Tanh(), nn.Sigmoid()],
        [Residual(nn.LayerNorm(WIDTH), wide, nn.SiLU())],
        [wide, nn.BatchNorm1d(WIDTH), nn.ReLU()],
        [Residual(nn.Softplus(), nn.Sigmoid()), wide],
    ][k]


def made(k: int, rows: int, depth: int = 4) -> nn.Module:
    """An embedding of ``rows`` rows, and layers."""
    torch.manual_seed(k)
    inner = [part for _ in range(depth) for part in layer(k)]
    return nn.Sequential(nn.Embedding(rows, WIDTH), *inner, nn.Linear(WIDTH, 1))


MODELS = [(0, 25_000), (1, 50_000), (2, 37_500), (3, 12_500), (4, 62_500)]
OPTIMIZERS_OF: list[Callable[..., Optimizer]] = [
    partial(SGD, lr=0.1),
    partial(Adam, lr=1e-3),
    partial(AdamW, amsgrad=True),
]
BATCHES = [2_500, 17_500]


def peaks_of_training(
    monkeypatch: pytest.MonkeyPatch, k: int, rows: int, make: Callable[..., Optimizer], batch: int, old: bool
) -> list[int]:
    """The most bytes on the device in each of four steps, what is there between steps included. ``old``: the budget is
    nine tenths of what is free at first.
    """
    model, x = made(k, rows, 10), torch.randint(rows, (batch,), generator=torch.Generator().manual_seed(0))
    optimizer = make(model.parameters())
    device = Device(monkeypatch, SMALL, resident(model, [optimizer], x))
    budget: Any = device.free() * 9 // 10 if old else "auto"
    attach(model, budget, sample=x, costs="flops", cache=False, on_infeasible="error")

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = []
    for k in range(4):
        if k < 2:
            model(x)  # what is to be planned is planned here: plans are not made while memory is measured
        before = device.level()
        timeline = ProfiledTimeline()
        timeline.mark()
        step()
        moments = timeline.close()
        assert moments is not None
        found.append(before + moments[0].peak)
    return found


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("make", OPTIMIZERS_OF, ids=["sgd", "adam", "amsgrad"])
@pytest.mark.parametrize(("k", "rows"), MODELS)
def test_four_steps_stay_on_the_device(
    monkeypatch: pytest.MonkeyPatch, k: int, rows: int, make: Callable[..., Optimizer], batch: int
) -> None:
    """The optimizer's temporary memory counts, as it does on a device."""
    assert max(peaks_of_training(monkeypatch, k, rows, make, batch, old=False)) <= SMALL


def test_nine_tenths_of_what_is_free_at_first_are_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same trainings: the plan is within them, and Adam's moments are beside it."""
    k, rows = MODELS[1]
    found = peaks_of_training(monkeypatch, k, rows, OPTIMIZERS_OF[1], BATCHES[1], old=True)
    assert found[0] <= SMALL < found[1]


# ------------------------------------------------------------------------------------------- small devices

STEPPED: list[Callable[..., Optimizer]] = [
    SGD,
    partial(SGD, momentum=0.9),
    Adam,
    partial(Adam, amsgrad=True),
    partial(AdamW, foreach=True),
    partial(Adam, fused=True),
    Adagrad,
    RMSprop,
    partial(RMSprop, momentum=0.9, centered=True),
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Rprop,
]


class Signs(Optimizer):
    """Of the user's: keeps a list of two tensors of half precision for each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.size = 0.01

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            kept = self.state[p].setdefault("kept", [torch.zeros_like(p, dtype=torch.half) for _ in range(2)])
            p.sub_(self.size * (p.grad + kept[0]).sign())


class Reads(Signs):
    """Reads a value."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step."""
        if float(self.param_groups[0]["params"][0].grad.sum()) < 1e9:
            super().step()


def state_of(handle: Attachment) -> int:
    return handle.memory().optimizer


@pytest.mark.parametrize("make", [*STEPPED, Signs])
def test_what_an_optimizer_will_keep_is_known_before_its_first_step(make: Callable[..., Optimizer]) -> None:
    """And after it, from what it has."""
    model = made(0, 50, 2)
    optimizer = make(model.parameters())
    handle = attach(model, "auto", costs="flops", optimizer=optimizer)
    said = state_of(handle)
    model(torch.arange(8)).sum().backward()
    optimizer.step()
    there = sum(t.nbytes for state in optimizer.state.values() for t in tensors_in(dict(state)))
    assert said == state_of(handle) == there
    assert all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])


def test_two_moments_are_supposed_until_an_optimizer_is_known() -> None:
    model = made(0, 50, 2)
    own = sum(p.nbytes for p in model.parameters())
    handle = attach(model, "auto", costs="flops")
    assert state_of(handle) == 2 * own
    other = nn.Linear(2, 2)
    SGD(other.parameters()).step()
    assert state_of(handle) == 2 * own, "the optimizer of another model says nothing"
    frozen = made(0, 50, 2)
    frozen[0].requires_grad_(False)  # type: ignore[index]
    assert state_of(attach(frozen, "auto", costs="flops")) == 2 * (own - frozen[0].weight.nbytes)  # type: ignore[union-attr, operator]
    for cannot_be_tried in (torch.optim.ASGD, torch.optim.Adafactor, torch.optim.LBFGS, Reads):
        optimizer = cannot_be_tried(model.parameters())
        OPTIMIZERS.know([optimizer])
        assert state_of(handle) == 2 * own
    model(torch.arange(8)).sum().backward()
    optimizer.step()
    assert state_of(handle) == own  # two moments of half precision


def test_optimizers_that_step_one_after_another() -> None:
    """Each has a part of the parameters: what is not seen to be stepped keeps nothing, until it is."""
    model = made(0, 50, 2)
    first, rest = [*model[0].parameters()], [*model[1:].parameters()]  # type: ignore[index, operator]
    handle = attach(model, "auto", costs="flops")
    model(torch.arange(8)).sum().backward()
    optimizers = Adam(first, foreach=False), SGD(rest, momentum=0.9)
    optimizers[0].step()
    assert state_of(handle) == sum(2 * p.nbytes + 4 for p in first)
    optimizers[1].step()
    assert state_of(handle) == sum(2 * p.nbytes + 4 for p in first) + sum(p.nbytes for p in rest)


def test_no_optimizer() -> None:
    with pytest.raises(InputError, match=r"optimizer= is of type str: give a torch.optim.Optimizer"):
        attach(made(0, 50, 2), "auto", optimizer="adam")  # type: ignore[arg-type]


ROWS = 4_000
PARAMETERS = sum(p.nbytes for p in made(0, ROWS).parameters())
X = torch.randint(ROWS, (4_000,), generator=torch.Generator().manual_seed(0))


def trained(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., Optimizer],
    total: int,
    model: nn.Module | None = None,
    **options: Any,
) -> tuple[Attachment, Device, Callable[[], None]]:
    """A model attached under "auto" on a device of ``total`` bytes, and what makes a step."""
    model = model or made(0, ROWS)
    optimizer = make(model.parameters())
    device = Device(monkeypatch, total, resident(model, [optimizer], X))
    handle = attach(model, "auto", costs="flops", cache=False, **options)

    def step(calls: int = 1) -> None:
        for _ in range(calls):
            model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return handle, device, step


def room(free: int) -> int:
    return free - free // MARGIN


TIGHT = PARAMETERS * 4 + 6 * 2**20
"""A device on which a step with Adam runs again."""


@pytest.mark.parametrize(("make", "moments"), [(SGD, 0), (partial(Adam, amsgrad=True), 3)])
def test_the_plan_is_adapted_after_the_first_step_of_the_optimizer(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Optimizer], moments: int
) -> None:
    """In either direction, from the two moments that were supposed; only the solver runs again."""
    handle, device, step = trained(monkeypatch, make, TIGHT + 3 * 2**20)
    free = device.free()
    step()
    assert handle.budget == room(free - 2 * PARAMETERS)
    assert handle.plan is not None and handle.plan.budget == handle.budget
    step()
    assert abs(handle.budget - room(free - moments * PARAMETERS)) < 1024  # counts of steps
    assert handle.plan.budget == handle.budget and handle.plans_made == 1
    before = handle.plan
    step()
    assert handle.plan is before


def test_the_plan_stays_where_the_optimizer_keeps_what_was_supposed(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, device, step = trained(monkeypatch, Adam, TIGHT)
    step()
    budget = handle.budget
    device.others = budget // MARGIN // 4  # another program has some
    step()
    assert handle.budget == budget
    device.others = budget // MARGIN
    handle.budget = "auto"
    assert handle.budget < budget - device.others // 2


def test_what_the_optimizer_keeps_is_counted_at_once_where_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(0, ROWS)
    optimizer = partial(SGD, momentum=0.9)(model.parameters())
    handle, device, step = trained(monkeypatch, lambda _: optimizer, TIGHT, model, optimizer=[optimizer])
    free = device.free()
    step()
    assert handle.budget == room(free - PARAMETERS)
    plan = handle.plan
    step()
    assert handle.budget == room(free - PARAMETERS) and (handle.plan is plan or handle.plan.budget == plan.budget)


@pytest.mark.parametrize("followed", [False, True])
def test_gradients_that_are_there_leave_less_for_a_step(monkeypatch: pytest.MonkeyPatch, followed: bool) -> None:
    """Where gradients add up, each call has what the device has left; plans are made for two kinds of calls."""
    model = made(0, ROWS)
    if followed:
        model.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    handle, _, step = trained(monkeypatch, partial(SGD, momentum=0.9), TIGHT + 2**20, model, on_infeasible="least")
    for _ in range(4):
        step(3)
    assert bool(handle.reason) == followed
    made_until_then, budgets = handle.plans_made, []
    for calls in (1, 1, 1):
        step(calls)
        budgets.append(handle.budget)
    model(X).square().mean().backward()
    first, *others = handle.budget, *accumulated(model, handle)
    assert budgets == [first] * 3 and others == [first - PARAMETERS] * 2
    assert handle.plans_made == made_until_then
    plans = {known.plan.budget for known in handle.plans if known.plan is not None}
    assert plans == {first, others[0]}


def accumulated(model: nn.Module, handle: Attachment) -> Iterable[int]:
    """Budgets of two calls whose gradients are added to those that are there."""
    for _ in range(2):
        model(X).square().mean().backward()
        yield handle.budget


def test_a_device_on_which_no_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is a table of where its memory goes."""
    handle, device, step = trained(monkeypatch, Adam, 4 * PARAMETERS + 2**20)
    with pytest.raises(InfeasibleBudgetError) as refused:
        step()
    said = str(refused.value)
    assert "Sequential cannot be trained on this device, whatever runs again:" in said
    for row in ("parameters", "gradients", "optimizer's state", "temporaries", 'margin of "auto"', "free  ", "total"):
        assert f"\n{row}" in said
    assert "free" in said and "-" in said.split("\nfree")[1].split("\n")[0], "what is short is below 0"
    assert "the smallest that can be planned is" in said
    handle.budget = "auto"
    with pytest.raises(InfeasibleBudgetError, match="cannot be trained on this device"):
        step()
    with pytest.raises(InfeasibleBudgetError, match="cannot be trained on this device"):
        attach(made(0, ROWS), "auto", sample=X, costs="flops", cache=False)
    device.total += 64 * 2**20
    step()
    assert handle.memory().free >= 0


def test_an_optimizer_that_keeps_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its first step no plan fits: each later call says so."""
    model = made(0, ROWS)
    least = Rockmate(made(0, ROWS), X, "100%", costs="flops").frontier().min_budget
    total = PARAMETERS * 3 + X.nbytes + least * MARGIN // (MARGIN - 1) + 2**18
    handle, _, step = trained(monkeypatch, partial(Adam, amsgrad=True), total, model)
    step()
    for _ in range(2):
        with pytest.raises(InfeasibleBudgetError, match="cannot be trained on this device"):
            step()
    handle.detach()
    handle, _, step = trained(monkeypatch, partial(Adam, amsgrad=True), total, made(0, ROWS), on_infeasible="least")
    step()
    with pytest.warns(BudgetWarning, match="The plan of least memory runs instead"):
        step()


def test_several_models_share_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    models = made(0, ROWS), made(1, ROWS // 2)
    own = sum(p.nbytes for model in models for p in model.parameters())
    device = Device(monkeypatch, 2**26, lambda: [p for model in models for p in model.parameters()])
    handles = attach(models, "auto", costs="flops", cache=False)
    models[0](X).sum().backward()
    assert handles[0].budget == handles[1].budget == room(device.total - 3 * own)
    for handle in handles:
        assert handle.memory().parameters == own


def test_gradients_of_parameters_that_were_replaced() -> None:
    model = made(0, 50, 2)
    handle = attach(model, "auto", costs="flops")

    def made_bytes() -> int:
        handle.terms.begin_step(torch.device("cpu"))
        return handle.terms.made

    assert made_bytes() == 0
    model(torch.arange(8)).sum().backward()
    assert made_bytes() == sum(p.nbytes for p in model.parameters()) == handle.memory().gradients
    model[0].weight = nn.Parameter(torch.ones(50, WIDTH))  # type: ignore[index, union-attr]
    assert made_bytes() == sum(p.nbytes for p in model.parameters() if p.grad is not None)
    model[0].weight.grad = torch.ones(50, WIDTH)  # type: ignore[index, union-attr]
    assert made_bytes() == sum(p.nbytes for p in model.parameters())


# ----------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize("way", ["planned", "free", "followed", "Rockmate", "before"])
def test_the_rows_add_up_to_the_device(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    model = made(3, ROWS)
    if way == "followed":
        model.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    optimizer = Adam(model.parameters(), foreach=False)
    device = Device(monkeypatch, 2**28, resident(model, [optimizer], X))
    device.others = 12_345
    if way == "Rockmate":
        handle: Any = Rockmate(model, X, "70%", costs="flops")
    else:
        handle = attach(model, "auto" if way == "free" else "90%", costs="flops", cache=False)
    call = handle if way == "Rockmate" else model
    for _ in range(0 if way == "before" else 3):
        call(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = handle.memory()
    rows = [f.name for f in dataclasses.fields(found) if f.name not in ("device", "total")]
    assert found.total == 2**28
    assert found.parameters == sum(p.nbytes for p in model.parameters()) == found.gradients
    assert found.buffers == sum(b.nbytes for b in model.buffers())
    assert found.other == X.nbytes + 12_345
    if way == "before":
        assert found.activations is found.loss is found.temporaries is found.free is None
        assert str(found).count("not known yet") == 4
    else:
        assert sum(getattr(found, name) or 0 for name in rows) == found.total
        step = found.activations + (found.loss or 0) + found.temporaries
        assert found.activations > 0
        if way == "free":
            assert handle.plan is None and found.margin == device.free() // MARGIN
            assert found.loss is None and str(found).count("in temporaries") == 1
        else:
            assert step + found.gradients == handle.plan.predicted_peak and found.margin == 0
        call(X).square().mean().backward()
        assert handle.memory() == found, "gradients are there"
    for line in str(found).splitlines():
        assert len(line) <= 80


@pytest.mark.parametrize("left", [False, True])
def test_the_step_of_a_call_without_a_plan_is_not_zero(left: bool) -> None:
    """Before the first backward of a followed model nothing is known; behind a call that left its plan, what is known
    of the others is shown. Gradients count once, in the first table as in later ones.
    """
    model = made(1, ROWS)
    more: list[nn.Module] = []

    def hook(module: nn.Module, args: Any, y: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return more[0](y) if more else y

    model.register_forward_hook(hook)
    handle = attach(model, "90%", costs="flops", cache=False)
    result = model(X)
    before = handle.memory()
    assert before.activations is before.loss is before.temporaries is before.free is None
    result.square().mean().backward()
    model.zero_grad()
    plan, known = handle.plan, handle.memory()
    assert plan is not None
    assert known.activations + known.loss + known.temporaries + known.gradients == plan.predicted_peak
    if left:
        more.append(nn.Tanh())
        model(X)
        assert handle.plan is None
    found = handle.memory()
    assert (found.activations, found.loss, found.temporaries) == (known.activations, known.loss, known.temporaries)
