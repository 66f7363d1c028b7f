"""What TorchDynamo has no guard for is not stale: absent keys and attributes, orders, objects of Python's own."""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import dataclasses
import logging
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytest
import torch
from against_eager import assert_same, snapshot, tight_budget
from models import SEVERAL, in_turn, randn
from torch import nn
from torch.overrides import TorchFunctionMode

from rkgb.errors import UnsupportedError
from rockmate import BudgetWarning, Rockmate, attach

SCALE = contextvars.ContextVar("SCALE", default=1.0)
LOGGER = logging.getLogger("test_unguarded")
TABLE: dict[str, float] = {}


class Reads(nn.Module):
    """Multiplies by what ``read`` finds; ``breaks``: as no one graph."""

    def __init__(self, read: Callable[[Any, torch.Tensor], Any], breaks: bool = False) -> None:
        super().__init__()
        self.read, self.breaks = read, breaks
        wide = [layer for _ in range(3) for layer in (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh())]
        self.first, self.body = nn.Linear(16, 16), nn.Sequential(*wide)
        self.heads = nn.ModuleDict()
        self.table: dict[str, float] = {}
        self.layers = collections.OrderedDict(one=nn.Linear(16, 16), two=nn.Tanh())
        self.values, self.bytes, self.queue = array.array("d", [1.0]), bytearray([1]), collections.deque([1.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        y: torch.Tensor = self.body(h * self.read(self, h))
        return y


def key(m: Reads, h: torch.Tensor) -> Any:
    try:
        return m.table["scale"]
    except KeyError:
        return 1.0


def global_key(m: Reads, h: torch.Tensor) -> Any:
    try:
        return TABLE["scale"]
    except LookupError:
        return 1.0


def adapter(m: Reads, h: torch.Tensor) -> Any:
    try:
        return m.heads["task"](h)
    except KeyError:
        return h


def attribute(m: Reads, h: torch.Tensor) -> Any:
    try:
        return m.temperature
    except AttributeError:
        return 1.0


def own_attribute(m: Reads, h: torch.Tensor) -> Any:
    try:
        m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    except AttributeError:
        m.mean = h.detach().mean(0)
    return m.mean


def ordered(m: Reads, h: torch.Tensor) -> Any:
    for layer in m.layers.values():
        h = layer(h)
    return h


def arrive(m: Reads) -> None:
    torch.manual_seed(9)
    m.heads["task"] = nn.Linear(16, 16)
    m.table["scale"] = TABLE["scale"] = m.temperature = 2.0  # type: ignore[assignment]


def typed() -> Callable[[Any, torch.Tensor], Any]:
    """As a function that was typed into an interpreter."""
    names: dict[str, Any] = {}
    code = "def typed(m, h):\n    try:\n        return m.table['scale']\n    except KeyError:\n        return 1.0\n"
    exec(compile(code, "<stdin>", "exec"), names)
    found: Callable[[Any, torch.Tensor], Any] = names["typed"]
    return found


CAUGHT = [key, global_key, adapter, attribute, own_attribute, typed()]


@pytest.mark.parametrize(
    ("read", "breaks"), [*in_turn([*CAUGHT, ordered], [False]), (key, True), (own_attribute, True), (ordered, True)]
)
@pytest.mark.filterwarnings("ignore::rockmate.BudgetWarning")  # other graphs come when the change does
def test_what_comes_after_planning_is_seen(read: Callable[[Any, torch.Tensor], Any], breaks: bool) -> None:
    results = []
    for attached in (False, True):
        TABLE.clear()
        torch.manual_seed(0)
        model, found = Reads(read, breaks), []
        if attached:
            attach(model, "60%", costs="flops", on_infeasible="least")
        for k in range(6):
            if k == 3:
                arrive(model)
                model.layers.move_to_end("one")
            y = model(randn(256, 16, seed=k))
            y.square().mean().backward()
            found.append(y.detach())
        results.append([*found, *snapshot(model)])
    assert_same(results[1], results[0])
    assert not torch.equal(*results[0][2:4])


def set_array(m: Reads) -> None:
    m.values[0] = 2.0


def set_bytes(m: Reads) -> None:
    m.bytes[0] = 2


def turn(m: Reads) -> None:
    m.queue[0] = 2.0


CHANGES: dict[str, tuple[Callable[[Any, torch.Tensor], Any], Callable[[Reads], Any]]] = {
    "ContextVar": (lambda m, h: SCALE.get(), lambda m: SCALE.set(2.0)),
    "array": (lambda m, h: m.values[0], set_array),
    "bytearray": (lambda m, h: m.bytes[0], set_bytes),
    "deque": (lambda m, h: m.queue[0], turn),
    "level of a logger": (lambda m, h: 2 if LOGGER.isEnabledFor(logging.DEBUG) else 1, lambda m: LOGGER.setLevel(10)),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.filterwarnings(SEVERAL)
def test_objects_of_pythons_own_are_seen_in_a_trace(what: str) -> None:
    read, change = CHANGES[what]
    LOGGER.setLevel(logging.WARNING)
    token = SCALE.set(1.0)
    try:
        model, x = Reads(read), randn(256, 16, seed=0)
        rk = Rockmate(model, x, tight_budget(model, (x,)), costs="flops")
        before = rk(x).detach()
        change(model)
        assert torch.equal(rk(x), model(x))
        assert not torch.equal(rk(x), before)
    finally:
        SCALE.reset(token)


class Branches(nn.Module):
    """Two graphs, of which the second one reads a number of NumPy's."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)), nn.Linear(24, 24)
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if h.sum().item() > 1e9:
            h = h * 2
        y: torch.Tensor = self.b((h * float(self.value)).tanh())
        return y


@pytest.mark.parametrize("kind", [np.float64, np.int64])
def test_a_number_of_numpys_in_a_model_that_is_followed(kind: Any) -> None:
    results: list[list[Any]] = []
    for attached in (False, True):
        torch.manual_seed(0)
        model, found = Branches(kind(1)), []
        handle = attach(model, "80%", costs="flops", on_infeasible="least") if attached else None
        for k in range(6):
            model.value = kind(max(1, k - 2))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", BudgetWarning)
                y = model(randn(64, 24, seed=k))
                y.square().mean().backward()
            found.append(y.detach())
        results.append([*found, *snapshot(model)])
    assert_same(results[1], results[0])
    assert handle is not None and handle.plan is not None


class Base:
    scale = 1.0

    def __len__(self) -> int:
        return 1

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        return h

    def __add__(self, other: float) -> float:
        return other


class Derived(Base):
    pass


class Proxy:
    """Looks up in ``inner`` what it does not have."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Like:
    """Equals others of its size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Like) and other.size == self.size

    def __hash__(self) -> int:
        return hash(self.size)


class Part(nn.Module):
    scale = 1.0

    def __getattr__(self, name: str) -> Any:
        return 1.0 if name == "wanted" else super().__getattr__(name)


class DerivedPart(Part):
    pass


class Objects(Reads):
    def __init__(self, read: Callable[[Any, torch.Tensor], Any], breaks: bool) -> None:
        super().__init__(read, breaks)
        self.one, self.other = Derived(), Derived()
        self.list, self.other_list, self.objects = [1.0], [1.0], [Derived()]
        self.proxy, self.part = Proxy(Base()), DerivedPart()
        self.last, self.same_size = nn.Linear(16, 16), nn.Linear(16, 16)
        self.function, self.module, self.space = (lambda: None), types.ModuleType("settings"), types.SimpleNamespace()
        self.key, self.like, self.gains = nn.functional.gelu, Like(2), {nn.functional.relu: 2.0, Like(2): 3.0}
        self.by_layer, self.by_pair, self.weak = {self.last: 2.0}, {}, weakref.WeakKeyDictionary()
        self.by_method = {self.same_size.forward: 2.0}


OBJECTS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], Callable[[Any], Any]]] = {
    "is": (lambda m, h: 2 if m.one is m.other else 1, lambda m: setattr(m, "other", m.one)),
    "is not": (lambda m, h: 2 if m.one is not m.proxy else 1, lambda m: setattr(m, "proxy", m.one)),
    "is, of lists": (
        lambda m, h: 2 if m.list is m.other_list else 1,
        lambda m: setattr(m, "other_list", m.list),
    ),
    "is, of modules": (lambda m, h: 2 if m.last is m.same_size else 1, lambda m: setattr(m, "same_size", m.last)),
    "is, of tied weights": (
        lambda m, h: m.last(h) if m.last.weight is m.same_size.weight else m.same_size(h),
        lambda m: setattr(m.same_size, "weight", m.last.weight),
    ),
    "==": (lambda m, h: 2 if m.one == m.other else 1, lambda m: setattr(m, "other", m.one)),
    "in": (lambda m, h: 2 if m.one in m.objects else 1, lambda m: m.objects.insert(0, m.objects.pop() and m.one)),
    "attribute of a class": (lambda m, h: m.one.scale, lambda m: setattr(Derived, "scale", 2.0)),
    "attribute of a module's class": (lambda m, h: m.part.scale, lambda m: setattr(DerivedPart, "scale", 2.0)),
    "method of a class": (lambda m, h: m.one.scaled(h), lambda m: setattr(Derived, "scaled", lambda self, h: h * 2)),
    "special method": (lambda m, h: len(m.one), lambda m: setattr(Derived, "__len__", lambda self: 2)),
    "attribute that __getattr__ found": (lambda m, h: m.proxy.scale, lambda m: setattr(m.proxy, "scale", 2.0)),
    "attribute that a module's __getattr__ found": (
        lambda m, h: m.part.wanted,
        lambda m: setattr(m.part, "wanted", 2.0),
    ),
    "in __dict__": (lambda m, h: 2 if "late" in m.one.__dict__ else 1, lambda m: setattr(m.one, "late", 1)),
    "__dict__ of a module": (lambda m, h: m.__dict__.setdefault("late", 1.0), lambda m: setattr(m, "late", 2.0)),
    "vars() of a namespace": (lambda m, h: 1 + len(vars(m.space)), lambda m: setattr(m.space, "late", 1)),
    "attribute of a function": (
        lambda m, h: getattr(m.function, "late", 1.0),
        lambda m: setattr(m.function, "late", 2.0),
    ),
    "attribute of Python's module": (
        lambda m, h: 2 if hasattr(m.module, "late") else 1,
        lambda m: setattr(m.module, "late", 2.0),
    ),
    "function as a key": (lambda m, h: m.gains.get(m.key, 1.0), lambda m: setattr(m, "key", nn.functional.relu)),
    "layer as a key": (
        lambda m, h: m.by_layer.get(m.same_size, 1.0),
        lambda m: setattr(m, "same_size", m.last),
    ),
    "method as a key": (
        lambda m, h: m.by_method.get(m.last.forward, 1.0),
        lambda m: setattr(m, "last", m.same_size),
    ),
    "key that equals another": (lambda m, h: m.gains.get(m.like, 1.0), lambda m: setattr(m, "like", Like(3))),
    "key that forward makes": (
        lambda m, h: m.by_pair.get((m.one, 0), 1.0),
        lambda m: m.by_pair.update({(m.one, 0): 2.0}),
    ),
    "weak key": (lambda m, h: 2 if m.last in m.weak else 1, lambda m: m.weak.update({m.last: 1})),
}


@pytest.mark.parametrize(("what", "breaks"), [*in_turn(OBJECTS, [False]), *in_turn([*OBJECTS][::3], [True])])
@pytest.mark.filterwarnings("ignore::rockmate.BudgetWarning")  # other graphs come when the change does
def test_objects_that_become_the_same_and_classes_that_change_are_seen(what: str, breaks: bool) -> None:
    read, change = OBJECTS[what]
    before = {c: dict(vars(c)) for c in (Derived, DerivedPart)}
    models = [Objects(read, breaks) for _ in range(3)]
    for m in models[1:]:
        m.load_state_dict(models[0].state_dict())
    attach(models[1], "60%", costs="flops", on_infeasible="least")
    planned = Rockmate(models[2], randn(256, 16, seed=0), "60%", costs="flops") if not breaks else models[2]
    try:
        for k in range(6):
            if k == 3:
                for m in models:
                    change(m)
            results = [m(randn(256, 16, seed=k)) for m in (models[0], models[1], planned)]
            for y in results:
                y.square().mean().backward()
            assert_same(results[1:], [results[0]] * 2)
        for m in models[1:]:
            assert_same(snapshot(m), snapshot(models[0]))
    finally:
        for c, names in before.items():
            for name in set(vars(c)) - set(names):
                delattr(c, name)


Made = tuple[Callable[[Any, torch.Tensor], Any], Callable[[], Any]]
"""What forward multiplies by, and what changes that."""


def code_of_a_method() -> Made:
    class Own:
        def scale(self) -> float:
            return 1.0

    def other(self: Own) -> float:
        return 2.0

    own = Own()
    return lambda m, h: own.scale(), lambda: setattr(Own.scale, "__code__", other.__code__)


def defaults_of_a_method() -> Made:
    class Own:
        def __init__(self, scale: float = 1.0) -> None:
            self.scale = scale

    return lambda m, h: Own().scale, lambda: setattr(Own.__init__, "__defaults__", (2.0,))


def closure_of_what_forward_makes() -> Made:
    scales = [1.0]

    class Own:
        def __init__(self) -> None:
            self.scale = scales[0]

    return lambda m, h: Own().scale, lambda: scales.append(scales.pop() + 1)


def closure_of_a_data_class() -> Made:
    scale = 1.0

    @dataclasses.dataclass
    class Own:
        scale: float = 1.0

        def __post_init__(self) -> None:
            self.scale *= scale

    def change() -> None:
        nonlocal scale
        scale = 2.0

    return lambda m, h: Own().scale, change


def default_of_what_forward_makes() -> Made:
    class Own:
        def scale(self, scales: list[float] = [1.0]) -> float:  # noqa: B006
            return scales[0]

    def change() -> None:
        assert Own.scale.__defaults__ is not None
        Own.scale.__defaults__[0][0] = 2.0

    return lambda m, h: Own().scale(), change


def property_of_what_forward_makes() -> Made:
    scales = [1.0]

    class Own:
        @property
        def scale(self) -> float:
            return scales[0]

    return lambda m, h: Own().scale, lambda: scales.append(scales.pop() + 1)


def attribute_of_an_empty_dict() -> Made:
    class Own(dict[str, float]):
        scale = 1.0

        def __missing__(self, key: str) -> float:
            return self.scale

    own = Own()
    return lambda m, h: own["scale"], lambda: setattr(own, "scale", 2.0)


def name_of_pythons_own() -> Made:
    globals().pop("sum", None)
    return lambda m, h: sum([1.0, 1.0]), lambda: globals().update(sum=max)


def protocol() -> Made:
    @runtime_checkable
    class Scales(Protocol):
        def scale(self) -> float: ...

    class Own: ...

    own = Own()
    return lambda m, h: 1.0 if isinstance(own, Scales) else 2.0, lambda: setattr(own, "scale", lambda: 1.0)


def metaclass() -> Made:
    class Kind(type):
        on = True

        def __instancecheck__(cls, instance: Any) -> bool:
            return cls.on

    class Own(metaclass=Kind): ...

    return lambda m, h: 1.0 if isinstance(m.table, Own) else 2.0, lambda: setattr(Own, "on", False)


MADE = [
    *(code_of_a_method, defaults_of_a_method, closure_of_what_forward_makes, closure_of_a_data_class),
    *(default_of_what_forward_makes, property_of_what_forward_makes, attribute_of_an_empty_dict),
    *(name_of_pythons_own, protocol, metaclass),
]


@pytest.mark.parametrize("make", MADE)
@pytest.mark.filterwarnings("ignore::rockmate.BudgetWarning")  # other graphs come when the change does
def test_what_code_reads_that_has_no_place_in_the_model(make: Callable[[], Made]) -> None:
    results = []
    for attached in (False, True):
        read, change = make()
        torch.manual_seed(0)
        model, found = Reads(read), []
        if attached:
            attach(model, "60%", costs="flops", on_infeasible="least")
        for k in range(4):
            if k == 2:
                change()
            y = model(randn(256, 16, seed=0))
            y.square().mean().backward()
            found.append(y.detach())
        results.append([*found, *snapshot(model)])
    globals().pop("sum", None)
    assert_same(results[1], results[0])
    assert not torch.equal(*results[0][1:3])


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.nn.functional.gelu else found


class Doubled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found * 2 if func is torch.nn.functional.gelu else found


@pytest.mark.filterwarnings(SEVERAL)
def test_what_overrides_torchs_functions_is_not_left_out() -> None:
    model, x = Reads(lambda m, h: 1.0), randn(256, 16, seed=0)
    eager = copy.deepcopy(model)
    attach(model, "60%", costs="flops")
    plain = model(x)
    with Doubles():
        wanted = eager(x)
        with pytest.warns(BudgetWarning, match="under the TorchFunctionMode Doubles the model itself runs"):
            assert torch.equal(model(x), wanted)
    assert not torch.equal(plain, wanted)
    assert torch.equal(model(x), plain)
    with pytest.raises(UnsupportedError, match=r"an input is a Doubled, .*as_subclass\(torch\.Tensor\)"):
        model(x.as_subclass(Doubled))


def test_code_that_asks_whether_it_is_compiled_computes_as_in_eager_mode() -> None:
    model = Reads(lambda m, h: 2.0 if torch.compiler.is_compiling() or torch.compiler.is_dynamo_compiling() else 1.0)
    eager, x = copy.deepcopy(model), randn(256, 16, seed=0)
    handle = attach(model, "60%", costs="flops")
    assert torch.equal(model(x), eager(x))
    assert handle.plan is not None
