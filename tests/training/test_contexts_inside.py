"""Contexts that forward itself enters: what TorchDynamo does not record of them runs as in eager mode."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_same, snapshot
from models import randn
from torch import nn
from torch.autograd import graph
from torch.utils._python_dispatch import TorchDispatchMode

from rockmate import BudgetWarning, attach, measure_peak

WIDTH = 64


class Scaling(TorchDispatchMode):
    """Computes another activation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 1.5 * result if func is torch.ops.aten.gelu.default else result


def coarse(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.bfloat16)


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        yield


@contextlib.contextmanager
def nested() -> Iterator[None]:
    with graph.save_on_cpu(), contextlib.ExitStack() as stack:
        stack.enter_context(graph.saved_tensors_hooks(coarse, torch.Tensor.float))
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        yield


@contextlib.contextmanager
def assigned() -> Iterator[None]:
    """As in flags(), without a function: TorchDynamo assigns it behind the graph."""
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = True


@contextlib.contextmanager
def precision() -> Iterator[None]:
    """Beside this torch's older functions for precisions raise an error."""
    torch.backends.mkldnn.fp32_precision = "bf16"
    try:
        yield
    finally:
        torch.backends.mkldnn.fp32_precision = "none"


INSIDE: dict[str, Callable[[], Any]] = {
    "hooks": lambda: graph.saved_tensors_hooks(coarse, torch.Tensor.float),
    "save_on_cpu": graph.save_on_cpu,
    "no hooks": lambda: graph.disable_saved_tensors_hooks("none here"),
    "mode": Scaling,
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "assigned": assigned,
    "precision": precision,
    "generator": seeded,
    "several": nested,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "threads": lambda: torch.autograd.set_multithreading_enabled(False),
    "device": lambda: torch.device("cpu"),
}


def made(name: str) -> nn.Module:
    """A model that runs its middle layers in a context. Its class is its own: TorchDynamo knows code by class."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

        def part(self, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
            for layer in self.layers[first:last]:  # type: ignore[union-attr]
                x = F.dropout(F.gelu(layer(x)), 0.1)
            return x

        def middle(self, x: torch.Tensor) -> torch.Tensor:
            with INSIDE[name]():
                return self.part(x, 5, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(self.middle(self.part(x, 0, 5)), 7, 12)

    model = Inside()
    for f in (Inside.part, Inside.middle, Inside.forward):
        f.__code__ = f.__code__.replace(co_name=f"{f.__name__}_{name.replace(' ', '_')}")
    return model


def trained(model: nn.Module) -> list[Any]:
    torch.manual_seed(1)
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for k in range(5):
        optimizer.zero_grad()
        loss = model(randn(256, WIDTH, seed=k)).square().mean()
        loss.backward()
        found += [loss.detach().clone(), *snapshot(model)]
        optimizer.step()
    return found


@pytest.mark.filterwarnings("ignore:TF32 acceleration", "ignore:Anomaly Detection")
@pytest.mark.parametrize("name", INSIDE)
def test_contexts_inside_forward_are_as_in_eager_mode(name: str) -> None:
    model = made(name)
    eager, x = copy.deepcopy(model), randn(256, WIDTH, seed=9)

    def step(run: nn.Module) -> None:
        run(x).square().mean().backward()
        run.zero_grad()

    step(eager)
    handle = attach(model, int(0.8 * measure_peak(lambda: step(eager), "cpu")), costs="flops")
    assert_same(trained(model), trained(eager))
    model.zero_grad()
    assert handle.plan is not None and handle.plan.recomputed > 0
    assert measure_peak(lambda: step(model), "cpu") <= handle.budget


def test_under_hooks_of_ones_own_the_model_itself_runs_and_says_so() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))
    eager = copy.deepcopy(model)
    attach(model, "60%", costs="flops")

    def steps(run: nn.Module) -> None:
        for k in range(4):
            with graph.saved_tensors_hooks(coarse, torch.Tensor.float):
                run(randn(64, WIDTH, seed=k)).square().mean().backward()

    steps(eager)
    with pytest.warns(BudgetWarning, match="under the hook of saved tensors .*coarse"):
        steps(model)
    assert_same(snapshot(model), snapshot(eager))
    model(randn(64, WIDTH, seed=0)).square().mean().backward()  # now under a plan
    eager(randn(64, WIDTH, seed=0)).square().mean().backward()
    assert_same(snapshot(model), snapshot(eager))
