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

from rkgb.cost.saved import each_saved
from rkgb.storages import storage_key
from rockmate.rotor.execution import Call
from rockmate.rotor.selective import NOTHING, Survey, units
from solvers.rotor.ops import B, Fck, Fe, Loss


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
        self.of[func] += func is not torch.ops.aten.detach.default
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


def surveyed(
    layer: Callable[[torch.Tensor], Any], x: torch.Tensor, ends: bool = True
) -> tuple[Survey, list[frozenset[int]]]:
    """What a run makes, and the places that can be kept together up to the last saved tensor."""
    last = 0

    def note(_: torch.Tensor) -> None:
        nonlocal last
        last = len(survey.made)

    with each_saved(note), Survey(lambda: None, [torch.device("cpu")]) as survey:
        output = layer(x)
    kept = {storage_key(x), storage_key(output)} if ends else set()
    made = survey.made[:last] if last else survey.made
    return survey, [places for places, *_ in units(made, [1] * len(made), survey.draws, kept)]


def assert_as_eager(layer: nn.Module, survey: Survey, places: frozenset[int]) -> Counter[Any]:
    """A step of ``layer`` that keeps the results of ``places`` is eager mode's; what its backward called."""
    eager, ours = copy.deepcopy(layer), copy.deepcopy(layer)
    expected, _ = step([eager], eager)
    call = Call([ours], [Fe(0, 1), Loss(), B(0)], keeps=[[NOTHING, survey.choice(places)]])
    found, called = step([ours], call.forward)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected)), places
    return called


@pytest.mark.parametrize("name", LAYERS)
def test_every_set_of_kept_results_gives_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    survey, able = surveyed(copy.deepcopy(layer), torch.randn(8, 16, requires_grad=True))
    assert able
    again = copy.deepcopy(layer)
    _, without = step([again], Call([again], [Fck(0), Loss(), Fe(0), B(0)]).forward)
    for places in (*able, frozenset[int]().union(*able)):
        called = assert_as_eager(layer, survey, places)
        assert without.total() - called.total() >= len(places)


def test_random_results_are_kept_all_or_none() -> None:
    survey, able = surveyed(masked, torch.randn(8, 16), ends=False)
    assert sorted(map(len, able))[-1] == 2
    assert sum(r.random for r in survey.made) == 2
    survey, able = surveyed(drawn_over, torch.randn(8, 16), ends=False)
    assert not {r.place for r in survey.made if r.random} & frozenset().union(*able)


@torch.library.custom_op("rockmate_tests::noisy", mutates_args=())
def noisy(t: torch.Tensor) -> torch.Tensor:
    """Says to nobody that it draws."""
    return t + torch.rand_like(t)


noisy.register_autograd(lambda _, grad: grad)


def test_an_operator_that_does_not_say_that_it_draws() -> None:
    survey, _ = surveyed(lambda t: noisy(t.cos()).sin(), torch.randn(8, 16))
    assert [r.random for r in survey.made] == [False, True, False]


class Branch(nn.Module):
    """Takes another path where ``other`` is set."""

    def __init__(
        self, other: Callable[[torch.Tensor], torch.Tensor], plain: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.linear, self.paths, self.other = nn.Linear(16, 16), (plain, other), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.paths[self.other](self.linear(x).sin()).tanh().square()


def read_then_changed(h: torch.Tensor) -> torch.Tensor:
    seen = h.detach().exp()
    kept = h * seen
    return kept.add_(1) * seen


BRANCHES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "more draws": (lambda h: h * torch.rand_like(h) * torch.rand_like(h), lambda h: h * torch.rand_like(h)),
    "a draw": (lambda h: h.cos() * torch.rand_like(h), torch.cos),
    "a change in place": (lambda h: (h * 2).add_(1).sigmoid(), lambda h: (h * 2).sigmoid()),
    "read before the change": (read_then_changed, lambda h: (h * h.detach().exp()).add_(1) * 2),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_nothing_is_kept_of_a_run_that_takes_another_path(name: str) -> None:
    torch.manual_seed(0)
    layer = Branch(*BRANCHES[name])
    survey, able = surveyed(copy.deepcopy(layer), torch.randn(8, 16, requires_grad=True))
    layer.other = True
    for places in able:
        assert_as_eager(layer, survey, places)


class Remembers(nn.Module):
    """Makes a table for each length once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tables = nn.Linear(16, 16), dict[int, torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(len(x)).float().cos().sin()[:, None]
        return (self.linear(x).cos().sin() * self.tables[len(x)]).tanh().square()


def test_a_recompute_that_takes_another_path_than_the_first_run_uses_nothing_that_was_kept() -> None:
    torch.manual_seed(0)
    layer = Remembers()
    survey, able = surveyed(copy.deepcopy(layer), torch.randn(8, 16, requires_grad=True))
    for places in able:
        assert_as_eager(layer, survey, places)


def test_weights_that_autocast_casts_once_do_not_move_the_places_of_later_calls() -> None:
    """The first of several runs casts, the next ones find the casts: what is kept must not depend on that."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
    x = torch.randn(64, 16)
    gradients = []
    with torch.autocast("cpu", torch.bfloat16):
        survey, able = surveyed(blocks[0], x, ends=False)
        keep = survey.choice(frozenset[int]().union(*able))
        for ours in (False, True):
            torch.clear_autocast_cache()
            run = Call(blocks, [Fe(0, 1), Fe(1, 1), Fe(2), Loss(), *map(B, (2, 1, 0))], keeps=[[NOTHING, keep]] * 3)
            for block in blocks:
                block.zero_grad()
            (run.forward(x) if ours else nn.Sequential(*blocks)(x)).square().mean().backward()
            assert not any(stage.kept.results for stage in run.stages)
            gradients.append([p.grad for block in blocks for p in block.parameters()])
    assert all(map(torch.equal, *gradients))
