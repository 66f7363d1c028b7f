"""Followed models that checkpoint parts of themselves: planned as if they did not, where the results are the same."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from against_eager import WAYS, assert_same, planned_by, snapshot
from models import in_turn, pairs, randn
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from rockmate import InfeasibleBudgetError, UnsupportedError, attach, measure_peak

WIDTH, LAYERS = 64, 6
Part = Callable[["Layers", int, torch.Tensor], torch.Tensor]


class Layers(nn.Module):
    """Layers under checkpoints; the graph breaks between them."""

    def __init__(self, part: Part, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(LAYERS))
        self.part, self.options = part, {"use_reentrant": False} | options
        self.count, self.seen = 0, []  # type: ignore[var-annotated]
        self.register_buffer("sums", torch.zeros(WIDTH))
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k in range(LAYERS):
            x = checkpoint(self.part, self, k, x, **self.options)
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        return x


def light(model: Layers, k: int, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(model.layers[k](x).sin()).exp().tanh()


def masked(model: Layers, k: int, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(light(model, k, x), 0.2)


def written_inside(model: Layers, k: int, x: torch.Tensor) -> torch.Tensor:
    y = light(model, k, x).clone()
    y[:, ::2] *= 0.5
    return y


def normed(model: Layers, k: int, x: torch.Tensor) -> torch.Tensor:
    return light(model, k, model.norms[k](x))  # type: ignore[no-any-return]


def counted(model: Layers, k: int, x: torch.Tensor) -> torch.Tensor:
    model.count += 1
    return light(model, k, x) * (1 + 0.01 * model.count)


def noted(model: Layers, k: int, x: torch.Tensor) -> torch.Tensor:
    model.seen.append(k)
    return light(model, k, x) / (1 + 0.01 * len(model.seen))


def summed(model: Layers, k: int, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.sums += x.mean(0)
    return light(model, k, x) + model.sums.sin()


def drawn(model: Layers, k: int, x: torch.Tensor) -> torch.Tensor:
    mask = torch.rand(x.shape, generator=model.generator)
    return light(model, k, x) * mask


def drawn_by_python(model: Layers, k: int, x: torch.Tensor) -> torch.Tensor:
    return light(model, k, x) * random.random()


def nested(model: Layers, k: int, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(checkpoint(light, model, k, x, use_reentrant=False) * 2)


def nested_counted(model: Layers, k: int, x: torch.Tensor) -> torch.Tensor:
    model.count += 1
    return F.gelu(checkpoint(light, model, k, x, use_reentrant=False) * 2) / model.count


def in_sequence(model: Layers, k: int, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = checkpoint_sequential([model.layers[k], nn.GELU(), nn.Tanh()], 2, x, use_reentrant=False)
    return found


def sharing_a_weight(model: Layers, k: int, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(model.layers[k](x)) + F.gelu(model.layers[0](x))


def selected() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


PLAIN: dict[str, tuple[Part, dict[str, Any]]] = {
    "light": (light, {}),
    "masks that are kept": (masked, {}),
    "writes inside": (written_inside, {}),
    "nested": (nested, {}),
    "no draws to keep": (light, {"preserve_rng_state": False}),
    "in sequence": (in_sequence, {}),
    "reentrant": (light, {"use_reentrant": True}),
    "reentrant, masks that are kept": (masked, {"use_reentrant": True}),
    "reentrant, writes inside": (written_inside, {"use_reentrant": True}),
    "reentrant, nested": (nested, {"use_reentrant": True}),
}
AS_THEY_ARE: dict[str, tuple[Part, dict[str, Any]]] = {
    "batch norm": (normed, {}),
    "masks that are drawn again": (masked, {"preserve_rng_state": False}),
    "a counter": (counted, {}),
    "a list": (noted, {}),
    "a buffer": (summed, {}),
    "a generator": (drawn, {}),
    "Python's numbers": (drawn_by_python, {}),
    "a counter around another": (nested_counted, {}),
    "reentrant, a counter": (counted, {"use_reentrant": True}),
    "reentrant, batch norm": (normed, {"use_reentrant": True}),
    "reentrant, a weight that others share": (sharing_a_weight, {"use_reentrant": True}),
    "selective": (light, {"context_fn": selected}),
}


def trained(model: nn.Module) -> Iterator[Any]:
    torch.manual_seed(3)
    random.seed(3)
    x = randn(128, WIDTH, seed=0).requires_grad_()
    for _ in range(5):
        model.zero_grad()
        y = model(x)
        yield y.detach().clone()
        y.square().mean().backward()
        yield from snapshot(model, x)
        yield torch.get_rng_state()
        yield model.count, list(model.seen), random.getstate()


@pytest.mark.parametrize(("name", "way"), in_turn(PLAIN, WAYS))
def test_safe_parts_are_planned_without(name: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    part, options = PLAIN[name]
    eager = Layers(part, **options)
    x = randn(128, WIDTH, seed=0).requires_grad_()

    def step(model: nn.Module) -> None:
        model(x).square().mean().backward()
        model.zero_grad()
        x.grad = None

    unchecked = copy.deepcopy(eager)
    unchecked.forward = lambda x: [x := part(unchecked, k, x) for k in range(LAYERS)][-1]  # type: ignore[method-assign]
    budget = int(0.75 * measure_peak(lambda: step(unchecked), "cpu"))
    with caplog.at_level(logging.INFO, "rockmate"):
        model, handle = planned_by(way, copy.deepcopy(eager), budget, x)
        assert_same([*trained(model)], [*trained(eager)])
    assert caplog.text.count("checkpoints parts of itself") == 1
    assert handle.plan is not None
    assert handle.plan.recomputed > 0
    assert measure_peak(lambda: step(model), "cpu") <= budget


@pytest.mark.parametrize(("name", "way"), in_turn(AS_THEY_ARE, WAYS))
def test_other_parts_stay_as_they_are(name: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    part, options = AS_THEY_ARE[name]
    eager = Layers(part, **options)
    with caplog.at_level(logging.INFO, "rockmate"):
        model, handle = planned_by(way, copy.deepcopy(eager), "100%", randn(128, WIDTH, seed=0).requires_grad_())
        assert_same([*trained(model)], [*trained(eager)])
    assert handle.plan is not None
    assert caplog.text.count("Some of them stay as they are") == 1
    if way == "attach":
        with pytest.raises(InfeasibleBudgetError, match="keep checkpoints of their own"):
            handle.budget = 1000


class Residual(nn.Module):
    """Reentrant parts of which gradients meet others. ``breaks``: the graph does."""

    def __init__(self, shares: str, breaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.breaks = nn.Linear(WIDTH, WIDTH), breaks
        self.beside = nn.Parameter(torch.ones(WIDTH))
        block = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.blocks = [block if shares == "weights" else copy.deepcopy(block) for _ in range(4)]
        self.modules_of_blocks, self.shares = nn.ModuleList(self.blocks), shares

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, found = self.first(x), []
        beside = self.beside.tanh()
        for k, block in enumerate(self.blocks):
            if self.shares == "a weight with what has no checkpoint":
                x = x + block[0](x).mean()
            if self.shares == "what it is not given" and k == 2:
                x = checkpoint(lambda x, block=block: x + block(x) + beside, x, use_reentrant=True)
            else:
                x = checkpoint(lambda x, block=block: x + block(x), x, use_reentrant=True)
            found.append(x)
            if self.breaks:
                torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        return torch.stack(found).sin().sum(0) if self.shares == "results" else x


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize(
    "shares", ["nothing", "results", "weights", "a weight with what has no checkpoint", "what it is not given"]
)
def test_reentrant_parts_add_gradients_as_in_eager_mode(
    shares: str, breaks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    eager = Residual(shares, breaks)
    with caplog.at_level(logging.INFO, "rockmate"):
        model, _ = planned_by("attach", Residual(shares, breaks), "100%", x := randn(128, WIDTH, seed=0))
        for _ in range(3):  # gradients add up
            for m in (model, eager):
                m(x).square().mean().backward()
            assert_same(snapshot(model, x), snapshot(eager, x))
    alone = shares == "nothing" or (shares == "what it is not given" and not breaks)
    assert ("is planned as if it did not" in caplog.text) == alone


class LateBound(nn.Module):
    """The second runs of its parts compute with the last layer, since a ``lambda`` reads its variables when it runs."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.breaks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda x: F.gelu(layer(x)), x, use_reentrant=False)  # noqa: B023
            if self.breaks:
                torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        return x


