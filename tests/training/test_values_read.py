"""Forwards that read numbers from tensors, or register hooks on them: they are followed. Those in which the sizes of
results only seem to depend on values are captured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from against_eager import WAYS, assert_same, planned_by, snapshot
from models import in_turn, randn
from torch import nn
from torch.nn import functional as F

from rkgb.device import Cpu
from rockmate import attach, measure_peak
from rockmate.planning.plan import Plan


def with_one(h: torch.Tensor, k: int) -> torch.Tensor:
    ones = torch.zeros(len(h))
    ones[k] = 1.0
    return (h[:, 0] * ones).sum()


def with_hook(h: torch.Tensor, k: int) -> torch.Tensor:
    h.register_hook(lambda g: g * 0.5)
    return h.square().mean()


USES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "divided": lambda h, k: h.square().sum() / (k + 1),
    "times": lambda h, k: (h[:2] * k).sum(),
    "in a tensor of indices": lambda h, k: h[torch.tensor([k, 0])].square().sum(),
    "in a tensor of numbers": lambda h, k: (h[:2, 0] * h.new_tensor([float(k), 1.0])).sum(),
    "filled": lambda h, k: (h[:2, 0] * torch.full((2,), k)).sum(),
    "set": with_one,
    "index": lambda h, k: h[k].sum(),
    "end of a slice": lambda h, k: h[: k + 1].sum(),
    "largest": lambda h, k: h.sum() / max(k, 1),
    "hook": with_hook,
}


class Uses(nn.Module):
    def __init__(self, use: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.use = use
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers(x)
        k = 0 if self.use is with_hook else int(x[:, 0].argmin())
        return self.use(h, k) + h.mean()


@pytest.mark.parametrize("use", USES)
def test_numbers_that_are_others_in_each_step_are_planned_once(use: str) -> None:
    torch.manual_seed(0)
    model = Uses(USES[use])
    eager = copy.deepcopy(model)
    handle = attach(model, "80%", costs="flops")
    for step in range(20):
        x = randn(256, 16, seed=step)
        results = [m(x) for m in (model, eager)]
        for result in results:
            result.backward()
        assert_same(results[:1], results[1:])
        assert_same(snapshot(model), snapshot(eager))
    assert handle.plan is not None
    assert handle.plan.recomputed
    assert handle.plans_made <= 2


BY_TENSOR: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index": lambda h, k: h[k].sum(),
    "select": lambda h, k: h.select(0, k).square().sum(),  # type: ignore[call-overload]
    "alpha": lambda h, k: torch.add(h, h.square(), alpha=k).sum(),  # type: ignore[call-overload]
    "value": lambda h, k: torch.addcmul(h, h, h, value=k).sum(),  # type: ignore[call-overload]
    "range": lambda h, k: h.sum() * torch.arange(k).sum(),  # type: ignore[call-overload]
}
"""Operations that themselves read the number ``k`` that they are given: TorchDynamo captures them as they are."""


class Reads(nn.Module):
    """Batch norm and dropout come before the number is read, which is that of a buffer or of an input."""

    def __init__(self, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use = use
        layers = (m for _ in range(4) for m in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1)))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        h = self.layers(x)
        return self.use(h, k).square().mean() + h.mean()


def train(model: nn.Module, called: nn.Module, inputs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[Any]:
    """Losses, and all that a step has changed."""
    for step, given in enumerate(inputs):
        torch.manual_seed(step)
        model.zero_grad()
        loss = called(*given)
        loss.backward()
        yield [loss.detach(), *snapshot(model)]


@pytest.mark.parametrize(("use", "way"), in_turn(BY_TENSOR, WAYS))
def test_numbers_that_operations_read_from_tensors_are_planned_once(use: str, way: str) -> None:
    torch.manual_seed(0)
    model = Reads(BY_TENSOR[use])
    eager = copy.deepcopy(model)
    inputs = [(randn(256, 16, seed=k), torch.tensor(20 - k)) for k in range(20)]
    called, handle = planned_by(way, model, "80%", *inputs[0])
    for ours, theirs in zip(train(model, called, inputs), train(eager, eager, inputs), strict=True):
        assert_same(ours, theirs)
    assert "is read from a tensor at test_values_read.py" in handle.reason
    assert handle.plan is not None
    assert handle.plan.recomputed
    assert handle.plans_made <= 2


SIZES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "one_hot": lambda h, ids: h * F.one_hot(ids, 16),
    "repeats": lambda h, ids: torch.repeat_interleave(h, 2, dim=0),
    "output_size": lambda h, ids: torch.repeat_interleave(h, ids // ids, dim=0, output_size=256),
    "parts": lambda h, ids: torch.tensor_split(h, 3)[1],
}
"""Operations whose results may have sizes that depend on values, but have not."""


@pytest.mark.parametrize(("use", "way"), in_turn(SIZES, WAYS))
def test_sizes_that_do_not_follow_from_values_take_no_memory(use: str, way: str) -> None:
    """What batch norm and dropout have changed before is not kept to be put back."""
    torch.manual_seed(0)
    model = Reads(SIZES[use])
    eager = copy.deepcopy(model)
    inputs = [(randn(256, 16, seed=k), 1 + torch.arange(256) % (k + 3)) for k in range(4)]
    called, handle = planned_by(way, model, "80%", *inputs[0])
    for ours, theirs in zip(train(model, called, inputs), train(eager, eager, inputs), strict=True):
        assert_same(ours, theirs)
    assert isinstance(handle.plan, Plan)
    assert handle.plan.recomputed
    model.zero_grad()
    peak = measure_peak(lambda: [*train(model, called, inputs[:1])], "cpu")
    assert handle.plan.predicted_peak - Cpu.scalars <= peak <= handle.plan.predicted_peak
