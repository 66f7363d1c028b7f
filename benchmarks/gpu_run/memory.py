"""Section ``bytes``: what plans promise, and what the device's allocator asks for, hands out and holds."""

from __future__ import annotations

import gc
import gzip
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpu_run.allocator import Allocator
from gpu_run.context import Context, portion
from gpu_run.models import WORKS, Work
from gpu_run.recorded import read_segments, read_trace, replay_trace
from rkgb.device.allocator import Levels
from rkgb.errors import AllocatorError
from rockmate import Plan, Rockmate, measure_peak
from rockmate.planning.reserved import Alloc, predict_reserved, step_events

FRACTIONS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Budgets, from the least (0) to that of no recomputation (1)."""

TRACED = {"gpt": 0.4, "resnet50": 0.4, "unet": 0.4}
"""The pairs whose step is recorded."""

STATISTICS = ("requested_bytes", "allocated_bytes", "reserved_bytes")


@dataclass(frozen=True)
class Recording:
    """A step as torch recorded it, in the form of a file. ``peak``: requested, allocated and reserved bytes."""

    expandable: bool
    start: list[dict[str, Any]]
    entries: list[dict[str, Any]]
    peak: tuple[int, int, int]


def run(ctx: Context) -> None:
    """Eight models under six budgets. The environment of the process says which segments the allocator makes."""
    segments, _, part = ctx.part.partition("/")
    names = ["perceptron", "gpt"] if ctx.dry else portion(WORKS, part)
    ctx.run_each({name: partial(_one_model, ctx, WORKS[name], segments == "expandable") for name in names}, 8)


def _one_model(ctx: Context, work: Work, expandable: bool) -> None:
    """The plans are those of costs="flops", so that every process makes the same ones."""
    scale = "toy" if ctx.dry else "middle"
    model, sample = work.model(scale, ctx.device), work.sample(scale, ctx.device)
    with work.around(ctx.device):
        rk = Rockmate(model, sample, "100 TiB", costs="flops", time_limit=20, cache=False)
    run = partial(work.step, rk, model, sample)
    run()  # shows what the loss takes
    run()
    frontier = rk.frontier()
    for fraction in (0.4, 1.0) if ctx.dry else FRACTIONS:
        if ctx.left() < (0 if ctx.dry else 4):
            ctx.emit(case=work.name, error=f"out of time: not run from the budget at {fraction:.0%} on")
            return
        rk.budget = frontier.min_budget + round(fraction * (frontier.max_budget - frontier.min_budget))
        run()
        run()
        ctx.emit(
            case=work.name,
            segments="expandable" if expandable else "default",
            expandable_seen=_expandable(ctx),
            fraction=fraction,
            run_again=rk.plan.recomputed,
            budget_bytes=rk.budget,
            predicted_bytes=rk.plan.predicted_peak,
            requested_bytes=measure_peak(run, ctx.device),
            **_predicted(ctx, rk.plan, expandable),
            **_levels(ctx, run),
        )
        if TRACED.get(work.name) == fraction:
            _trace(ctx, work, rk.plan, run, expandable)


def _levels(ctx: Context, run: Callable[[], None]) -> dict[str, int | None]:
    """Peaks above the level before, if the allocator tells; none of its memory is unused when it begins."""
    if not hasattr(ctx.api, "memory_stats"):
        return {"allocated_bytes": None, "reserved_bytes": None}
    before = _reset(ctx)
    run()
    ctx.kind.synchronize(ctx.device)
    after = ctx.api.memory_stats(ctx.device)
    return {what: after[f"{what}.all.peak"] - before[f"{what}.all.current"] for what in STATISTICS[1:]}


def _reset(ctx: Context) -> dict[str, int]:
    gc.collect()
    ctx.kind.synchronize(ctx.device)
    ctx.api.empty_cache()
    ctx.api.reset_peak_memory_stats(ctx.device)
    found: dict[str, int] = ctx.api.memory_stats(ctx.device)
    return found


def _segments(ctx: Context) -> list[dict[str, Any]]:
    """All that the allocator holds on the device; nothing where it cannot be asked."""
    if not hasattr(ctx.api, "memory_stats"):
        return []
    index = ctx.device.index or 0
    return [s for s in ctx.api.memory._snapshot()["segments"] if s.get("device", index) == index]


def _expandable(ctx: Context) -> bool | None:
    """Whether the segments are expandable, as the allocator says; None where it cannot be asked."""
    segments = _segments(ctx)
    return any(s.get("is_expandable", False) for s in segments) if segments else None


def _predicted(ctx: Context, plan: Plan, expandable: bool) -> dict[str, Any]:
    """By simulation, above the level before it: what the allocator holds now is there."""
    gc.collect()
    getattr(ctx.api, "empty_cache", int)()
    allocator = Allocator(expandable=expandable)
    try:
        allocator.adopt(read_segments(_segments(ctx)))
        start = allocator.levels
        peak = predict_reserved(plan.problem_with_usual_loss(), plan.schedule, allocator)
    except AllocatorError as error:
        return {"not_predicted": str(error)}
    return {
        "predicted_allocated_bytes": peak.allocated - start.allocated,
        "predicted_reserved_bytes": peak.reserved - start.reserved,
    }


def _trace(ctx: Context, work: Work, plan: Plan, run: Callable[[], None], expandable: bool) -> None:
    """Record a step, write it as a file, read it again, and replay it."""
    on_device = hasattr(ctx.api, "memory_stats")
    made = _recorded(ctx, run, expandable) if on_device else _simulated(plan, expandable)
    name = f"trace_{work.name}_{'expandable' if expandable else 'default'}.json.gz"
    path = ctx.out.with_name(f"{ctx.out.stem}_{name}")
    write_recording(path, made)
    row: dict[str, Any] = {"case": f"trace of {work.name}", "segments": "expandable" if expandable else "default"}
    row |= {"entries": len(made.entries), "file": path.name, "file_bytes": path.stat().st_size}
    try:
        peak = replay_recording(read_recording(path))
        row["replayed"] = tuple(peak) == made.peak
        row["peaks"] = f"{tuple(peak)}, recorded {made.peak}"
    except AllocatorError as error:
        row |= {"replayed": False, "error": f"{error} {' '.join(getattr(error, '__notes__', []))}"}
    ctx.emit(**row)


def _recorded(ctx: Context, run: Callable[[], None], expandable: bool) -> Recording:
    _reset(ctx)
    start = _segments(ctx)
    ctx.api.memory._record_memory_history(max_entries=10**7, context=None)
    try:
        run()
        ctx.kind.synchronize(ctx.device)
        entries = ctx.api.memory._snapshot()["device_traces"][ctx.device.index or 0]
        now = ctx.api.memory_stats(ctx.device)
    finally:
        ctx.api.memory._record_memory_history(enabled=None)
    peak = tuple(now[f"{what}.all.peak"] for what in STATISTICS)
    return Recording(expandable, [_slim_segment(s) for s in start], [_slim(e) for e in entries], peak)


def _slim(entry: dict[str, Any]) -> dict[str, Any]:
    return {k: entry[k] for k in ("action", "addr", "device_free", "size", "stream") if k in entry}


def _slim_segment(segment: dict[str, Any]) -> dict[str, Any]:
    kept = {k: segment[k] for k in ("address", "total_size", "segment_type", "stream", "is_expandable") if k in segment}
    blocks = [{k: b[k] for k in ("address", "size", "requested_size", "state") if k in b} for b in segment["blocks"]]
    return {**kept, "blocks": blocks}


def _simulated(plan: Plan, expandable: bool) -> Recording:
    """What torch would record of the simulated allocator: a stand-in where no allocator records."""
    allocator = Allocator(expandable=expandable)
    handles: dict[Any, int] = {}
    entries: list[dict[str, Any]] = []
    for event in step_events(plan.problem_with_usual_loss(), plan.schedule):
        known = len(allocator.actions)
        if isinstance(event, Alloc):
            handles[event.name] = allocator.malloc(event.size)
            entries += [{"action": a.kind, "addr": a.address, "size": a.size} for a in allocator.actions[known:]]
            if event.size:
                entries.append({"action": "alloc", "addr": allocator.address(handles[event.name]), "size": event.size})
        else:
            handle = handles.pop(event.name)
            address = allocator.address(handle)
            allocator.free(handle)
            if address is not None:
                entries.append({"action": "free_completed", "addr": address, "size": 0})
    return Recording(expandable, [], entries, tuple(allocator.peak))


def write_recording(path: Path, recording: Recording) -> None:
    """As compressed JSON, the same bytes for the same recording."""
    path.write_bytes(gzip.compress(json.dumps(asdict(recording)).encode(), mtime=0))


def read_recording(path: Path) -> Recording:
    """What ``write_recording`` wrote."""
    found = json.loads(gzip.decompress(path.read_bytes()))
    return Recording(found["expandable"], found["start"], found["entries"], tuple(found["peak"]))


def replay_recording(recording: Recording) -> Levels:
    """The peaks of the simulated allocator; ``AllocatorError`` where it does otherwise than the recorded one."""
    return replay_trace(read_trace(recording.entries, recording.start), recording.expandable).peak
