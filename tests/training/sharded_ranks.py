"""What each of two processes runs in ``test_distributed``: a sharded model, as it is and with one budget for all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from against_eager import assert_same
from models import randn
from ranks import RANKS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from rockmate import Attachment, attach, measure_peak
from rockmate.follow.plan import FollowedPlan

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


class Skipping(nn.Sequential):
    """Leaves out blocks, other ones in each step."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        *blocks, last = self
        for k, block in enumerate(blocks):
            x = x if k and (self.calls + k) % 3 == 0 else block(x)
        result: torch.Tensor = last(F.gelu(x))
        return result


def plain(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    return kind(*(Block() for _ in range(5)), nn.Linear(WIDTH, 10))


def sharded(kind: type[nn.Sequential] = nn.Sequential, **options: Any) -> nn.Module:
    """Every block, and the root."""
    model = plain(kind)
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def within_blocks() -> nn.Module:
    """A layer of each block by itself, and the others of two blocks at a time."""
    model = plain()
    for block in model[:4]:
        fully_shard(block.down)
    fully_shard([model[0], model[1]])
    fully_shard([model[2], model[3]])
    return fully_shard(model)


def spread() -> nn.Module:
    """Layers that are spread over the processes (tensor parallel), which compute on one batch."""
    model, mesh = plain(), init_device_mesh("cpu", (RANKS,))
    for block in model[:5]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


HALVES = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
WAYS: dict[str, Callable[[], nn.Module]] = {
    "every block": sharded,
    "gathered until the backward": partial(sharded, reshard_after_forward=False),
    "in bfloat16": partial(sharded, mp_policy=HALVES),
    "within blocks": within_blocks,
    "blocks left out": partial(sharded, Skipping),
    "spread": spread,
}


def step(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), target)
    loss.backward()
    return loss.detach()


def seed_of(model: nn.Module, rank: int) -> int:
    """Ranks that share one computation get one batch."""
    return rank if any(isinstance(m, FSDPModule) for m in model.modules()) else 0


def batch(rank: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(ROWS, WIDTH, seed=10 * k + rank), torch.arange(ROWS) % 10


def trained(model: nn.Module, rank: int, steps: int) -> list[Any]:
    """Losses, shards of gradients and of weights, and the generator."""
    rank = seed_of(model, rank)
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: list[Any] = []
    for k in range(steps):
        found.append(step(model, *batch(rank, k)))
        found += [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(local(p).clone() for p in model.parameters()), torch.get_rng_state()]


def local(t: torch.Tensor) -> torch.Tensor:
    """The shard of this rank; of a tensor that is not sharded, all."""
    return t.to_local().detach() if isinstance(t, DTensor) else t.detach()


def peak_of(model: nn.Module, rank: int) -> int:
    """Of a step with gradients that are new: what FSDP2 itself allocates (gathered weights, gradients) included.

    gloo's threads let go of the buffers of a collective some time after it has ended, where cores are busy after the
    next backward has begun. So this is the least peak of several steps.
    """
    x, target = batch(seed_of(model, rank), 0)
    step(model, x, target)
    peaks = []
    for _ in range(5):
        model.zero_grad()
        model.__dict__.update(calls=0)  # the step of most blocks
        peaks.append(measure_peak(lambda: step(model, x, target), "cpu"))
    model.zero_grad()
    return min(peaks)


def one_budget(rank: int, _: Path) -> None:
    """One budget for the whole model: equal results, and the peak within it."""
    for way, make in WAYS.items():
        eager = [0] * RANKS
        dist.all_gather_object(eager, peak_of(make(), rank))
        # What gloo still holds of a collective, where cores are busy, is in the least that can be planned, too.
        budget = int(0.75 * max(eager))
        expected = trained(make(), rank, 7)
        model = make()
        handle = attach(model, budget)
        assert_same(trained(model, rank, 7), expected)
        peak = peak_of(model, rank)
        assert peak <= budget, f"{way}: {peak} of {budget}, {eager}, {handle.plan}"
        check_plan(handle, budget)
        if way == "every block":
            assert handle.plan is not None and peak <= handle.plan.predicted_peak


def check_plan(handle: Attachment, budget: int) -> None:
    plan = handle.plan
    assert isinstance(plan, FollowedPlan)
    assert plan.predicted_peak <= budget
    assert plan.recomputed > 0
