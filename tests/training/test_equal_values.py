"""Values that are equal, and with which forward computes something else: a call with the other one is captured anew."""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from against_eager import assert_same, snapshot
from models import randn
from torch import nn

from rkgb.errors import UnsupportedError
from rockmate import BudgetWarning, attach


class Reads(nn.Module):
    """Computes with what ``read`` makes of ``value``, of an argument, and of named arguments."""

    value: Any = None

    def __init__(self, read: Callable[..., Any]) -> None:
        super().__init__()
        self.read = read
        self.body = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)))
        )

    def forward(self, x: torch.Tensor, given: Any = None, **named: Any) -> torch.Tensor:
        h = self.body(x)
        y: torch.Tensor = self.body(self.read(self, h, given, named) * h)
        return y


def folded(numbers: Iterable[Any]) -> float:
    """A number that depends on the order."""
    found = 0.0
    for number in numbers:
        found = 0.5 * found + float(number) + 1
    return found


def of_value(read: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda m, h, given, named: read(m.value)


ONE, OTHER = {0.5: 1, 0.25: 2}, {0.25: 2, 0.5: 1}
TWO, MORE = {0.5: 1, 0.25: 2}, {0.125: 3, 0.5: 1, 0.25: 2}
SET, ORDER = set([8, 16, 24]), set([24, 16, 8])  # noqa: C405 - in this order

VALUES: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "list(dict)": (lambda d: folded(list(d)), ONE, OTHER),
    "[*dict]": (lambda d: folded([*d]), ONE, OTHER),
    "{**dict}": (lambda d: folded({**d}), ONE, OTHER),
    "dict.copy()": (lambda d: folded(d.copy()), ONE, OTHER),
    "dict | dict": (lambda d: folded(d | {}), ONE, OTHER),
    "f(*dict)": (lambda d: (lambda *numbers: folded(numbers))(*d), ONE, OTHER),
    "min(dict, key=)": (lambda d: min(d, key=lambda k: 0), ONE, OTHER),
    "min of more": (min, TWO, MORE),
    "text of a dict": (lambda d: 1.0 + str(d).index("5"), ONE, OTHER),
    "keys": (folded, ONE.keys(), OTHER.keys()),
    "defaultdict": (lambda d: folded(list(d)), collections.defaultdict(int, ONE), collections.defaultdict(int, OTHER)),
    "dict in a list": (lambda x: folded(list(x[0])), [ONE], [OTHER]),
    "set": (folded, SET, ORDER),
    "frozenset": (folded, frozenset(SET), frozenset(ORDER)),
    "kinds in a tuple": (lambda t: 2.0 if isinstance(t[0], float) else 1.0, (1, 2), (1.0, 2.0)),
    "kinds in a nested tuple": (lambda t: 2.0 if t[0][0] is True else 1.0, ((1, 0),), ((True, False),)),
    "zero": (lambda x: 2.0 + math.copysign(1, x), 0.0, -0.0),
    "zero in a tuple": (lambda x: 2.0 + math.copysign(1, x[0]), (0.0,), (-0.0,)),
    "complex": (lambda x: 2.0 + math.copysign(1, x.imag), complex(1, 0.0), complex(1, -0.0)),
}


def check(model: Reads, call: Callable[[Reads, int], torch.Tensor], steps: int = 4) -> None:
    """Compare steps, under a plan and in eager mode, which differ between even and odd ones."""
    eager = copy.deepcopy(model)
    handle = attach(model, "80%", costs="flops")
    found: list[list[torch.Tensor]] = [[], []]
    for k in range(steps):
        for m, outputs in zip((model, eager), found, strict=True):
            outputs.append(call(m, k))
            outputs[-1].square().mean().backward()
    assert_same([y.detach() for y in found[0]], [y.detach() for y in found[1]])
    assert_same(snapshot(model), snapshot(eager))
    assert not torch.equal(found[1][0], found[1][1])
    assert handle.plan is not None


@pytest.mark.parametrize("what", VALUES)
def test_an_attribute_that_equals_the_one_before(what: str) -> None:
    read, *values = VALUES[what]
    assert what == "min of more" or values[0] == values[1]

    def call(m: Reads, k: int) -> torch.Tensor:
        m.value = values[k % 2]
        return m(randn(64, 16, seed=0))

    check(Reads(of_value(read)), call)


