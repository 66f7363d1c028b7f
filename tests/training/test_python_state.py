"""What forward reads that is no tensor may change after planning: the plan is made anew, and only then."""

from __future__ import annotations

import copy
import cProfile
import dataclasses
import enum
import functools
import gc
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from against_eager import tight_budget
from models import SEVERAL
from torch import nn

from rockmate import Rockmate, UnsupportedError, attach

SCALE = 1.0
BOX = {"scale": 1.0}


class Kind(enum.Enum):
    PLAIN = 1
    DOUBLE = 2


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    unread: float = 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Scale(nn.Module):
    """Has a number in its class."""

    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def make_scale(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * by


class Reads(nn.Module):
    """Reads from a place that ``where`` says."""

    def __init__(self, where: str) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
        self.layers, self.where = nn.Sequential(*layers), where
        self.a_list, self.a_dict, self.nested = [1.0], {"scale": 1.0}, ([{"scale": (1.0,)}],)
        self.settings, self.slotted, self.space = Settings(), Slotted(), types.SimpleNamespace(scale=1.0)
        self.array, self.tensors, self.kind, self._is_doubled = np.ones(1), {"scale": torch.ones(())}, Kind.PLAIN, False
        self.number: float = 1.0
        self.sub, self.partial = Scale(), functools.partial(torch.mul, other=1.0)
        self.function, self.dtype = make_scale(1.0), torch.float32
        self.unregistered = [nn.Linear(8, 8)]
        self.counted, self.seen = types.SimpleNamespace(calls=0), []  # type: ignore[var-annotated]

    def forward(self, x: torch.Tensor, by: Any = None) -> torch.Tensor:
        x = self.layers(x)
        read: dict[str, Callable[[], Any]] = {
            "a_list": lambda: x * self.a_list[0],
            "a_dict": lambda: x * self.a_dict["scale"],
            "nested": lambda: x * self.nested[0][0]["scale"][0],
            "settings": lambda: x * self.settings.scale,
            "slotted": lambda: x * self.slotted.scale,
            "space": lambda: x * self.space.scale,
            "by name": lambda: x * getattr(self.space, "scale"),  # noqa: B009
            "array": lambda: x * float(self.array[0]),
            "tensors": lambda: x * self.tensors["scale"],
            "kind": lambda: x * 2 if self.kind is Kind.DOUBLE else x,
            "flag": lambda: x * 2 if self._is_doubled else x,
            "number": lambda: x * torch.full((1,), self.number).dtype.itemsize,
            "sub": lambda: self.sub(x),
            "partial": lambda: self.partial(x),
            "function": lambda: self.function(x),
            "dtype": lambda: x.to(self.dtype),
            "unregistered": lambda: self.unregistered[0](x),
            "global": lambda: x * SCALE,
            "global dict": lambda: x * BOX["scale"],
            "argument": lambda: x * by.scale,
            "argument's first": lambda: x * by[0],
            "default dtype": lambda: x * torch.tensor([0.1]),
            "nothing": lambda: x,
        }
        found: torch.Tensor = read[self.where]()
        return found


def set_global(model: Reads) -> None:
    globals()["SCALE"] = 3.0 - SCALE


def swap(obj: Any, key: Any, value: Any = 2.0) -> None:
    (obj.__setitem__ if isinstance(obj, (list, dict, np.ndarray)) else functools.partial(setattr, obj))(key, value)


CHANGES: dict[str, Callable[[Reads], None]] = {
    "a_list": lambda m: swap(m.a_list, 0),
    "a_dict": lambda m: swap(m.a_dict, "scale"),
    "nested": lambda m: swap(m.nested[0][0], "scale", (2.0,)),
    "settings": lambda m: swap(m.settings, "scale"),
    "slotted": lambda m: swap(m.slotted, "scale"),
    "space": lambda m: swap(m.space, "scale"),
    "by name": lambda m: swap(m.space, "scale"),
    "array": lambda m: swap(m.array, 0),
    "tensors": lambda m: swap(m.tensors, "scale", torch.full((), 2.0)),
    "kind": lambda m: swap(m, "kind", Kind.DOUBLE),
    "flag": lambda m: swap(m, "_is_doubled", True),
    "number": lambda m: swap(m, "number", 1),
    "sub": lambda m: swap(Scale, "scale", 3.0 - Scale.scale),
    "partial": lambda m: swap(m, "partial", functools.partial(torch.mul, other=2.0)),
    "function": lambda m: swap(m, "function", make_scale(2.0)),
    "dtype": lambda m: swap(m, "dtype", torch.float64),
    "unregistered": lambda m: swap(m.unregistered[0], "bias", nn.Parameter(torch.ones(8))),
    "global": set_global,
    "global dict": lambda m: swap(BOX, "scale", 3.0 - BOX["scale"]),
}


def planned(model: nn.Module, *args: Any) -> Rockmate:
    return Rockmate(model, args, tight_budget(model, args), costs="flops")


def assert_as_eager(rk: Rockmate, *args: Any) -> None:
    mine, eager = rk(*args), rk.original(*args)
    assert mine.dtype == eager.dtype
    assert torch.equal(mine, eager)


ONE_GRAPH = ("tensors", "unregistered", "number", "nested", "partial")
"""What changes is an input of the program, or a number of it: the plan is there, or carried over."""


@pytest.mark.parametrize("where", CHANGES)
@pytest.mark.filterwarnings(SEVERAL)
def test_what_changes_after_planning_is_seen(where: str) -> None:
    model, x = Reads(where), torch.randn(16, 8)
    rk = planned(model, x)
    if where == "dtype":
        rk.budget *= 2
    assert_as_eager(rk, x)
    assert rk.plans_made == 1
    before = rk(x)
    CHANGES[where](model)
    assert_as_eager(rk, x)
    assert rk.plans_made == (1 if where in ONE_GRAPH else 2)
    after = rk(x)
    assert before.dtype != after.dtype or not torch.equal(before, after), "the change has no effect"
    rk.zero_grad()
    rk(x).sum().backward()
    mine = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    model(x).sum().backward()
    assert all(torch.equal(mine[n], p.grad) for n, p in model.named_parameters() if p.grad is not None)  # type: ignore[arg-type]


def test_forwards_of_instances_and_classes_are_seen() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Scale(), nn.Linear(8, 8)), torch.randn(16, 8)
    rk = planned(model, x)
    model[0].forward = types.MethodType(lambda m, x: 2 * F.linear(x, m.weight), model[0])
    assert_as_eager(rk, x)
    model[2].forward = functools.partial(lambda m, x: 3 * F.linear(x, m.weight), model[2])
    assert_as_eager(rk, x)
    original = Scale.forward
    try:
        Scale.forward = lambda self, x: x * 7  # type: ignore[method-assign]
        assert_as_eager(rk, x)
    finally:
        Scale.forward = original  # type: ignore[method-assign]
    assert_as_eager(rk, x)
    assert rk.plans_made == 3, "2 and 3 are numbers of one graph"


