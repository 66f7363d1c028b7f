"""Section ``launch``: whether a step waits for Python or for the device.

A step is timed as it runs, and once more behind a wait in the device's queue, during which Python launches its kernels
(of which the queue takes about a thousand): then it takes what the device is busy for. Where the first is larger, the
step is bound by its launches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from gpu_run.context import Context
from gpu_run.models import WORKS
from gpu_run.peers import every_block
from rockmate import InfeasibleBudgetError, Rockmate, measure_peak


def run(ctx: Context) -> None:
    """By batch: eager mode, checkpoint, ours keeping everything, ours at the peak of checkpoint."""
    sizes = (2,) if ctx.dry else (1, 2, 4, 8)
    ctx.run_each({f"batch {n}": partial(_batch, ctx, n) for n in sizes}, 8)


def _batch(ctx: Context, batch: int) -> None:
    work = WORKS["gpt"]
    sample = work.sample(ctx.scale, ctx.device, batch)
    model, peer, ours = (work.model(ctx.scale, ctx.device) for _ in range(3))
    steps: dict[str, Callable[[], None]] = {"eager": partial(work.step, model, model, sample)}
    checkpointed = partial(work.step, every_block(peer, ctx.dry), peer, sample)
    checkpointed()
    steps["checkpoint every block"] = checkpointed
    for name, step in steps.items():
        _measure(ctx, batch, name, step)
    budget = measure_peak(checkpointed, ctx.device)
    rk = Rockmate(ours, sample, "100 TiB", costs=ctx.costs, time_limit=20, progress=False, cache=False)
    mine = partial(work.step, rk, ours, sample)
    _measure(ctx, batch, "ours, nothing again", mine)
    try:
        rk.budget = budget
    except InfeasibleBudgetError as error:
        rk.budget = error.min_budget
    _measure(ctx, batch, f"ours, {rk.plan.recomputed} again", mine)


def _measure(ctx: Context, batch: int, name: str, step: Callable[[], None]) -> None:
    for _ in range(2):
        step()
    wall = _wall(ctx, step)
    busy = [_behind_a_wait(ctx, step, 2 * wall) for _ in range(2 if ctx.dry else 5)]
    device = int(statistics.median(busy))
    ctx.emit(
        case=f"batch {batch}",
        method=name,
        time_ns=wall,
        device_time_ns=device,
        of_device_time=round(wall / max(1, device), 2),
        launch_bound=wall > 1.1 * device,
    )
    torch.manual_seed(0)


def _wall(ctx: Context, step: Callable[[], None]) -> int:
    """Nanoseconds of a step among several in a row: nobody waits for the device between steps."""
    count, found = (1, 2) if ctx.dry else (5, 3)
    taken = []
    for _ in range(found):
        ctx.kind.synchronize(ctx.device)
        start = time.perf_counter_ns()
        for _ in range(count):
            step()
        ctx.kind.synchronize(ctx.device)
        taken.append((time.perf_counter_ns() - start) // count)
    return int(statistics.median(taken))


def _behind_a_wait(ctx: Context, step: Callable[[], None], at_least: int) -> int:
    kind = ctx.kind
    kind.synchronize(ctx.device)
    kind.hold(ctx.device, at_least)
    start = kind.mark(ctx.device)
    step()
    found: int = kind.between(start, kind.mark(ctx.device))
    return found
