"""Section ``time``: a model's step with what torch offers to save memory, and with a plan for the same peak."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from gpu_run.context import Context
from gpu_run.models import WORKS, Work
from gpu_run.peers import PEERS
from rockmate import InfeasibleBudgetError, Rockmate, measure_peak

SEARCH = 20.0
"""Seconds for each search of a plan, at most."""


class Ours:
    """A Rockmate, made when the first budget is asked for; steps without a limit then show what the loss takes."""

    def __init__(self, ctx: Context, work: Work, model: nn.Module, sample: tuple[torch.Tensor, ...]) -> None:
        self.ctx, self.work, self.model, self.sample = ctx, work, model, sample
        self.rk: Rockmate | None = None

    def plan(self, budget: int) -> None:
        """Raises ``InfeasibleBudgetError``. Some steps have run when it returns."""
        if self.rk is None:
            with self.work.around(self.ctx.device):
                self.rk = Rockmate(
                    self.model,
                    self.sample,
                    "100 TiB",
                    costs=self.ctx.costs,
                    time_limit=SEARCH,
                    progress=False,
                    cache=False,
                )
            for _ in range(2):
                self.step()
        self.rk.budget = budget
        for _ in range(2):
            self.step()

    def step(self) -> None:
        """One step under the plan."""
        assert self.rk is not None
        self.work.step(self.rk, self.model, self.sample)


def run(ctx: Context) -> None:
    """The models that the part names; the peers that compile have parts of their own, as they may take long."""
    torch.set_float32_matmul_precision("high")
    for name in ctx.part.split("+"):
        model, _, compiled = name.partition(" ")
        peers = [peer for peer in PEERS if peer.startswith("compile") == bool(compiled)]
        _one_model(ctx, WORKS[model], peers[: 1 if ctx.dry and model != "gpt" else None])


def _one_model(ctx: Context, work: Work, peers: list[str]) -> None:
    """Eager mode, then a row for each peer and ours at its peak."""
    model, sample = work.model(ctx.scale, ctx.device), work.sample(ctx.scale, ctx.device)
    eager = partial(work.step, model, model, sample)
    for _ in range(1 if ctx.dry else 3):
        eager()
    peak = measure_peak(eager, ctx.device)
    parameters = sum(p.numel() for p in model.parameters())
    ctx.emit(
        case=work.name,
        method="eager",
        peak_bytes=peak,
        time_ns=ctx.times({"": eager}, rounds(ctx))[""],
        parameters=parameters,
    )
    ours = Ours(ctx, work, work.model(ctx.scale, ctx.device), sample)
    ctx.run_each({name: partial(_beside, ctx, work, sample, eager, peak, ours, name) for name in peers}, 8)


def rounds(ctx: Context) -> int:
    """Interleaved steps of each."""
    return 2 if ctx.dry else 7


def _beside(
    ctx: Context,
    work: Work,
    sample: tuple[torch.Tensor, ...],
    eager: Callable[[], None],
    eager_peak: int,
    ours: Ours,
    name: str,
) -> None:
    row: dict[str, Any] = {"case": work.name, "method": name}
    model = work.model(ctx.scale, ctx.device)
    start = time.perf_counter()
    peer = partial(work.step, PEERS[name](model, ctx.dry), model, sample)
    for _ in range(1 if ctx.dry else 3):
        peer()
    row["setup_seconds"] = round(time.perf_counter() - start, 1)
    row["peak_bytes"] = peak = measure_peak(peer, ctx.device)
    row["peak_of_eager"] = round(peak / eager_peak, 3)
    steps: dict[str, Callable[[], None]] = {"eager": eager, "peer": peer}
    start = time.perf_counter()
    try:
        ours.plan(peak)
        row["our_setup_seconds"] = round(time.perf_counter() - start, 1)
        row["our_peak_bytes"] = measure_peak(ours.step, ctx.device)
        assert ours.rk is not None
        row["our_prediction"] = round(1 + ours.rk.plan.predicted_overhead, 3)
        row["run_again"] = ours.rk.plan.recomputed
        steps["ours"] = ours.step
    except InfeasibleBudgetError as error:
        row["ours"] = "the peer's peak is too small"
        row["our_least_bytes"] = error.min_budget
    found = ctx.times(steps, rounds(ctx))
    row |= {"time_ns": found["peer"], "time_of_eager": round(found["peer"] / found["eager"], 3)}
    if "ours" in found:
        row |= {"our_time_ns": found["ours"], "our_time_of_eager": round(found["ours"] / found["eager"], 3)}
    ctx.emit(**row)
