"""What a module's Python reads from tensors, and what a trace cannot keep."""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from rkgb import UnsupportedError, make_all_graphs
from rkgb.trace.other_draws import other_draws
from rkgb.trees import tensors_of
from rockmate import MismatchError, Rockmate


class Layers(nn.Module):
    """Six layers, whose forward is the function given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))
        self.function = function

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def inputs(seed: int = 0, rows: int = 31) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def tight(model: nn.Module, *sample: Any) -> Rockmate:
    """Under a budget that makes something run again."""
    rk = Rockmate(model, sample, "1 GiB", costs="flops")
    found = rk.frontier()
    rk.budget = (found.min_budget + found.max_budget) // 2
    assert rk.plan.recomputed
    return rk


def assert_equal_step(rk: Rockmate, eager: nn.Module, *args: Any) -> None:
    """One step of both: outputs, gradients, buffers and generator state are the same."""
    results = []
    for call, model in ((rk, rk.original), (eager, eager)):
        model.zero_grad()
        torch.manual_seed(3)
        outputs = tensors_of(call(*copy.deepcopy(args)))
        sum(t.sum() for t in outputs if t.requires_grad).backward()  # type: ignore[union-attr]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([*outputs, *grads, *model.buffers(), torch.get_rng_state()])
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def branch(m: Layers, x: torch.Tensor) -> torch.Tensor:
    y = m.run(nn.functional.dropout(m.norm(x), 0.3))
    return y * 2 if x.sum() > 0 else m.run(y)


def scaled(m: Layers, x: torch.Tensor) -> torch.Tensor:
    return m.run(m.norm(x)) * int(x.abs().max() + 0.5)


def chosen_rows(m: Layers, x: torch.Tensor) -> torch.Tensor:
    return m.run(x[x[:, 0] > 0]) / (x[:, 0] > 0).nonzero().shape[0]


def listed(m: Layers, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([m.run(x)[k:] for k in (x[:3, 0] > 0).tolist()])


@pytest.mark.parametrize("function", [branch, scaled, chosen_rows, listed])
def test_values_that_python_reads(function: Callable[..., Any]) -> None:
    model = Layers(function)
    eager = copy.deepcopy(model)
    x, y = inputs(1), -2.5 * inputs(1)
    rk = tight(model, x)
    for given in (x, y, x, y):
        assert_equal_step(rk, eager, given)


def test_a_value_that_is_read_late() -> None:
    """Dropout and batch norm came first: generator and statistics are put back before the other plan runs."""
    model = Layers(
        lambda m, x: (y := m.run(nn.functional.dropout(m.norm(x), 0.3))) * (2 if x.sum() > 0 * y[0, 0] else 3)
    )
    eager = copy.deepcopy(model)
    rk = tight(model, inputs(1))
    for seed in range(6):
        assert_equal_step(rk, eager, inputs(1) * (-1) ** seed)


def test_a_value_that_never_comes_again() -> None:
    model = Layers(lambda m, x: m.run(x) * x.sum().item())
    eager, rk = copy.deepcopy(model), tight(model, inputs())
    for seed in range(6):
        assert_equal_step(rk, eager, inputs(seed))
    assert rk.plans_made == 1


def test_arrays_are_computed_anew() -> None:
    def function(m: Layers, x: torch.Tensor) -> torch.Tensor:
        return m.run(x) * torch.from_numpy(numpy.sign(x[0].numpy()))

    model = Layers(function)
    eager = copy.deepcopy(model)
    rk = tight(model, inputs(1))
    assert_equal_step(rk, eager, inputs(1))
    assert_equal_step(rk, eager, inputs(2))
    assert rk.plans_made == 1


def test_the_first_import_of_numpys_generator_is_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = sys.modules["numpy.random"]
    monkeypatch.delitem(sys.modules, "numpy.random")
    with other_draws() as drawn:
        monkeypatch.setitem(sys.modules, "numpy.random", generator)
    assert drawn == []


@pytest.mark.parametrize("module", [random, numpy.random])
def test_draws_of_other_generators(module: Any) -> None:
    """Planning ahead leaves them as they were."""
    model = Layers(lambda m, x: m.run(x) * (0.5 if module.random() < 0.5 else 2.0))
    eager = copy.deepcopy(model)
    module.seed(1)
    rk = tight(model, inputs())
    drawn = module.random()
    module.seed(1)
    assert drawn == module.random()
    for seed in range(4):
        module.seed(seed)
        theirs = eager(inputs(seed))
        module.seed(seed)
        assert torch.equal(rk(inputs(seed)), theirs)


def test_gradients_inside_forward() -> None:
    def function(m: Layers, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(m.run(x).sum(), x, create_graph=True)[0]

    model = Layers(function)
    eager, rk = copy.deepcopy(model), Rockmate(model, inputs(), "1 GiB", costs="flops")
    for seed in range(4):
        assert_equal_step(rk, eager, inputs(seed))


@dataclass
class Pair:
    """A dataclass that nobody has registered."""

    first: torch.Tensor
    rest: dict[str, Any]
    label: str = "pair"


class Cache:
    """Neither a container nor a dataclass."""

    def __init__(self) -> None:
        self.entries: list[Pair] = []


def test_dataclasses_and_other_objects_go_in_and_out() -> None:
    def function(m: Layers, pair: Pair) -> tuple[Pair, Cache]:
        y = m.run(pair.first * pair.rest["scale"])
        cache = Cache()
        cache.entries.append(Pair(y * 2, {}, "kept"))
        return Pair(y, {"again": [y + 1, None]}, pair.label + "!"), cache

    model = Layers(function)
    eager = copy.deepcopy(model)
    pair = Pair(inputs(), {"scale": torch.tensor(2.0)})
    rk = tight(model, pair)
    assert_equal_step(rk, eager, pair)
    made, cache = rk(pair)
    assert (type(made), made.label, made.rest["again"][1]) == (Pair, "pair!", None)
    assert (type(cache), type(cache.entries[0]), cache.entries[0].label) == (Cache, Pair, "kept")


def test_a_buffer_that_forward_assigns_is_assigned() -> None:
    def function(m: Layers, x: torch.Tensor) -> torch.Tensor:
        m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
        return m.run(x - m.mean)

    model = Layers(function)
    eager = copy.deepcopy(model)
    rk = tight(model, inputs())
    for seed in range(3):
        assert_equal_step(rk, eager, inputs(seed))


def test_what_a_trace_does_not_show_is_refused_by_line() -> None:
    def function(m: Layers, x: torch.Tensor) -> torch.Tensor:
        m.calls = int(m.calls) + 1
        return m.run(x) * m.calls

    model = Layers(function)
    model.calls = 0  # type: ignore[assignment]
    eager = copy.deepcopy(model)
    with pytest.raises(MismatchError, match=r"from mul at test_guards\.py:\d+ on"):
        make_all_graphs(model, inputs())
    assert model.calls == 0
    rk = Rockmate(model, inputs(), "1 GiB", costs="flops")
    assert model.calls == 0
    for seed in range(3):
        assert_equal_step(rk, eager, inputs(seed))
    assert model.calls == eager.calls == 3


class Jitter(torch.autograd.Function):
    """A kernel with other results in every run, as atomic sums have."""

    step = 0.0
    runs = itertools.cycle(range(3))

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + Jitter.step * next(Jitter.runs))

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


def test_kernels_that_do_not_repeat_themselves_are_compared_within_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers(lambda m, x: m.run(Jitter.apply(m.run(x))))
    monkeypatch.setattr(Jitter, "step", 2.0**-23)
    notes = make_all_graphs(model, inputs(), costs="flops").D.notes
    assert notes == ("the module's own runs differ in some bits; the program was compared within rounding",)
    monkeypatch.setattr(Jitter, "step", 1.0)
    with pytest.raises(MismatchError, match="differs from the module's when the values of the sample are others"):
        make_all_graphs(model, inputs(), costs="flops")


def test_a_small_step_that_python_counts_is_no_rounding() -> None:
    def function(m: Layers, x: torch.Tensor) -> torch.Tensor:
        m.calls = int(m.calls) + 1
        return m.run(x) * (1 + m.calls * 2.0**-22)

    model = Layers(function)
    model.calls = 0  # type: ignore[assignment]
    with pytest.raises(MismatchError, match=r"from mul at test_guards\.py:\d+ on"):
        make_all_graphs(model, inputs())


def test_an_attribute_that_forward_sets_is_set() -> None:
    def function(m: Layers, x: torch.Tensor) -> torch.Tensor:
        m.calls = getattr(m, "calls", 0) + 1
        return m.run(x)

    rk = Rockmate(Layers(function), inputs(), "1 GiB", costs="flops")
    for _ in range(3):
        rk(inputs())
    assert rk.calls == 3


class Scripted(nn.Module):
    """Loops and branches, on numbers, on shapes and on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, times: int = 3) -> torch.Tensor:
        for k in range(times):
            x = torch.tanh(self.layer(x)) if k % 2 == 0 else torch.sigmoid(x) * 2
        if x.shape[0] > 4 and bool(x.sum() > 0):
            x = x * 2
        return x


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[1] == 8 else x


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is not supported in Python 3.14")
def test_scripted_parts_are_trained_and_have_no_graph() -> None:
    function = torch.jit.script(twice)

    class Holder(Layers):
        def __init__(self, script: Callable[..., Any]) -> None:
            super().__init__(lambda m, x: function(m.scripted(m.run(x))))
            self.scripted = script(Scripted())

    model, eager = Holder(torch.jit.script), Holder(lambda m: m)
    rk = Rockmate(model, inputs(), "1 GiB", costs="flops")  # other runs of its executor take other memory
    with pytest.raises(
        UnsupportedError, match=r"a scripted module \(Scripted\) .*: give the Python module, unscripted"
    ):
        make_all_graphs(model, inputs(), costs="flops")
    for seed in range(3):  # a scripted module's own executor rounds otherwise
        ours, theirs = rk(inputs(seed)), eager(inputs(seed))
        torch.testing.assert_close(ours, theirs)
        ours.sum().backward()
        theirs.sum().backward()
    for p, q in zip(rk.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_printing_a_tensor_is_no_decision() -> None:
    rk = Rockmate(Layers(lambda m, x: (f"{x} {x.sum():.2f}", m.run(x))[1]), inputs(), "1 GiB", costs="flops")
    assert rk.plan is not None


def test_an_attribute_that_holds_a_tensor_is_looked_up_at_every_call() -> None:
    def function(m: Layers, x: torch.Tensor) -> torch.Tensor:
        m.seen += x.detach().mean(0)
        return m.run(x) * m.scale - m.seen

    model = Layers(function)
    model.scale, model.seen = torch.tensor(2.0), torch.zeros(8)
    eager = copy.deepcopy(model)
    rk = tight(model, inputs())
    assert torch.equal(model.seen, eager.seen)  # planning leaves it as it was
    for scale in (2.0, 5.0, [2.0] * 8):
        model.scale, eager.scale = torch.tensor(scale), torch.tensor(scale)
        assert_equal_step(rk, eager, inputs(1))
        assert torch.equal(model.seen, eager.seen)


def test_what_a_failed_guard_puts_back_was_never_changed() -> None:
    """The statistics of a batch norm before the guard, which an earlier call in the same graph has saved."""

    def forward(m: Layers, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        x = m.norm(m.run(x))
        return x * 2 if k.sum() > 0 else torch.sigmoid(x)

    x, up, down = torch.randn(16, 8), torch.ones(1), -torch.ones(1)
    model = Layers(forward)
    eager = copy.deepcopy(model)
    rk = Rockmate(model, (x, up), "1 MiB", costs="flops")
    for m in (rk, eager):
        for first, second in ((up, down), (down, up), (up, down)):
            (m(x, first).sum() + m(x, second).square().sum()).backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    for a, b in zip(model.buffers(), eager.buffers(), strict=True):
        assert torch.equal(a, b)
