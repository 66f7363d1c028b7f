"""What forward draws from and changes in Python's objects: as in eager mode, or refused with everything as it was."""

from __future__ import annotations

import array
import collections
import functools
import gc
import itertools
import math
import queue
import random
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from against_eager import assert_same, snapshot
from models import randn
from test_attach import Net
from torch import nn

from rockmate import BudgetWarning, Rockmate, attach

PYTHON = random.Random(1)
NUMPY = np.random.default_rng(1)
COUNTED = types.SimpleNamespace(calls=0)

Scale = Callable[[Any, torch.Tensor], Any]
"""What the output is multiplied by, for a model that has ``held`` and its input."""


def _pushed(values: Any, what: Any) -> Any:
    values.append(what)
    return values


def _ticks(counted: Any) -> int:
    counted.calls += 1
    return int(counted.calls)


def _counting() -> Iterator[float]:
    yield from (1.0 + k for k in itertools.count())


@functools.lru_cache
def _noise(size: int) -> torch.Tensor:
    return torch.randn(size, 1)


NOT_CAPTURED: dict[str, tuple[Callable[[], Any], Scale]] = {
    "random.Random": (lambda: random.Random(1), lambda m, x: m.held.random()),
    "random.Random, a branch": (lambda: random.Random(1), lambda m, x: 1 if m.held.random() < 0.5 else 2),
    "random.Random, a list": (lambda: random.Random(1), lambda m, x: m.held.sample(range(9), 1)[0]),
    "random.Random, global": (lambda: PYTHON.seed(1), lambda m, x: PYTHON.uniform(1, 2)),
    "numpy.random.Generator": (lambda: np.random.default_rng(1), lambda m, x: float(m.held.uniform())),
    "numpy.random.Generator, a branch": (
        lambda: np.random.default_rng(4),
        lambda m, x: 1 if m.held.random() < 1 else 2,
    ),
    "numpy.random.Generator, global": (
        lambda: setattr(NUMPY.bit_generator, "state", np.random.default_rng(1).bit_generator.state),
        lambda m, x: float(NUMPY.random()),
    ),
    "numpy.random.RandomState": (lambda: np.random.RandomState(1), lambda m, x: float(m.held.rand())),
    "random": (lambda: random.seed(1), lambda m, x: random.random() + random.randint(0, 9)),
    "deque with maxlen": (lambda: collections.deque(maxlen=2), lambda m, x: sum(_pushed(m.held, x.detach().mean()))),
    "deque of numbers": (lambda: collections.deque(maxlen=3), lambda m, x: sum(_pushed(m.held, len(m.held)))),
    "iterator": (lambda: iter([1.0, 2.0, 3.0, 4.0, 5.0]), lambda m, x: next(m.held)),
    "cycle": (lambda: itertools.cycle([1.0, 2.0, 3.0, 4.0]), lambda m, x: next(m.held)),
    "generator": (_counting, lambda m, x: next(m.held)),
    "array": (lambda: array.array("d"), lambda m, x: len(_pushed(m.held, 1.0))),
    "bytearray": (bytearray, lambda m, x: len(_pushed(m.held, 1))),
    "queue": (queue.Queue, lambda m, x: (m.held.put(1), m.held.qsize())[1]),
    "namespace": (lambda: types.SimpleNamespace(calls=0), lambda m, x: _ticks(m.held)),
    "namespace, global": (lambda: vars(COUNTED).update(calls=0), lambda m, x: _ticks(COUNTED)),
    "cached draw": (_noise.cache_clear, lambda m, x: _noise(x.shape[0])),
}

AS_EAGER: dict[str, tuple[Callable[[], Any], Scale]] = {
    "deque, full": (lambda: collections.deque([1, 2], 2), lambda m, x: 3 if len(m.held) == m.held.maxlen else 4),
    "list": (list, lambda m, x: len(_pushed(m.held, x.detach().mean()))),
    "deque": (collections.deque, lambda m, x: len(_pushed(m.held, 1))),
    "count": (lambda: itertools.count(1), lambda m, x: next(m.held)),
    "array of NumPy": (lambda: np.zeros(2), lambda m, x: float((m.held.__iadd__(1)).sum())),
    "torch.Generator": (lambda: torch.Generator().manual_seed(1), lambda m, x: torch.rand(1, generator=m.held)),
    "torch.Generator, a value": (
        lambda: torch.Generator().manual_seed(1),
        lambda m, x: round(torch.rand(1, generator=m.held).item()) + 1,
    ),
    "every third call": (
        lambda: types.FunctionType(_ticks.__code__, {"int": int}),
        lambda m, x: 2 if _ticks(m) % 3 == 0 else 1,
    ),
}


