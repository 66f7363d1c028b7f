"""rotor runs layers under torch.compile as they are: compiled, in first and later runs, and outside of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import in_turn
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from rockmate import InfeasibleBudgetError, measure_peak, rotor
from rockmate.rotor import Fck, Fe, Fn

KINDS = ("plain", "random", "break")


class Layer(nn.Module):
    """``kind``: what is in it that a compiler may stumble over."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(32, 64), nn.Linear(64, 32), kind
        self.norm = nn.BatchNorm1d(32) if kind == "random" else nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(self.norm(x)))
        if self.kind == "break":
            torch._dynamo.graph_break()
        return x + F.dropout(self.down(h), 0.3 if self.kind == "random" else 0.0)


class Compiler:
    """A backend that counts what it compiles, and the runs of this."""

    def __init__(self) -> None:
        self.compiled = self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.compiled += 1
        inner = aot_eager(graph, inputs)

        def run(*args: Any) -> Any:
            self.runs += 1
            return inner(*args)

        return run


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    output = model(x)
    output.square().mean().backward()
    return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None), torch.get_rng_state()]


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # TorchDynamo's own, at breaks
@pytest.mark.parametrize(("kind", "wrapped"), [*in_turn(KINDS, [True, False]), ("break", False)])
def test_compiled_layers_run_compiled(kind: str, wrapped: bool) -> None:
    costs = "measured" if wrapped else "flops"
    torch.manual_seed(0)
    layers, compiler = [Layer(kind) for _ in range(6)], Compiler()
    options: dict[str, Any] = {"backend": compiler, "fullgraph": kind != "break"}
    graphs = 2 if kind == "break" else 1
    if not wrapped:
        for layer in layers:
            layer.compile(**options)
    model = nn.Sequential(*(torch.compile(layer, **options) if wrapped else layer for layer in layers))
    x = torch.randn(128, 32)
    chk = rotor.Checkpointable(model, x, costs=costs)
    with pytest.raises(InfeasibleBudgetError) as error:
        chk.compute_sequence(1000)
    chk.compute_sequence(int(1.1 * error.value.min_budget))
    assert chk.sequence is not None and chk.mem_limit is not None
    again = sum(isinstance(operation, (Fck, Fe, Fn)) for operation in chk.sequence)
    assert again > len(layers)
    known, buffers = compiler.compiled, [b.clone() for b in model.buffers()]
    compiler.runs = 0
    ours, ours_buffers = step(chk, x), [b.clone() for b in model.buffers()]
    assert again <= compiler.runs <= again * graphs  # a run may stop before its second graph
    assert measure_peak(lambda: step(chk, x)) <= chk.mem_limit
    for b, then in zip(model.buffers(), buffers, strict=True):
        b.copy_(then)
    compiler.runs = 0
    eager = step(model, x)
    assert compiler.runs == len(layers) * graphs and compiler.compiled == known
    assert all(map(torch.equal, ours, eager)) and all(map(torch.equal, ours_buffers, model.buffers()))
