"""Section ``peers``: what people use today beside ours, at no more memory, as ``benchmarks/peers.py`` measures it."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from peers_run.measure import Settings, bytes_and_flops, times
from peers_run.points import budgets_beside

from gpu_run.context import Context
from gpu_run.peers import backend

PEERS = ("checkpoint, every block", "checkpoint, every second block")
"""Of a dry run."""
COMPILED = ("compile, every block checkpointed", "compile, activation_memory_budget")
BUDGETS = (0.1, 0.4, 0.7)


def run(ctx: Context) -> None:
    """The models that the part names: with what compiles nothing, or, "NAME compiled", with what compiles."""
    ctx.run_each({part: lambda part=part: _one_model(ctx, *part.split()) for part in ctx.part.split("+")}, 20)


def _one_model(ctx: Context, name: str, compiled: str = "") -> None:
    only = PEERS if ctx.dry else COMPILED if compiled else ()
    with tempfile.TemporaryDirectory() as folder:
        scale, rounds = ("tiny", 2) if ctx.dry else ("gpu", 5)
        budgets = BUDGETS if compiled else ()
        settings = Settings(scale, ctx.device, backend(ctx.dry), budgets, Path(folder), rounds, only)
        found = bytes_and_flops(settings, name)
        taken = times(settings, name, budgets_beside(found["points"]), ())

    def ratio(key: str) -> float | None:
        return round(statistics.median(t[0] for t in taken[key]), 3) if key in taken else None

    for row in found["left_out"]:
        ctx.emit(case=name, method=row["peer"], left_out=row["why"])
    for point in found["points"]:
        ours: dict[str, Any] = point["ours"]
        ctx.emit(
            case=name,
            method=point["peer"],
            peak_bytes=point["peak"],
            time_of_eager=ratio(point["peer"]),
            our_peak_bytes=ours.get("peak"),
            our_time_of_eager=ratio(f"ours: {point['peer']}"),
            equal=ours.get("equal"),
            **({"our_time_compiled": ratio(f"ours compiled: {point['peer']}")} if compiled else {}),
        )