def test_a_number_that_changes_becomes_either_zero() -> None:
    def call(m: Reads, k: int) -> torch.Tensor:
        m.value = (1.0, 2.0, 0.0, -0.0)[k]
        return m(randn(64, 16, seed=0))

    check(Reads(of_value(lambda x: x + math.copysign(1, x))), call)


@pytest.mark.parametrize("what", ["dict(dict)", "named"])
def test_arguments_in_another_order(what: str) -> None:
    a, b = torch.full((16,), 0.1), torch.full((16,), 0.7)
    orders = {"a": a, "b": b}, {"b": b, "a": a}

    def read(m: Any, h: torch.Tensor, given: Any, named: Any) -> Any:
        for t in (named if what == "named" else {**given}).values():
            h = torch.tanh(2 * h + t)
        return h

    def call(m: Reads, k: int) -> torch.Tensor:
        x = randn(64, 16, seed=0)
        return m(x, **orders[k % 2]) if what == "named" else m(x, orders[k % 2])

    check(Reads(read), call)


def leaf() -> torch.Tensor:
    return torch.ones(16, requires_grad=True)


def retaining() -> torch.Tensor:
    t = leaf() * 1
    t.retain_grad()
    return t


def hooked() -> torch.Tensor:
    t = leaf()
    t.register_hook(lambda g: g)
    return t


ASKED: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[], torch.Tensor]]] = {
    "is_leaf": (lambda t: t.is_leaf, lambda: leaf() * 1),
    "grad_fn": (lambda t: t.grad_fn is None, lambda: leaf() * 1),
    "_base": (lambda t: t._base is None, lambda: leaf()[:]),
    "retains_grad": (lambda t: not t.retains_grad, retaining),
    "output_nr": (lambda t: t.output_nr == 0, lambda: torch.ones(2, 16, requires_grad=True).unbind()[1]),
    "_backward_hooks": (lambda t: not t._backward_hooks, hooked),
}


@pytest.mark.parametrize("what", ASKED)
def test_the_history_of_an_argument(what: str) -> None:
    asked, other = ASKED[what]

    def call(m: Reads, k: int) -> torch.Tensor:
        return m(randn(64, 16, seed=0), other() if k % 2 else leaf())

    check(Reads(lambda m, h, given, named: 2.0 if asked(given) else given), call, steps=6)


@pytest.mark.parametrize("inside", [False, True])
def test_the_dtype_of_autocast(inside: bool) -> None:
    dtypes, before = (torch.bfloat16, torch.float16), torch.get_autocast_dtype("cpu")

    def call(m: Reads, k: int) -> torch.Tensor:
        torch.set_autocast_dtype("cpu", dtypes[k % 2])
        with torch.autocast("cpu", dtypes[k % 2]) if inside else nullcontext():
            return m(randn(64, 16, seed=0)).float()

    try:
        check(Reads(lambda m, h, given, named: h.to(torch.get_autocast_dtype("cpu")).float()), call)
    finally:
        torch.set_autocast_dtype("cpu", before)


def chosen(m: Any, h: torch.Tensor, given: Any, named: Any) -> Any:
    return torch.cond(h.sum() > 0, lambda h: h.sin(), lambda h: h.cos(), (h,))


def chosen_and_followed(m: Any, h: torch.Tensor, given: Any, named: Any) -> Any:
    return chosen(m, h * 2 if h.sum().item() > 1e9 else h, given, named)


@pytest.mark.parametrize("read", [chosen, chosen_and_followed])
def test_an_operator_that_runs_functions_is_refused(read: Callable[..., Any]) -> None:
    model, x = Reads(read), randn(64, 16, seed=0)
    attach(model, "80%", costs="flops")
    with pytest.raises(UnsupportedError, match=r"operator 'cond' at test_equal_values.py:\d+, .*torch.where"):
        model(x).square().mean().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, in eager mode
def test_an_operator_that_runs_functions_runs_without_a_plan_where_that_is_allowed() -> None:
    torch._dynamo.reset()  # by which torch.cond runs in eager mode, too
    model, x = Reads(chosen), randn(64, 16, seed=0)
    wanted = model(x)
    attach(model, "80%", costs="flops", on_infeasible="least")
    with pytest.warns(BudgetWarning, match="no budget: forward calls torch's operator 'cond'"):
        assert torch.equal(model(x), wanted)