def compared(hold: Callable[[], Any], scale: Scale) -> Any:
    """Five steps of a model as it is, and attached under a budget that forces recomputation; the handle."""

    class Scaled(Net):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.held = hold()

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * scale(self, x)

    results: list[list[Any]] = []
    handle: Any = None
    for attached in (False, True):
        torch.manual_seed(0)
        model: nn.Module = Scaled()
        if attached:
            handle = attach(model, "60%", costs="flops", on_infeasible="least")
        torch.manual_seed(5)
        found = []
        for k in range(5):
            loss = model(randn(64, 32, seed=k)).square().mean()
            loss.backward()
            found.append(loss.detach())
        results.append([*found, *snapshot(model), random.getstate()])
    assert_same(results[1], results[0])
    return handle


@pytest.mark.filterwarnings("ignore:.*lru_cache.*", "ignore:.*torch.jit", "ignore:.*:rockmate.BudgetWarning")
@pytest.mark.parametrize("what", NOT_CAPTURED)
def test_what_cannot_be_captured_runs_as_in_eager_mode(what: str) -> None:
    """It runs between captured graphs; at this size there may be no plan for the step then, which a warning says."""
    compared(*NOT_CAPTURED[what])


@pytest.mark.filterwarnings("ignore:.*lru_cache.*", "ignore:.*:rockmate.BudgetWarning")
def test_a_cache_is_seen_that_the_collector_leaves_out() -> None:
    """Scripts freeze what is there before they start processes."""
    gc.freeze()
    try:
        compared(*NOT_CAPTURED["cached draw"])
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("what", AS_EAGER)
def test_what_can_be_kept_is_as_in_eager_mode(what: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*plan of least memory runs", BudgetWarning)
        handle = compared(*AS_EAGER[what])
    assert any(p.plan is not None and p.plan.recomputed for p in handle.plans)


@pytest.mark.filterwarnings("ignore:.*:rockmate.BudgetWarning")
def test_draws_are_those_of_eager_mode_beside_other_threads() -> None:
    """The state of Python's generator cannot be put back then: nothing may be drawn by a capture."""
    import threading

    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        compared(*NOT_CAPTURED["random"])
    finally:
        done.set()
        thread.join()


def test_attributes_that_branches_set() -> None:
    """Such a model is traced as a whole, and each branch has a plan."""

    class Shrinks(Net):
        turns = 0

        def forward(self, x: torch.Tensor) -> Any:
            y, self.turns = self.body(x), 0
            while y.norm() > 40 and self.turns < 9:
                y, self.turns = y * 0.9, self.turns + 1
            return self.head(y)

    results: list[list[Any]] = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = Shrinks()
        handle = attach(model, "70%", costs="flops") if attached else None
        found: list[Any] = []
        for k, scale in enumerate((1.0, 2.0, 1.0, 1.0, 2.0, 0.5)):
            model(scale * randn(64, 32, seed=k % 2)).square().mean().backward()
            found.append(model.turns)
        results.append([*found, *snapshot(model)])
    assert_same(results[1], results[0])
    assert len({*results[0][:6]}) > 1
    assert handle is not None and handle.reason


def test_an_attribute_may_have_the_name_of_one_of_ours() -> None:
    """What an attachment holds (its ``last`` plan) changes with every call, and is nothing that the model reads."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(16, 16), nn.Linear(16, 1)

        def forward(self, x: torch.Tensor) -> Any:
            h, sure, turns = torch.zeros_like(x), torch.zeros(len(x)), 0
            while sure.min() < 0.9 and turns < 4:
                h = self.cell(x, h)
                sure, turns = sure + torch.sigmoid(self.head(h)).squeeze(1) / 9, turns + 1
            self.last = turns
            return h * sure[:, None]

    model = Counts()
    handle = attach(model, "80%", costs="flops", cache=False)
    for k in range(6):
        model(randn(64, 16, seed=k)).square().mean().backward()
    assert handle.reason
    assert len(handle.plans) <= 2


def hooked(y: torch.Tensor) -> torch.Tensor:
    y.register_hook(lambda g: 0.5 * g)
    return y


def caught(y: torch.Tensor) -> torch.Tensor:
    try:
        return y.view(7, -1)
    except RuntimeError:
        return y


QUOTIENTS: dict[str, tuple[Callable[[float], float], float]] = {
    "by a number": (lambda x: 1 / x, 0.0),
    "rest": (lambda x: 7 % int(x), 0.0),
    "root": (math.sqrt, -1.0),
    "power": (lambda x: 10.0**x, 1e3),
}


@pytest.mark.filterwarnings("ignore:.*:rockmate.BudgetWarning")
@pytest.mark.parametrize("what", QUOTIENTS)
def test_an_error_of_a_number_that_changes_is_caught_by_forward(what: str) -> None:
    compute, last = QUOTIENTS[what]

    class Model(Net):
        value = 1.0

        def forward(self, x: torch.Tensor) -> Any:
            try:
                scale = compute(self.value)
            except (ArithmeticError, ValueError):
                scale = 7.0
            return super().forward(x) * scale

    results = []
    for attached in (False, True):
        torch.manual_seed(0)
        model, found = Model(), []
        if attached:
            attach(model, "60%", costs="flops", on_infeasible="least")
        for k, value in enumerate((3.0, 2.0, last, 2.0)):
            model.value = value
            y = model(randn(64, 32, seed=k))
            y.square().mean().backward()
            found.append(y.detach())
        results.append([*found, *snapshot(model)])
    assert_same(results[1], results[0])


class Pushes:
    """Counts its calls on itself, and on the function, object and list that it is given or refers to."""

    def __init__(self) -> None:
        self.counted = types.SimpleNamespace(calls=0)
        self.proxy = weakref.proxy(self)

    def push(self, m: Any, x: torch.Tensor, values: list[float]) -> torch.Tensor:
        Pushes.push.calls += 1  # type: ignore[attr-defined]
        self.proxy.counted.calls += 1
        values.append(float(x.detach().sum()) * 0 + 1)
        return x * len(values) * self.counted.calls * Pushes.push.calls  # type: ignore[attr-defined]


def test_what_arguments_and_functions_hold_is_put_back_after_the_steps_of_a_sample() -> None:
    """The model is followed."""

    class Model(Net):
        def __init__(self, pushes: Pushes) -> None:
            super().__init__()
            self.pushes, self.proxy = pushes, weakref.proxy(pushes)

        def forward(self, x: torch.Tensor, values: list[float], drawn: torch.Generator) -> Any:  # type: ignore[override]
            return super().forward(self.proxy.push(self, x, values)) + torch.rand(1, generator=drawn)

    Pushes.push.calls = 0  # type: ignore[attr-defined]
    pushes, values, drawn = Pushes(), [], torch.Generator().manual_seed(1)
    state = drawn.get_state()
    rk = Rockmate(Model(pushes), (randn(64, 32, seed=0), values, drawn), "80%", costs="flops")
    assert rk.reason
    assert (values, pushes.counted.calls, Pushes.push.calls) == ([], 0, 0)  # type: ignore[attr-defined]
    assert torch.equal(drawn.get_state(), state)


def test_a_sample_draws_nothing_from_pythons_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkgb.trace.other_draws._alone", lambda: True)  # the thread of a time limit draws nothing

    class Model(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * random.randint(1, 9)

    before = random.getstate()
    Rockmate(Model(), randn(64, 32, seed=0), "80%", costs="flops")
    assert random.getstate() == before


@pytest.mark.filterwarnings("ignore:.*:rockmate.BudgetWarning")
@pytest.mark.parametrize("way", [hooked, caught])
def test_code_that_cannot_be_captured_runs_as_in_eager_mode(way: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Model(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return way(super().body(x))

    results = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = Model()
        if attached:
            attach(model, "70%", costs="flops", on_infeasible="least")
        torch.manual_seed(5)
        for k in range(4):
            model(randn(64, 32, seed=k)).square().mean().backward()
        results.append([*snapshot(model)])
    assert_same(results[1], results[0])


def test_an_error_of_the_model_is_its_own() -> None:
    model = Net()
    attach(model, "70%", costs="flops")
    with torch.inference_mode():
        x = torch.ones(64, 32)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        model(x)
    model(torch.ones(64, 32)).sum().backward()


def test_functions_that_name_no_module_are_looked_at() -> None:
    """As the methods that ``dataclass`` makes, of a class that is made by ``exec``."""
    made: dict[str, Any] = {}
    exec("def twice(x):\n    return 2 * x", made)
    made["twice"].__module__ = None
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.function = model, made["twice"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.function(self.model(x))
            return y if float(y.detach().sum()) < 1e9 else x  # is traced as a whole

    whole = Whole()
    x = torch.randn(16, 8)
    expected = whole(x)
    attach(whole, "1 MiB", sample=x, costs="flops")
    assert torch.equal(whole(x), expected)
