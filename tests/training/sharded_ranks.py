"""What each of two processes runs in ``test_sharded``: a sharded model, as it is and with one budget for all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from against_eager import assert_same
from models import randn
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from rockmate import Attachment, attach, measure_peak
from rockmate.planning.step import StepPlan

RANKS = 2
WIDTH = 64
ROWS = 1024


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)
        return result


def start(rank: int, folder: str) -> None:
    """The program of one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        work(rank, Path(folder))
    finally:
        dist.destroy_process_group()


def sharded() -> nn.Module:
    """Every block, and the root."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(5)), nn.Linear(WIDTH, 10))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


def step(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), target)
    loss.backward()
    return loss.detach()


def batch(rank: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(ROWS, WIDTH, seed=10 * k + rank), torch.arange(ROWS) % 10


def trained(model: nn.Module, rank: int, steps: int) -> list[Any]:
    """Losses, shards of gradients and of weights, and the generator."""
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: list[Any] = []
    for k in range(steps):
        found.append(step(model, *batch(rank, k)))
        found += [local(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(local(p).clone() for p in model.parameters()), torch.get_rng_state()]


def local(t: torch.Tensor | None) -> torch.Tensor:
    """The shard of this rank."""
    assert isinstance(t, DTensor)
    return t.to_local().detach()


def peak_of(model: nn.Module, rank: int) -> int:
    """Of a step with gradients that are new: what FSDP2 itself allocates (gathered weights, gradients) included.

    gloo's threads let go of the buffers of a collective some time after it has ended, where cores are busy after the
    next backward has begun. So this is the least peak of several steps.
    """
    x, target = batch(rank, 0)
    step(model, x, target)
    peaks = []
    for _ in range(5):
        model.zero_grad()
        peaks.append(measure_peak(lambda: step(model, x, target), "cpu"))
    model.zero_grad()
    return min(peaks)


def work(rank: int, _: Path) -> None:
    """One budget for the whole model: equal results, the peak within it, the same plan on both ranks."""
    eager = sharded()
    plain = [0] * RANKS
    dist.all_gather_object(plain, peak_of(eager, rank))
    budget = int(0.7 * max(plain))
    expected = trained(sharded(), rank, 5)
    for costs in ("flops", "measured"):
        model = sharded()
        handle = attach(model, budget, costs=costs, cache=False)
        assert_same(trained(model, rank, 5), expected)
        peak = peak_of(model, rank)
        assert peak <= budget, f"{peak} of {budget}, {plain}, {handle.plan}"
        check_plans(handle, budget)


def check_plans(handle: Attachment, budget: int) -> None:
    plan = handle.plan
    assert isinstance(plan, StepPlan)
    assert plan.predicted_peak <= budget
    assert plan.recomputed > 0
    assert len(plan.parts) >= 5
    programs: list[Any] = [None] * RANKS
    times = [[node.time for node in part.problem.nodes] for part in plan.parts]
    dist.all_gather_object(programs, (plan.chosen, plan.program(), times))
    assert programs[0] == programs[1]
