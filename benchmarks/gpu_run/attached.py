"""Section ``scripts``: training scripts, plain and attached, as ``benchmarks/scripts.py`` runs them."""

from __future__ import annotations

import warnings
from typing import Any

from gpu_run.context import ROOT, Context, load


def run(ctx: Context) -> None:
    """Those whose names begin as the part does."""
    warnings.simplefilter("ignore")
    scripts = load(ROOT / "benchmarks" / "scripts.py")
    mine = {name: s for name, s in (scripts.SHORT if ctx.dry else scripts.SCRIPTS).items() if name.startswith(ctx.part)}
    ctx.run_each({name: lambda name=name: _one_script(ctx, scripts, name, mine[name]) for name in mine}, 10)


def _one_script(ctx: Context, scripts: Any, name: str, script: Any) -> None:
    """Plain twice, to see how far eager mode is from itself, and attached."""
    device = str(ctx.device)
    plain, again = (scripts.run(script, None, device) for _ in range(2))
    budget = int(plain["peak"] * script.percent / 100)
    ours = scripts.run(script, budget, device)
    gap, own = (_gap(x["losses"], plain["losses"]) for x in (ours, again))
    settled = scripts.median_of([ours], "settled") / scripts.median_of([again], "settled")
    ctx.emit(
        case=name,
        steps=len(plain["times"]),
        plans=ours["plans"],
        budget_bytes=budget,
        peak_bytes=ours["peak"],
        seconds=round(again["seconds"], 2),
        our_seconds=round(ours["seconds"], 2),
        settled=round(settled, 2),
        equal=not gap,
        gap=gap,
        gap_of_eager=own,
    )


def _gap(found: list[str], expected: list[str]) -> float:
    """The largest relative difference of two lists of losses, which are written in hexadecimal."""
    pairs = zip(map(float.fromhex, found), map(float.fromhex, expected), strict=True)
    return max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)