def test_variables_of_the_function_around_are_seen() -> None:
    held = {"scale": 1.0}

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.layer(x)) * held["scale"]

    model, x = Inner(), torch.randn(16, 8)
    rk = Rockmate(model, x, "1 MiB", costs="flops")
    held["scale"] = 2.0
    assert_as_eager(rk, x)
    assert rk.plans_made == 2


def test_objects_given_are_seen_by_what_they_hold() -> None:
    model, x = Reads("argument"), torch.randn(16, 8)
    rk = planned(model, x, Settings(1.0))
    assert_as_eager(rk, x, Settings(1.0))
    assert rk.plans_made == 1
    given = Settings(2.0)
    assert_as_eager(rk, x, given)
    given.scale = 3.0
    assert_as_eager(rk, x, given)
    assert rk.plans_made == 2, "a number that has changed once is an input of the program"


def test_arrays_of_objects_given_are_seen() -> None:
    model, x = Reads("argument's first"), torch.randn(16, 8)
    rk = Rockmate(model, (x, np.array([1.0, None])), "1 MiB", costs="flops")
    assert_as_eager(rk, x, np.array([2.0, None]))


def test_functions_that_take_the_place_of_others_in_memory() -> None:
    model, x = Reads("function"), torch.randn(16, 8)
    rk = Rockmate(model, x, "1 MiB", costs="flops")
    for k in range(2, 8):
        model.function = None  # type: ignore[assignment]
        model.function = make_scale(float(k))
        assert_as_eager(rk, x)


