"""What each of two processes runs in ``test_distributed``: training with and without Rockmate, compared here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from against_eager import assert_same, snapshot, under_budget
from models import randn, tokens
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from rockmate import InputError, Rockmate, measure_peak
from rockmate.executor import CallState
from rockmate.gpt import GPT

RANKS = 2
IDS = (4, 16)


def start(rank: int, works: tuple[str, ...], folder: str) -> None:
    """The program of one process: the functions below that are named, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        for work in works:
            globals()[work](rank, Path(folder))
    finally:
        dist.destroy_process_group()


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(3, 32, 4, 16, 64)


def ids(rank: int, step: int) -> torch.Tensor:
    return tokens(*IDS, high=64, seed=10 * step + rank)


def loss_of(call: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(call(x).flatten(0, 1), x.flatten())


def planned(rank: int, folder: Path) -> Rockmate:
    """The model under a budget; planned when first asked for."""
    path = folder / f"{rank}.json"
    if not path.exists():
        under_budget(gpt(), ids(rank, 0)).plan.save(path)
    return Rockmate(gpt(), ids(rank, 0), plan=path)


def trained(rank: int, call: nn.Module, steps: int = 3, clip: Callable[..., Any] | None = None) -> Iterator[Any]:
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(call.parameters(), lr=0.01)
    for k in range(steps):
        loss = loss_of(call, ids(rank, k))
        loss.backward()
        yield loss.detach()
        yield from (p.grad.clone() for p in call.parameters() if p.grad is not None)
        if clip is not None:
            clip(call.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    yield from snapshot(call)


def ddp(rank: int, folder: Path) -> None:
    """Gradients of DistributedDataParallel, averaged over ranks; each rank plans, and the plans are equal."""
    rk = planned(rank, folder)
    results = [
        list(trained(rank, DistributedDataParallel(m, bucket_cap_mb=0.02), clip=nn.utils.clip_grad_norm_))
        for m in (gpt(), rk)
    ]
    assert_same(results[1], results[0])
    programs: list[Any] = [None] * RANKS
    dist.all_gather_object(programs, rk.plan.program())
    assert programs[0] == programs[1]
    assert rk.plans_made == 0


def ddp_one_plan(rank: int, folder: Path) -> None:
    """The first rank plans, with measured times; all load its plan."""
    path = folder / "plan.json"
    if rank == 0:
        Rockmate(gpt(), ids(rank, 0), planned(rank, folder).budget).plan.save(path)
    dist.barrier()
    rk = Rockmate(gpt(), ids(rank, 0), plan=path)
    assert rk.plan.recomputed > 0
    results = [list(trained(rank, DistributedDataParallel(m))) for m in (gpt(), rk)]
    assert_same(results[1], results[0])


def ddp_budget(rank: int, folder: Path) -> None:
    """Accumulation without synchronisation, and the peak of a step."""
    rk = planned(rank, folder)
    parallel = [DistributedDataParallel(m, gradient_as_bucket_view=True) for m in (gpt(), rk)]
    for k in range(2):
        results = []
        for call in parallel:
            torch.manual_seed(rank)
            with call.no_sync():
                loss_of(call, ids(rank, k)).backward()
            loss_of(call, ids(rank, k + 5)).backward()
            results.append([*snapshot(call)])
        assert_same(results[1], results[0])
    x = ids(rank, 7)
    assert measure_peak(lambda: loss_of(parallel[1], x).backward(), "cpu") <= rk.budget


def ddp_overlap(rank: int, folder: Path) -> None:
    """Buckets are reduced while later backwards still compute nodes again."""
    events: list[str] = []
    rk = planned(rank, folder)
    parallel = DistributedDataParallel(rk, bucket_cap_mb=0.02)

    def reduce(_, bucket):  # type: ignore[no-untyped-def] # torch reads annotations, and not as texts
        events.append("bucket")
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda f: f.value()[0] / RANKS)

    parallel.register_comm_hook(None, reduce)
    original = CallState.run_again

    def run_again(self: CallState, i: int) -> None:
        events.append("rerun")
        original(self, i)

    CallState.run_again = run_again  # type: ignore[method-assign]
    try:
        for k in range(2):  # buckets have their final order from the second step on
            events.clear()
            loss_of(parallel, ids(rank, k)).backward()
    finally:
        CallState.run_again = original  # type: ignore[method-assign]
    assert events.count("bucket") > 2
    assert "rerun" in events[events.index("bucket") :], events


def fsdp(rank: int, folder: Path) -> None:
    """``fully_shard`` around each block, and Rockmate inside."""
    models = []
    for inside in (False, True):
        model = gpt()
        if inside:
            x = randn(*IDS, 32, seed=0, requires_grad=True)
            for k, block in enumerate(model.layers):
                model.layers[k] = under_budget(block, x)
        for block in model.layers:
            fully_shard(block)
        models.append(fully_shard(model))
    results = []
    for model in models:
        found = list(trained(rank, model, clip=nn.utils.clip_grad_norm_))
        results.append([t.full_tensor() if isinstance(t, torch.distributed.tensor.DTensor) else t for t in found])
    assert_same(results[1], results[0])
    assert all(block.plan.recomputed > 0 and block.plans_made == 1 for block in models[1].layers)
    assert list(models[1].state_dict()) == list(models[0].state_dict())


def other_way_round(rank: int, folder: Path) -> None:
    """Rockmate around shards, or around DistributedDataParallel, is refused: their forward would not run."""
    sharded = gpt()
    for layer in sharded.layers:
        fully_shard(layer)
    for model, name in ((sharded, "fully_shard"), (DistributedDataParallel(gpt()), "DistributedDataParallel")):
        with pytest.raises(InputError, match=name):
            Rockmate(model, ids(rank, 0), "10 MiB", costs="flops")
