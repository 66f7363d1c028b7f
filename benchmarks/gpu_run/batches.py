"""Section ``fits``: the largest batch that trains under a fixed limit of memory, in eager mode and under plans."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpu_run.context import Context
from gpu_run.models import WORKS, Work
from rockmate import InfeasibleBudgetError, InputError, Rockmate, measure_peak

ROUNDING = 0.9
"""Of what is free, this part is the budget: blocks are larger than what is asked for."""


def run(ctx: Context) -> None:
    """Two models; what is there before the first batch counts."""
    names = ["resnet50"] if ctx.dry else ["gpt", "resnet50"]
    ctx.run_each({name: partial(_one, ctx, WORKS[name]) for name in names}, 15)


def _one(ctx: Context, work: Work) -> None:
    limit = 100_000 if ctx.dry else 8 * 2**30
    limited = getattr(ctx.api, "set_per_process_memory_fraction", None)
    if limited is not None:
        limited(limit / ctx.api.get_device_properties(ctx.device).total_memory, ctx.device)
    try:
        row: dict[str, Any] = {"case": work.name, "limit_bytes": limit}
        row["eager_batch"] = eager = _largest(ctx, partial(_eager, ctx, work, limit), 1)
        ctx.emit(**row)
        loss = _loss_of_an_example(ctx, work)
        ctx.clear()
        row["our_batch"] = ours = _largest(ctx, partial(_planned, ctx, work, limit, loss), max(1, eager))
        ctx.emit(**row, times_larger=round(ours / eager, 2) if eager else None)
    finally:
        if limited is not None:
            limited(1.0, ctx.device)


def _largest(ctx: Context, fits: Callable[[int], bool], first: int) -> int:
    """By doubling, then by halves of the last step, to a sixteenth; 0 if ``first`` is too large."""
    largest, beyond = 0, 0
    batch = first
    while batch and ctx.left() > (0 if ctx.dry else 5):
        if fits(batch):
            largest = batch
        else:
            beyond = batch
        ctx.clear()
        if not beyond:
            batch = 2 * largest
        else:
            step = (beyond - largest) // 2
            batch = largest + step if largest and step > largest // 16 else 0
        if ctx.dry and batch > 4:
            break
    return largest


def _within(ctx: Context, limit: int, run: Callable[[], None]) -> bool:
    """Whether some steps run, where the device refuses more, and their peak is within ``limit`` elsewhere."""
    before = _held(ctx)
    for _ in range(3):
        run()
    return before is not None or measure_peak(run, ctx.device) <= limit


def _held(ctx: Context) -> int | None:
    """Bytes in use on the device; None where its allocator does not tell."""
    read = getattr(ctx.api, "memory_allocated", None)
    return int(read(ctx.device)) if read is not None else None


def _eager(ctx: Context, work: Work, limit: int, batch: int) -> bool:
    try:
        model, sample = work.model(ctx.scale, ctx.device), work.sample(ctx.scale, ctx.device, batch)
        return _within(ctx, limit, partial(work.step, model, model, sample))
    except torch.OutOfMemoryError:
        return False


def _loss_of_an_example(ctx: Context, work: Work) -> int:
    """Bytes that the loss takes for each example, as steps with two show: before the first, a plan leaves more."""
    model, sample = work.model(ctx.scale, ctx.device), work.sample(ctx.scale, ctx.device, 2)
    with work.around(ctx.device):
        rk = Rockmate(model, sample, "100 TiB", costs="flops", progress=False, cache=False)
    for _ in range(2):
        work.step(rk, model, sample)
    room = rk.plan.room
    return max(0, room.between + room.kept - rk.plan.graph.output_bytes) // 2


def _planned(ctx: Context, work: Work, limit: int, loss: int, batch: int) -> bool:
    """The plan for what is free beside the model and its sample, less what blocks are larger by."""
    try:
        model, sample = work.model(ctx.scale, ctx.device), work.sample(ctx.scale, ctx.device, batch)
        gc.collect()
        budget = int(ROUNDING * (limit - (_held(ctx) or 0)))
        with work.around(ctx.device):
            rk = Rockmate(
                model,
                sample,
                budget,
                costs="flops",
                loss_memory=loss * batch,
                time_limit=10,
                progress=False,
                cache=False,
            )
        fits = _within(ctx, limit, partial(work.step, rk, model, sample))
    except InfeasibleBudgetError:
        return False
    except (torch.OutOfMemoryError, InputError) as error:
        if not isinstance(error.__cause__ or error, torch.OutOfMemoryError):
            raise
        ctx.emit(case=work.name, method=f"ours at batch {batch}", fits=False, why=f"{error}"[:300])
        return False
    ctx.emit(
        case=work.name,
        method=f"ours at batch {batch}",
        fits=fits,
        prediction=round(1 + rk.plan.predicted_overhead, 3),
        predicted_bytes=rk.plan.predicted_peak,
        budget_bytes=budget,
    )
    return fits
