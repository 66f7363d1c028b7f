"""What each of two processes runs in ``test_distributed``: models attached under DistributedDataParallel, or plain."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from against_eager import assert_same, snapshot
from ranks import accumulate, assert_overlap, average, gpt, ids, loss_of, trained
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rockmate
from rockmate import InputError, measure_peak


@cache
def budget() -> int:
    """Three fifths of a step."""
    model = gpt()

    def step() -> None:
        loss_of(model, ids(0, 0)).backward()

    step()
    model.zero_grad()
    return int(0.6 * measure_peak(step, "cpu"))


def attached(model: nn.Module) -> rockmate.Attachment:
    """The line that a script has more."""
    return rockmate.attach(model, budget(), costs="flops")


def recomputes(handle: rockmate.Attachment) -> bool:
    return not handle.reason and any(p.plan is not None and p.plan.recomputed for p in handle.plans)


def equal_with_all_options(rank: int, folder: Path) -> None:
    """Gradients and parameters are equal, and gradients become ready and buckets are sent in the same order."""
    others = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    for options, ways in (({}, ("before", "after")), (others, ("before",)), ({"static_graph": True}, ("before",))):
        results, logs = [], []
        for way in ("eager", *ways):
            model = gpt()
            handle = attached(model) if way == "before" else None
            parallel = DistributedDataParallel(model, bucket_cap_mb=0.02, **options)
            handle = attached(parallel.module) if way == "after" else handle
            events: list[Any] = []

            def reduce(log: list[Any], bucket):  # type: ignore[no-untyped-def] # torch reads annotations
                log.append(("bucket", bucket.index(), [*map(tuple, map(torch.Tensor.size, bucket.parameters()))]))
                return average(bucket)

            parallel.register_comm_hook(events, reduce)
            for name, p in model.named_parameters():
                p.register_post_accumulate_grad_hook(lambda _, name=name, log=events: log.append(name))
            begin = partial(events.append, "step")
            results.append([*trained(rank, parallel, nn.utils.clip_grad_norm_, begin)])
            logs.append(events)
            assert handle is None or recomputes(handle)
        for ours, log in zip(results[1:], logs[1:], strict=True):
            assert_same(ours, results[0])
            assert log == logs[0], options
        last = logs[0][-logs[0][::-1].index("step") :]
        kinds = [isinstance(event, tuple) for event in last]
        assert sum(kinds) > 2
        assert False in kinds[kinds.index(True) :], "communication begins before the last gradient"


def measured_once(rank: int, folder: Path) -> None:
    """What one rank has measured is true for both: they run one plan, that of the first step and the one after it."""
    model = gpt()
    handle = rockmate.attach(model, budget(), cache=False)
    parallel = DistributedDataParallel(model)
    for _ in range(2):
        loss_of(parallel, ids(rank, 0)).backward()
        plan = handle.plan
        assert plan is not None
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (plan.problem, plan.schedule))
        assert found[0] == found[1]


def overlap(rank: int, folder: Path) -> None:
    model = gpt()
    attached(model)
    assert_overlap(rank, DistributedDataParallel(model, bucket_cap_mb=0.02))


def accumulation(rank: int, folder: Path) -> None:
    """Steps without synchronisation, one with it, and evaluation on one rank alone."""
    results = []
    for line in (lambda _: None, attached):
        model = gpt()
        line(model)
        parallel = DistributedDataParallel(model)
        torch.manual_seed(rank)
        found = []
        for k in range(2):
            accumulate(rank, parallel, k)
            found += [*snapshot(parallel)]
            if rank == 0:
                with torch.no_grad():
                    found.append(model(ids(0, 9)))
        results.append(found)
    assert_same(results[1], results[0])


def other_way_round(rank: int, folder: Path) -> None:
    """The wrapper itself is refused."""
    with pytest.raises(InputError, match=r"is a DistributedDataParallel.* attach model\.module"):
        attached(DistributedDataParallel(gpt()))


def compiled(rank: int, folder: Path) -> None:
    """With compiled pieces the budget changes no bit, and the ranks have the same parameters."""
    results = []
    for share in ("100%", "80%"):
        model = gpt()
        torch.manual_seed(rank)  # masks differ between ranks
        handle = rockmate.attach(model, share, costs="flops", compile=True)
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for k in range(3):
            optimizer.zero_grad()
            loss_of(parallel, ids(rank, k)).backward()
            optimizer.step()
        assert not handle.reason
        assert "of them compiled" in str(handle.plan)
        results.append([*snapshot(model)])
    assert_same(results[1], results[0])
    for p in model.parameters():
        first = p.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(p, first)
