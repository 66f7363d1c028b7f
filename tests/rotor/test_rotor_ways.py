"""Ways that keep some results of a layer: whatever is kept, gradients and random numbers are eager mode's."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rkgb.storages import storage_key
from rockmate import rotor
from rockmate.rotor.execution import Call
from rockmate.rotor.selective import OpCall, Survey, units
from solvers.rotor.ops import B, Fe, Loss


class Layer(nn.Module):
    """``between(linear(x))``, and a square, whose backward reads what it got."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.between = nn.Linear(16, 16), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.between(self.linear(x)).square().sin()


def masked(t: torch.Tensor) -> torch.Tensor:
    return t * torch.bernoulli(torch.full_like(t, 0.5)) + torch.rand_like(t)


def changed_after_reading(t: torch.Tensor) -> torch.Tensor:
    exp = t.exp()
    return exp.tanh() + exp.mul(2).add_(exp)


def overwritten(t: torch.Tensor) -> torch.Tensor:
    noise = torch.randn_like(t).mul_(2)
    noise[t.detach() > 0] = 0
    return t + noise


def drawn_over(t: torch.Tensor) -> torch.Tensor:
    """A result that is read, and drawn anew: what is drawn for it cannot be left out."""
    first = t.detach().exp()
    seen = first.cos()
    return t * seen * first.uniform_() + torch.rand_like(t)


def parts(t: torch.Tensor) -> torch.Tensor:
    values, order = t.sort(-1)
    a, b = values.chunk(2, -1)
    return torch.cat([a.exp() * b, order.to(t.dtype) * t], -1)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "two dropouts": lambda: nn.Sequential(Layer(nn.Dropout(0.3)), nn.Dropout(0.5), nn.LayerNorm(16)),
    "norm, changed in place": lambda: Layer(nn.Sequential(nn.BatchNorm1d(16), nn.ReLU6(inplace=True))),
    "a random slope": lambda: Layer(nn.RReLU()),
    "masks": lambda: Layer(masked),
    "changed after it was read": lambda: Layer(changed_after_reading),
    "partly overwritten": lambda: Layer(overwritten),
    "drawn over": lambda: Layer(drawn_over),
    "several results": lambda: Layer(parts),
    "attention": lambda: Layer(lambda t: F.scaled_dot_product_attention(t, t, t, dropout_p=0.2)),
}


class Counted(TorchDispatchMode):
    """How often each function is called."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func] += 1
        return func(*args, **(kwargs or {}))


def step(
    layers: list[nn.Module], run: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[torch.Tensor], Counter[Any]]:
    """Output, gradients, buffers and the generator's state; the functions that the backward called."""
    torch.manual_seed(5)
    x = torch.randn(8, 16, requires_grad=True)
    output = run(x)
    counted = Counted()
    with counted:
        output.sum().backward()
    assert x.grad is not None
    found = [output.detach(), x.grad, torch.get_rng_state()]
    for layer in layers:
        found += [p.grad for p in layer.parameters() if p.grad is not None] + [*layer.buffers()]
    return found, counted.of


@pytest.mark.parametrize("name", LAYERS)
def test_every_set_of_kept_results_gives_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x = torch.randn(8, 16, requires_grad=True)
    with Survey(lambda: None) as survey:
        output = copy.deepcopy(layer)(x)
    able = units(survey.made, [1] * len(survey.made), survey.draws, {storage_key(x), storage_key(output)})
    assert able
    eager = copy.deepcopy(layer)
    expected, _ = step([eager], eager)
    alone = Call([copy.deepcopy(layer)], [Fe(0), Loss(), B(0)])
    _, backward = step(list(alone_layers(alone)), alone.forward)
    for keep in (*(calls for calls, _, _ in able), frozenset[OpCall]().union(*(calls for calls, _, _ in able))):
        ours = copy.deepcopy(layer)
        call = Call([ours], [Fe(0, 1), Loss(), B(0)], keeps=[[frozenset(), keep]])
        found, called = step([ours], call.forward)
        assert all(map(torch.equal, found, expected)), keep
        assert len(found) == len(expected)
        for func, count in Counter(func for func, _ in keep).items():  # the others of the layer run again, at most
            copies = (
                len([*ours.buffers()]) if func is torch.ops.aten.clone.default else 0
            )  # for the second run to change
            assert called[func] - backward[func] <= survey.calls[func] - count + copies, func


def alone_layers(call: Call) -> list[Any]:
    return [stage.function for stage in call.stages]


def test_random_results_are_kept_all_or_none() -> None:
    x = torch.randn(8, 16)
    with Survey(lambda: None) as survey:
        masked(x).sin()
    random = [
        calls for calls, _, _ in units(survey.made, [1] * len(survey.made), survey.draws, set()) if len(calls) > 1
    ]
    assert [{func for func, _ in calls} for calls in random] == [
        {torch.ops.aten.bernoulli.default, torch.ops.aten.rand_like.default}
    ]
    with Survey(lambda: None) as survey:
        drawn_over(x)
    assert all(torch.ops.aten.rand_like.default not in {f for f, _ in calls} for calls, *_ in units(
        survey.made, [1] * len(survey.made), survey.draws, set()))  # fmt: skip


def test_weights_that_autocast_casts_once_do_not_shift_the_numbers_of_later_calls() -> None:
    """The first of several runs casts, the next ones find the casts: what is kept must not depend on that."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
    model = nn.Sequential(*(rotor.models.utils.AtomicSequential(*block) for block in model))
    x = torch.randn(64, 16)
    with torch.autocast("cpu", torch.bfloat16):
        with Survey(lambda: None) as survey:
            model[0](x)
        assert all(call[0] is not torch.ops.aten._to_copy.default for call in (r.call for r in survey.made))
        able = units(survey.made, [1] * len(survey.made), survey.draws, set())
        keep = frozenset().union(*(calls for calls, _, _ in able))
        losses = []
        for ours in (False, True):
            torch.clear_autocast_cache()
            run = Call(
                [*model], [Fe(0, 1), Fe(1, 1), Fe(2), Loss(), *map(B, (2, 1, 0))], keeps=[[frozenset(), keep]] * 3
            )
            model.zero_grad()
            (run.forward(x) if ours else model(x)).square().mean().backward()
            losses.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *losses))
