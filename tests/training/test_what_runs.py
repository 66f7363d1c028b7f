"""What runs is what was planned, to the byte: where nothing runs again, too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from against_eager import WAYS, assert_same, planned_by, snapshot
from models import in_turn, randn, square_loss
from torch import nn
from torch.nn import functional as F

from rkgb.device import Cpu
from rockmate import frontier, measure_peak


def _written_copies(x: torch.Tensor) -> None:
    for _ in range(12):
        x = F.gelu(x).clone()
        x[:, ::2] *= 0.5


def _drawn(x: torch.Tensor) -> None:
    """The generator moves on, whoever reads what is drawn."""
    for _ in range(8):
        x = F.dropout(F.gelu(x), 0.3)


def _attended(x: torch.Tensor) -> None:
    q = x.view(8, 8, 8, 64)
    for _ in range(8):
        q = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)


def _normed(x: torch.Tensor, running: torch.Tensor) -> None:
    """The statistics are the module's own."""
    F.batch_norm(x.repeat(1, 6)[:, :64].exp(), running, running + 1, training=True)


UNREAD: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "pure": lambda x, _: [F.interpolate(x[None], scale_factor=3.0) for _ in range(4)],
    "written copies": lambda x, _: _written_copies(x),
    "draws": lambda x, _: _drawn(x),
    "attention": lambda x, _: _attended(x),
    "statistics": _normed,
    "a list": lambda x, _: torch.cat([x, *x.repeat(1, 4).sin().split(64, 1)], 1).cumsum(1),
    "numbers": lambda x, _: (x * 1.5 + x.shape[0] * x).exp() * torch.tensor(2.0),
    "without gradient": lambda x, _: (x.detach().repeat(8, 1) * 2.0).softmax(0).argmax(-1),
}


class LeavesUnread(nn.Module):
    """Nobody reads what ``unread`` computes."""

    def __init__(self, unread: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self.layers, self.unread = nn.ModuleList(nn.Linear(64, 64) for _ in range(5)), unread
        self.register_buffer("running", torch.zeros(64))
        self.running: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = F.gelu(layer(x))
            if k == 3:
                self.unread(x, self.running)
        return x


@pytest.mark.parametrize(("unread", "way"), in_turn(UNREAD, WAYS))
def test_where_nothing_runs_again_what_nobody_reads_takes_nothing(unread: str, way: str) -> None:
    """What runs is the program that was planned, not the one that was captured."""
    torch.manual_seed(0)
    eager, x = LeavesUnread(UNREAD[unread]), randn(512, 64, seed=0)
    model = copy.deepcopy(eager)
    budget = frontier(model, x, costs="flops").max_budget
    call, planned = planned_by(way, model, budget, x)

    def trained(model: nn.Module, call: nn.Module) -> Iterator[Any]:
        torch.manual_seed(1)
        for _ in range(3):
            out = call(x)
            square_loss(out).backward()
            yield out.detach()
        yield from snapshot(model)

    assert_same(trained(model, call), trained(eager, eager))

    def train() -> None:
        model.zero_grad()
        square_loss(call(x)).backward()

    train()
    model.zero_grad()
    assert planned.plan is not None and planned.plan.recomputed == 0
    assert (
        planned.plan.predicted_peak <= measure_peak(train, "cpu") <= planned.plan.predicted_peak + Cpu.scalars <= budget
    )


def test_smaller_calls_than_one_that_is_planned_are_planned_too_where_the_plan_leaves_operations_out() -> None:
    """The captured program, which calls of known size run without a plan, takes more; a warning would be an error."""
    torch.manual_seed(0)
    model, x = LeavesUnread(UNREAD["written copies"]), randn(512, 64, seed=0)
    handle = planned_by("attach", model, frontier(model, x, costs="flops").max_budget, x)[1]
    for rows in (512, 448, 384):
        square_loss(model(x[:rows])).backward()
        assert handle.plan is not None and f"[{rows}, 64]" in str(handle.plan.call)