@pytest.mark.parametrize(("breaks", "way"), in_turn([False, True], WAYS))
def test_parts_that_read_what_changes_stay_as_they_are(
    breaks: bool, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    eager = LateBound(breaks)
    x = randn(128, WIDTH, seed=0)
    with caplog.at_level(logging.INFO, "rockmate"):
        model, _ = planned_by(way, LateBound(breaks), "100%", x)
        for _ in range(3):
            for m in (model, eager):
                m(x).square().mean().backward()
            assert_same(snapshot(model, x), snapshot(eager, x))
    assert "Some of them stay as they are" in caplog.text


STATE = [0]


class Later(Layers):
    """``way``: computes with what its parts read or make, and is another thing when they run again."""

    def __init__(self, way: Callable[[Later, torch.Tensor], torch.Tensor], breaks: bool, reentrant: bool) -> None:
        super().__init__(light)
        self.way, self.breaks, self.options = (way,), breaks, {"use_reentrant": reentrant}
        self.at, self.step = 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        self.step += 1
        return self.way[0](self, x)

    def scaled(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(layer(x)) * (1 + self.at)


def attribute(m: Later, x: torch.Tensor) -> torch.Tensor:
    for k, layer in enumerate(m.layers):
        m.at = k
        x = checkpoint(m.scaled, layer, x, **m.options)
    return x


def variable_of_another(m: Later, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        inner = lambda x: F.gelu(layer(x))  # noqa: B023, E731
        x = checkpoint(lambda x, inner=inner: inner(x), x, **m.options)
    return x


def in_a_list(m: Later, x: torch.Tensor) -> torch.Tensor:
    held = [0]
    for k, layer in enumerate(m.layers):
        held[0] = k
        x = checkpoint(lambda x, layer: F.gelu(layer(x)) * (1 + held[0]), x, layer, **m.options)
    return x


def given_in_a_list(m: Later, x: torch.Tensor) -> torch.Tensor:
    held = [0]
    for k, layer in enumerate(m.layers):
        x = checkpoint(lambda x, layer, held: F.gelu(layer(x)) * (1 + held[0]), x, layer, held, **m.options)
        held[0] = k
    return x


def given_in_a_dict(m: Later, x: torch.Tensor) -> torch.Tensor:
    held = {"by": 1.0}
    for k, layer in enumerate(m.layers):
        x = checkpoint(lambda x, layer, held: F.gelu(layer(x)) * held["by"], x, layer, held, **m.options)
        held["by"] += k
    return x


def given_in_a_set(m: Later, x: torch.Tensor) -> torch.Tensor:
    held: set[int] = set()
    for k, layer in enumerate(m.layers):
        x = checkpoint(lambda x, layer, held: F.gelu(layer(x)) * (1 + len(held)), x, layer, held, **m.options)
        held.add(k)
    return x


def in_a_variable_of_the_file(m: Later, x: torch.Tensor) -> torch.Tensor:
    for k, layer in enumerate(m.layers):
        STATE[0] = k
        x = checkpoint(lambda x, layer: F.gelu(layer(x)) * (1 + STATE[0]), x, layer, **m.options)
    return x


def buffer_written(m: Later, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x = checkpoint(lambda x, layer: F.gelu(layer(x)) * m.sums, x, layer, **m.options)
        with torch.no_grad():
            m.sums.add_(1)
    return x


def buffer_replaced(m: Later, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x = checkpoint(lambda x, layer: F.gelu(layer(x)) * (1 + m.sums), x, layer, **m.options)
        m.sums = m.sums + 1
    return x


def result_written(m: Later, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x = checkpoint(lambda x, layer: torch.sigmoid(layer(x)), x, layer, **m.options)
        x.mul_(2)
    return x


def hooked(m: Later, x: torch.Tensor) -> torch.Tensor:
    def part(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        layer.weight.register_hook(lambda g: g * 1.5)
        return F.gelu(layer(x))

    for layer in m.layers:
        x = checkpoint(part, x, layer, **m.options)
    return x


def drawn_again_later(m: Later, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x = checkpoint(lambda x, layer: F.dropout(layer(x)), x, layer, preserve_rng_state=m.step < 3, **m.options)
    return x


LATER = [
    *(attribute, variable_of_another, in_a_list, in_a_variable_of_the_file),
    *(given_in_a_list, given_in_a_dict, given_in_a_set),
    *(buffer_written, buffer_replaced, result_written, hooked, drawn_again_later),
]


@pytest.mark.parametrize(("way", "breaks", "reentrant"), pairs(LATER, [False, True], [False, True]))
def test_parts_that_would_compute_otherwise_when_they_run_again(way: Any, breaks: bool, reentrant: bool) -> None:
    eager, x = Later(way, breaks, reentrant), randn(128, WIDTH, seed=0).requires_grad_()
    model = copy.deepcopy(eager)
    attach(model, "100%", costs="flops", cache=False)
    for step in range(4):
        found = []
        for m in (model, eager):
            torch.manual_seed(step)
            m.zero_grad()
            x.grad = None
            m(x).square().mean().backward()
            found.append([*snapshot(m, x)])
        assert_same(*found)


class Packing(Layers):
    """Hooks around the checkpoints would pack what these drop."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            x = super().forward(x).sin()
        return light(self, 0, x)


@pytest.mark.parametrize("way", WAYS)
def test_parts_within_hooks_of_saved_tensors_stay_as_they_are(way: str) -> None:
    eager = Packing(light)
    model, _ = planned_by(way, copy.deepcopy(eager), "100%", randn(128, WIDTH, seed=0).requires_grad_())
    assert_same([*trained(model)], [*trained(eager)])


def test_a_part_that_writes_later_is_an_error() -> None:
    def sometimes(model: Layers, k: int, x: torch.Tensor) -> torch.Tensor:
        return summed(model, k, x) if model.count > 2 else light(model, k, x)

    model = Layers(sometimes)
    planned, _ = planned_by("attach", model, "100%", x := randn(128, WIDTH, seed=0))
    for _ in range(3):
        planned(x).square().mean().backward()
    model.count = 3
    with pytest.raises(
        UnsupportedError, match=r"writes into memory that was there before, which it did not.*remove the"
    ):
        planned(x)
