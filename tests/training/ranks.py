"""What each of two processes runs in ``test_distributed``: training with and without Rockmate, compared here.

``attached_ranks`` has the same for models that are attached, ``sharded_ranks`` for those that are sharded.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from against_eager import assert_same, snapshot, under_budget
from models import randn, tokens
from sections import Sections
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from rkgb.device import Cpu
from rockmate import InputError, Rockmate
from rockmate.demo.gpt import GPT
from rockmate.run.store import Store

RANKS = 2
IDS = (4, 16)


def start(rank: int, module: str, works: list[str], folder: str) -> None:
    """The program of one process: the functions ``works`` of ``module``, one after the other."""
    import torch._dynamo

    torch.set_num_threads(1)
    made = importlib.import_module(module)
    gc.freeze()  # measuring calls Python's collector, which would go through all that imports have left
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        for work in works:
            getattr(made, work)(rank, Path(folder))
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


def trained(
    rank: int, call: nn.Module, clip: Callable[..., Any] | None = None, begin: Callable[[], None] = lambda: None
) -> Iterator[Any]:
    """Three steps; ``begin`` is called before each. Losses, gradients before and after clipping, norms, parameters."""
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(call.parameters(), lr=0.01)
    for k in range(3):
        begin()
        loss = loss_of(call, ids(rank, k))
        loss.backward()
        yield loss.detach()
        yield from (p.grad.clone() for p in call.parameters() if p.grad is not None)
        if clip is not None:
            yield clip(call.parameters(), 0.5)
            yield from snapshot(call)
        optimizer.step()
        optimizer.zero_grad()
    yield from snapshot(call)


def accumulate(rank: int, call: DistributedDataParallel, k: int) -> None:
    """A backward without synchronisation, and one with it."""
    with call.no_sync():
        loss_of(call, ids(rank, k)).backward()
    loss_of(call, ids(rank, k + 5)).backward()


def average(bucket: Any) -> Any:
    """What DistributedDataParallel does with a bucket if it has no hook: the mean over all ranks."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda f: f.value()[0] / RANKS)


def assert_overlap(rank: int, parallel: DistributedDataParallel) -> None:
    """Buckets are sent while later backwards still compute nodes again."""
    events: list[str] = []

    def reduce(_, bucket):  # type: ignore[no-untyped-def] # torch reads annotations, and not as texts
        events.append("bucket")
        return average(bucket)

    parallel.register_comm_hook(None, reduce)
    original = Store.run_again

    def run_again(self: Store, i: int) -> None:
        events.append("rerun")
        original(self, i)

    Store.run_again = run_again  # type: ignore[method-assign]
    try:
        for k in range(3):  # buckets have their final order from the second step on
            events.clear()
            loss_of(parallel, ids(rank, k)).backward()
    finally:
        Store.run_again = original  # type: ignore[method-assign]
    assert events.count("bucket") > 2
    assert "rerun" in events[events.index("bucket") :], events


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


def ddp_accumulation(rank: int, folder: Path) -> None:
    """Steps without synchronisation, and one with it."""
    rk = planned(rank, folder)
    parallel = [DistributedDataParallel(m, gradient_as_bucket_view=True) for m in (gpt(), rk)]
    for k in range(2):
        results = []
        for call in parallel:
            torch.manual_seed(rank)
            accumulate(rank, call, k)
            results.append([*snapshot(call)])
        assert_same(results[1], results[0])


def ddp_budget(rank: int, folder: Path) -> None:
    """From the model's forward on a step takes what it takes alone, communication included. Before it, within the
    wrapper's forward, DDP allocates the buffers that it sends, as one, and once, in the second step, its buckets anew.
    """
    rk, x = planned(rank, folder), ids(rank, 0)
    alone = rk.plan.predicted_peak + Cpu.scalars
    assert alone <= rk.budget
    buckets, sent = sum(p.nbytes for p in rk.parameters()), sum(b.nbytes for b in rk.buffers())
    for options in ({}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.02}):
        for inside in (True, False):
            rk.zero_grad()
            parallel, sections = DistributedDataParallel(rk, **options), Sections()
            start = sections.begin if inside else lambda: None
            handle = rk.register_forward_pre_hook(lambda *_, start=start: start())
            with sections:
                for _ in range(4):
                    if not inside:
                        sections.begin()
                    loss_of(parallel, x).backward()
                    sections.end()
                    parallel.zero_grad()
            handle.remove()
            first, second, *later = sections.peaks
            more = 0 if inside else sent
            assert max(first, *later) <= alone + more, (options, inside, sections.peaks, alone)
            assert second <= alone + more + (0 if inside else buckets)
            assert inside or second - max(later) >= buckets - sent, "the buckets are no longer made anew: say so"


def ddp_overlap(rank: int, folder: Path) -> None:
    assert_overlap(rank, DistributedDataParallel(planned(rank, folder), bucket_cap_mb=0.02))


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
    assert all(block.plan.room.outputs is None for block in models[1].layers), "what FSDP gathers counted as the loss's"
    assert list(models[1].state_dict()) == list(models[0].state_dict())


def fsdp_budget(rank: int, folder: Path) -> None:
    """A block's own memory is in its budget. ``fully_shard`` adds the gathered weights and, while it copies them out of
    the collective's buffer, or gradients into one, as much again.
    """
    x = randn(*IDS, 32, seed=0, requires_grad=True)
    block = under_budget(gpt().layers[0], x)
    weights = sum(p.nbytes for p in block.parameters())
    fully_shard(block)
    for _ in range(2):  # what the loss reads is planned for before memory is watched: planning would end that
        block(x).square().mean().backward()
    for t in (x, *block.parameters()):
        t.grad = None
    sections = Sections()
    measured = sections.around(lambda: block(x).square().mean().backward())
    with sections:
        for _ in range(3):
            measured()
            for t in (x, *block.parameters()):
                t.grad = None
    assert block.plans_made == 1
    # When the collective's buffers go is up to its threads: of a step they may miss the peak.
    assert block.budget < max(sections.peaks) <= block.budget + 2 * weights, (sections.peaks, block.budget, weights)


def other_way_round(rank: int, folder: Path) -> None:
    """Rockmate around shards, or around DistributedDataParallel, is refused: their forward would not run."""
    sharded = gpt()
    for layer in sharded.layers:
        fully_shard(layer)
    for model, name in ((sharded, "fully_shard"), (DistributedDataParallel(gpt()), "DistributedDataParallel")):
        with pytest.raises(InputError, match=name):
            Rockmate(model, ids(rank, 0), "10 MiB", costs="flops")
