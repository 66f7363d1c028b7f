"""How often a module runs while its graphs are made, and on which values."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from models import randn
from torch import nn

from rkgb import MismatchError, make_all_graphs
from rkgb.pipeline import make_S


class Counted(torch.autograd.Function):
    """Identity that counts its calls, and keeps what it was called with."""

    calls: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Counted.calls.append(x.detach().clone())
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Layers(nn.Module):
    """Equal layers, and an output of another size."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Counted.apply(torch.tanh(layer(x)))
        return self.head(x)


def calls(model: nn.Module, x: torch.Tensor, whole: bool = True) -> list[torch.Tensor]:
    """What ``Counted`` was called with while the graphs were made."""
    Counted.calls.clear()
    if whole:
        make_all_graphs(model, x, costs="flops")
    else:
        make_S(model, x)
    return list(Counted.calls)


def test_three_runs_of_a_module_before_its_nodes_are_measured() -> None:
    seen = calls(Layers(5), randn(4, 8, seed=1), whole=False)
    assert len(seen) == 3 * 5
    traced, module, program = seen[:5], seen[5:10], seen[10:]
    assert all(torch.equal(a, b) for a, b in zip(module, program, strict=True))  # on the same values
    assert all(torch.equal(a.roll(1, 0), b) for a, b in zip(traced, module, strict=True))  # other than the sample's


def test_measuring_does_not_take_longer_for_more_equal_layers() -> None:
    few, many = (len(calls(Layers(layers), randn(4, 8, seed=1))) for layers in (4, 12))
    assert many - few == 3 * (12 - 4)


class Branches(nn.Module):
    """Equal layers, in each of which Python reads a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Counted.apply(torch.tanh(layer(x)) if x.sum().item() < 100 else x)
        return x


def test_where_python_reads_numbers_every_layer_runs_on_its_own_values() -> None:
    seen = calls(Branches(), randn(4, 8, seed=1))
    assert torch.equal(seen[-1], seen[3])  # the last layer's, as traced


class Counting(nn.Module):
    """Multiplies by how often it was called; or assigns that to a buffer."""

    seen: torch.Tensor

    def __init__(self, in_buffer: bool) -> None:
        super().__init__()
        self.linear, self.calls, self.in_buffer = nn.Linear(8, 8), 0, in_buffer
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.in_buffer:
            self.seen = torch.full((), float(self.calls))
            return self.linear(x)
        return self.linear(x) * self.calls


@pytest.mark.parametrize("in_buffer", [False, True])
def test_a_counter_is_found_in_outputs_and_in_buffers(in_buffer: bool) -> None:
    with pytest.raises(MismatchError, match="when the values of the sample are others"):
        make_all_graphs(Counting(in_buffer), randn(4, 8, seed=1))


class Refusing(nn.Module):
    """Takes rows in one order only, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            raise ValueError("these values not")
        return self.linear(x)


def test_a_module_that_refuses_other_values_is_taken_on_the_sample() -> None:
    assert [n.name for n in make_all_graphs(Refusing(), randn(4, 8, seed=1)).S.nodes] == ["linear"]


@torch.library.custom_op("rkgb_tests::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    """The positive numbers of the first row: as many as there are, which no list of operations tells."""
    return x[0][x[0] > 0].clone()


class ShapedByData(nn.Module):
    """What it returns does not depend on how many there are, but its memory does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * positive(x).sum()


def test_sizes_are_those_of_the_sample() -> None:
    x = randn(4, 8, seed=1)
    x[0], x[-1] = 1.0, -1.0
    graphs = make_all_graphs(ShapedByData(), x)
    sizes = {n.name: graphs.D.values[n.outputs[0]].shape for n in graphs.D.nodes}
    assert sizes["positive"] == (8,)


@torch.library.custom_op("rkgb_tests::counted", mutates_args=())
def counted(x: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
    """Twice ``x``. It counts its calls, and no version counter tells."""
    calls.data.add_(1)
    return 2 * x


class CountingInAnOperator(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return counted(x, self.calls)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_buffer_that_is_written_unseen(shape: tuple[int, ...]) -> None:
    module = CountingInAnOperator(shape)
    graph = make_all_graphs(module, randn(4, 8, seed=1)).D
    written = [graph.storages[s].owner for facts in graph.facts for s in facts.writes]
    assert written == [None]
    assert module.calls.sum() == 0
