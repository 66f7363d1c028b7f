"""Random draws: masks that are drawn whole, and draws that nobody reads.

Dropout's masks are drawn whole in the forward where nobody keeps their bits and there is the memory for it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from against_eager import assert_same, step
from models import part_way, randn
from torch import nn
from torch.nn import functional as F

import rockmate
from rkgb.probe.decompose import DRAWN
from rockmate import Rockmate, frontier, measure_peak
from rockmate.run.compiled import compile_schedule
from rockmate.run.draws import draw_whole
from rockmate.run.program import Program
from solvers import walk
from solvers.schedule import Run


def drawn(program: Program) -> list[torch.dtype]:
    """As what its forward draws."""
    names = [tuple(program.s.d.nodes[op].name for op in n.ops) for n in program.s.nodes]
    return [program.nodes[i].first.ops[0].kwargs["dtype"] for i, some in enumerate(names) if some == DRAWN]


def assert_as_eager(model: nn.Module, rk: Rockmate, x: torch.Tensor) -> None:
    found = []
    for call in (model, rk):
        torch.manual_seed(1)
        model.zero_grad(set_to_none=False)
        outputs = step(call, (x,))
        found.append([*outputs, *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()])  # type: ignore[union-attr]
    assert_same(found[1], found[0])


def with_gradients(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model


@pytest.mark.parametrize(("drawing", "dtype"), [(2, torch.float32), (6, torch.int8)])
def test_a_draw_that_takes_memory(drawing: int, dtype: torch.dtype) -> None:
    """Bytes a number, as of kernels that draw integers first; beside a float mask there is room for four."""
    x = randn(2048, 64, seed=0)
    model = with_gradients(nn.Sequential(nn.Dropout(0.3), nn.Linear(64, 1)))
    plan = Rockmate(model, x, "1 GiB", costs="flops").plan
    problem = plan.problem_with_usual_loss()
    bits, *others = problem.nodes
    problem = replace(problem, nodes=(replace(bits, peak=bits.peak + drawing * x.numel()), *others))
    program = compile_schedule(plan.graph, plan.schedule)
    assert drawn(program) == [torch.int8]
    assert drawn(draw_whole(program, problem, plan.schedule, walk(problem, plan.schedule).timeline)) == [dtype]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)]), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.2) + x
        y: torch.Tensor = self.head(x)
        return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_masks_are_drawn_whole_or_made_again_of_their_bits(dtype: torch.dtype) -> None:
    model, x = with_gradients(Layers().to(dtype)), randn(256, 64, seed=0).to(dtype)
    rk = Rockmate(model, x, "100%", costs="flops")
    found = rk.frontier()
    for fraction in (0.0, 0.3, 1.0):
        rk.budget = part_way(found, fraction)
        runs = Counter(s.node for s in rk.plan.schedule if isinstance(s, Run))
        again = [runs[i + 1] > 1 for i, node in enumerate(rk.plan.problem.nodes) if node.name.startswith("bits")]
        assert any(again) == (fraction < 1)
        assert drawn(rk._last.program) == [torch.int8 if bits else dtype for bits in again]  # type: ignore[union-attr]
        assert (rk.plan.recomputed > 0) == (fraction < 1)
        assert_as_eager(model, rk, x)
        assert measure_peak(lambda: step(rk, (x,))) <= rk.budget


def test_masks_that_were_drawn_whole_go_when_they_are_dropped() -> None:
    """No backward reads those of a frozen part."""
    frozen = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)) for _ in range(8))).requires_grad_(False)
    trained = (m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh()))
    model, x = nn.Sequential(frozen, with_gradients(nn.Sequential(*trained))), randn(256, 64, seed=0)
    found = frontier(model, x, costs="flops")
    rk = Rockmate(model, x, part_way(found, 0.5), costs="flops")
    assert torch.float32 in drawn(rk._last.program)  # type: ignore[union-attr]
    assert rk.plan.recomputed > 0
    assert measure_peak(lambda: step(rk, (x,))) <= rk.budget


class DrawsInEveryOther(nn.Module):
    """Draws in every other call, and reads nothing of it: two graphs, of which one is the other without the draw."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.draw, self.count = draw, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        self.count += 1
        if self.count % 2:
            self.draw(x)
        return x


UNREAD_DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.2),
    "dropout": lambda x: F.dropout(x, 0.2),
    "rand": lambda x: torch.rand(3),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid().detach()),
    "in place": lambda x: x.detach().clone().normal_(),
    "multinomial": lambda x: torch.multinomial(x[0].detach().softmax(-1), 2),
}


@pytest.mark.parametrize("draw", UNREAD_DRAWS.values(), ids=UNREAD_DRAWS)
def test_unread_draws_of_one_of_two_graphs(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A graph is taken for one of other sizes, which is traced without data, only if both draw."""
    eager = DrawsInEveryOther(draw)
    model = copy.deepcopy(eager)
    handle = rockmate.attach(model, "100%", costs="flops", cache=False)
    x = torch.randn(4, 6, 8)

    def states(called: nn.Module) -> Iterator[torch.Tensor]:
        torch.manual_seed(3)
        for size in (4, 4, 4, 4, 3, 3, 2):
            called(x[:size]).sum().backward()
            yield torch.get_rng_state()

    assert_same([*states(model)], [*states(eager)])
    assert handle.reason == ""
