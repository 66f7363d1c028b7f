"""What no plan can do is refused by name: what it is, in which line, and what to do instead."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import rkgb
from rkgb import UnsupportedError, make_all_graphs
from rockmate import GraphError, InputError, Rockmate


class Two(nn.Module):
    """Two layers, whose forward is the function given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Reversible(torch.autograd.Function):
    """Runs ``layer``, and its backward inside its own, which gives the layer's parameters their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module, *_: torch.Tensor) -> torch.Tensor:
        ctx.layer, ctx.x = layer, x.detach()
        result: torch.Tensor = layer(x)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            ctx.layer(x).backward(grads[0])
        return x.grad, None, *(None for _ in ctx.layer.parameters())


def hidden(m: Two, x: torch.Tensor) -> Any:
    return Reversible.apply(m.first(x), m.second)


def passed(m: Two, x: torch.Tensor) -> Any:
    return Reversible.apply(m.first(x), m.second, *m.second.parameters())


def inner_gradient(m: Two, x: torch.Tensor) -> Any:
    return torch.func.grad(lambda y: m.first(y).sum())(x) + m.second(x)


def forward_mode(m: Two, x: torch.Tensor) -> Any:
    return torch.func.jvp(m.first, (x,), (x,))


def switched(m: Two, x: torch.Tensor) -> Any:
    m.second.weight.requires_grad_(False)
    y = m.second(m.first(x))
    m.second.weight.requires_grad_(True)
    return y


def memory_taken(m: Two, x: torch.Tensor) -> Any:
    y = m.first(x)
    y.data = y.data * 2
    return m.second(y)


def nested(m: Two, x: torch.Tensor) -> Any:
    return m.first(torch.nested.as_nested_tensor([x, x])).to_padded_tensor(0.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("function", [hidden, passed, switched, memory_taken, nested, forward_mode, inner_gradient])
def test_followed_where_a_graph_cannot_say_it(function: Callable[..., Any]) -> None:
    x = torch.randn(4, 8)
    results = []
    for model in (Two(function), Two(function)):
        call = Rockmate(model, x, "1 GiB", costs="flops") if results else model
        for _ in range(4):
            result = call(x)
            sum(t.square().sum() for t in (result if isinstance(result, tuple) else (result,))).backward()
        results.append([p.grad for p in model.parameters()])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*results, strict=True))


def one_by_one(m: Two, x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield m.first(x)


@pytest.mark.parametrize(
    ("function", "kind"),
    [(lambda m, x: {m.first(x)}, "set"), (one_by_one, "generator")],
)
def test_tensors_that_cannot_be_reached_by_a_trace(function: Callable[..., Any], kind: str) -> None:
    model, x = Two(function), torch.randn(4, 8)
    with pytest.raises(GraphError, match=f"output of type {kind} hides tensors"):
        make_all_graphs(model, x, costs="flops")
    ours, theirs = Rockmate(model, x, "1 GiB", costs="flops")(x), model(x)
    assert isinstance(ours, set if kind == "set" else Iterator)
    assert torch.equal(*ours, *theirs)


def test_a_function_that_has_captured_a_result() -> None:
    def function(m: Two, x: torch.Tensor) -> Any:
        y = m.first(x)
        return y, lambda z: y + z

    model, x = Two(function), torch.randn(4, 8)
    with pytest.raises(GraphError, match="output of type function hides tensors"):
        make_all_graphs(model, x, costs="flops")
    y, add = Rockmate(model, x, "1 GiB", costs="flops")(x)
    assert torch.equal(add(1), y + 1)


def test_nothing_computed_is_refused() -> None:
    with pytest.raises(InputError, match="returns no tensor that it computes"):
        Rockmate(Two(lambda m, x: x), torch.randn(4, 8), "1 GiB", costs="flops")


def test_lazy_modules_are_made_first() -> None:
    model, x = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2)), torch.randn(4, 8)
    with pytest.raises(InputError, match=r"0\.weight of the model has no shape yet"):
        Rockmate(model, x, "1 GiB", costs="flops")
    model(x)
    rk = Rockmate(model, x, "1 GiB", costs="flops")
    assert torch.equal(rk(x), model(x))


@dataclass(slots=True)
class Slots:
    """Has no ``__dict__``."""

    first: torch.Tensor
    count: int


class Named(dict[str, Any]):
    """A dict of another class."""


def test_slots_and_dicts_of_other_classes_go_in_and_out() -> None:
    def function(m: Two, given: Named) -> Any:
        return Slots(m.second(m.first(given["x"].first) * given["x"].count), 3), Named(sum=given["y"] + 1)

    model = Two(function)
    eager = copy.deepcopy(model)
    rk = Rockmate(model, (Named(x=Slots(torch.randn(4, 8), 2), y=torch.ones(8)),), "1 GiB", costs="flops")
    for seed in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        (made, named), (wanted, _) = (call(Named(x=Slots(x, 2), y=x[0])) for call in (rk, eager))
        assert (type(made), made.count, type(named)) == (Slots, 3, Named)
        assert made.first.grad_fn is not None and torch.equal(made.first, wanted.first)
        assert torch.equal(named["sum"], x[0] + 1)
    assert rk.plans_made == 1


def test_arrays_among_the_arguments_are_told_apart_by_their_contents() -> None:
    w, x = (
        numpy.random.default_rng(0).random((200, 8), "f"),
        torch.randn(200, 8),
    )  # what is printed leaves the middle out
    rk = Rockmate(Two(lambda m, x, w: m.first(x) * torch.from_numpy(w)), (x, w), "1 GiB", costs="flops")
    w = w.copy()
    w[100] = 0
    assert torch.equal(rk(x, w), rk.original(x, w))


def test_graphs_of_what_is_no_module_or_has_no_values() -> None:
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    with pytest.raises(TypeError, match=r"the model is a Tensor: give a torch\.nn\.Module, and after it the sample"):
        rkgb.make_all_graphs(x, model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="costs='fast': choose"):
        rkgb.make_all_graphs(model, x, costs="fast")
    wrong = nn.Linear(8, 8, device="meta")
    for make in (lambda: rkgb.make_all_graphs(wrong, x), lambda: rkgb.make_all_graphs(model, x.to("meta"))):
        with pytest.raises(UnsupportedError, match=r"on the meta device.*to_empty"):
            make()
    with pytest.raises(InputError, match=r"weight of the model is on the meta device.*to_empty"):
        Rockmate(wrong, x.to("meta"), "1 GiB")