@pytest.mark.parametrize("settings", ["default dtype", "threads", "mkldnn"])
def test_settings_of_torch_are_seen(settings: str) -> None:
    model, x = Reads("default dtype"), torch.randn(16, 8)
    rk = Rockmate(model, x, "1 MiB", costs="flops")
    threads = torch.get_num_threads()
    try:
        if settings == "default dtype":
            torch.set_default_dtype(torch.float64)
        elif settings == "threads":
            torch.set_num_threads(threads + 1)
        with torch.backends.mkldnn.flags(enabled=settings != "mkldnn", allow_tf32=None):
            assert_as_eager(rk, x)
            assert rk.plans_made == 2
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
    assert_as_eager(rk, x)
    assert rk.plans_made == 2


def test_other_layouts_of_parameters_are_planned() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 16, 16)
    rk = Rockmate(model, x, "1 MiB", costs="flops")
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    assert_as_eager(rk, x)
    assert rk.plans_made == 2


def test_what_nothing_reads_may_change() -> None:
    model, x = Reads("settings"), torch.randn(16, 8)
    rk = planned(model, x)
    for k in range(3):
        model.settings.unread = float(k)
        model.trainer = types.SimpleNamespace(step=k, model=model)  # type: ignore[assignment]
        rk(x)
    assert rk.plans_made == 1


class Collects(Reads):
    """Appends to a list and counts in an object, as it runs."""

    def forward(self, x: torch.Tensor, by: Any = None) -> torch.Tensor:
        self.counted.calls += 1
        self.seen.append(x.detach().mean())
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:.*:rockmate.BudgetWarning")
def test_what_forward_itself_changes_is_never_left_stale() -> None:
    """A plan of the whole trace would leave the list as it was; an attached model counts between captured graphs."""
    model, x = Collects("nothing"), torch.randn(16, 8)
    with pytest.raises(UnsupportedError, match="forward changes the attribute counted in each call"):
        Rockmate(model, x, "1 MiB", costs="flops")
    assert model.seen == [], "as it was"
    attach(model, "4 KiB", costs="flops", on_infeasible="least")
    for _ in range(2):
        model(x)
    assert len(model.seen) == model.counted.calls == 2


def test_profilers_stay_on() -> None:
    calls: list[str] = []

    def profiler(frame: types.FrameType, event: str, argument: Any) -> None:
        calls.append(frame.f_code.co_name)

    def marked() -> None:
        pass

    model, x = Reads("nothing"), torch.randn(16, 8)
    sys.setprofile(profiler)
    try:
        Rockmate(model, x, "1 MiB", costs="flops")
        assert sys.getprofile() is profiler
        marked()
    finally:
        sys.setprofile(None)
    assert "marked" in calls
    profile = cProfile.Profile()
    profile.enable()
    Rockmate(copy.deepcopy(model), x, "1 MiB", costs="flops")
    marked()
    profile.disable()
    assert any(getattr(entry.code, "co_name", "") == "marked" for entry in profile.getstats())


def test_callbacks_of_the_garbage_collector_are_no_part_of_forward() -> None:
    collected: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        collected.append(phase)

    model, x = Reads("nothing"), torch.randn(16, 8)
    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        rk = planned(model, x)
        for _ in range(3):
            assert_as_eager(rk, x)
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
    assert collected
    assert gc.isenabled()
    assert rk.plans_made == 1
