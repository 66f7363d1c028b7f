"""What a worker process measures of one model: bytes and FLOPs of every method once, or times in interleaved steps."""

from __future__ import annotations

import copy
import random
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_run.context import ROOT, load

import rockmate
from peers_run.methods import Method, NotApplicable, flops, methods
from peers_run.models import MODELS, Task
from peers_run.points import SHARES
from rkgb.device import kind_of

Row = dict[str, Any]
AS_FREE = 1.005
"""A frontier's point that is predicted to take less than this much of a step's time is as good as no recomputation."""

NEAR = 0.04
"""Of eager mode's peak: budgets that differ by less are not timed both."""


@dataclass(frozen=True)
class Settings:
    """``budgets``: of those of ``activation_memory_budget``, what is compiled with ``backend``. ``cache``: a folder.

    ``only``: families of methods; all if there are none.
    """

    scale: str
    device: torch.device
    backend: str
    budgets: Sequence[float]
    cache: Path
    rounds: int
    only: Sequence[str] = ()


@dataclass
class Bench:
    """A model, its step in eager mode, and ours: one attachment, whose budget is set before each step."""

    settings: Settings
    name: str
    task: Task = field(init=False)
    attachment: rockmate.Attachment | None = None
    our_set_up: float | None = None

    def __post_init__(self) -> None:
        torch._dynamo.config.recompile_limit = 256  # all methods share the code of the model's classes
        self.entry = MODELS[self.name]
        self.task = self.entry.task(self.settings.scale, self.settings.device)
        for _ in range(2):
            self.eager()
        self.ours_model = self.copied()

    def copied(self) -> torch.nn.Module:
        """The same parameters and buffers, in modules that a method can change: where tensors lie costs time."""
        model = self.task.model
        memo = {id(t): t for t in (*model.parameters(), *model.buffers())}
        return copy.deepcopy(model, memo)

    def eager(self) -> tuple[Any, torch.Tensor]:
        return self.task.step(self.task.model)

    def ours(self) -> tuple[Any, torch.Tensor]:
        return self.task.step(self.ours_model)

    def methods(self) -> list[Method]:
        found = methods(self.entry, self.task, self.settings.backend, self.settings.budgets)
        return [m for m in found if not self.settings.only or m.family in self.settings.only]

    def use(self, budget: int) -> None:
        """Plan for ``budget``, and run a step. Raises ``InfeasibleBudgetError``.

        The first step under a plan makes its program; after two, what the loss takes is known.
        """
        start = time.perf_counter()
        if self.attachment is None:
            self.attachment = rockmate.attach(self.ours_model, budget, cache=self.settings.cache, progress=False)
        elif self.attachment.budget != budget:
            self.attachment.budget = budget
        self.ours()
        if self.our_set_up is None:
            self.ours()
            self.our_set_up = time.perf_counter() - start - 2 * self.seconds(self.eager)[1]

    def seconds(self, step: Callable[[], Any]) -> tuple[float, float]:
        """Of the processor and of the clock, in a memory laid out anew; on a device, its own time for both."""
        device = self.settings.device
        if device.type != "cpu":
            kind = kind_of(device)
            kind.synchronize(device)
            mark = kind.mark(device)
            step()
            taken = kind.between(mark, kind.mark(device)) / 1e9
            return taken, taken
        held = load(ROOT / "benchmarks" / "overhead.py").laid_out_anew()
        clock, processor = time.perf_counter(), time.process_time()
        step()
        taken = time.process_time() - processor, time.perf_counter() - clock
        del held
        return taken

    def peak(self, step: Callable[[], Any]) -> int:
        """Exact bytes above the level before the step; gradients begin as None."""
        self.task.model.zero_grad(set_to_none=True)
        return rockmate.measure_peak(step, self.settings.device)

    def compared(self, step: Callable[[], tuple[Any, torch.Tensor]]) -> Row:
        """With eager mode's step from the same state: gradients bit-equal, buffers too, the largest difference."""
        model = self.task.model
        before = [b.clone() for b in model.buffers()]
        runs = []
        for run in (self.eager, step):
            with torch.no_grad():
                for buffer, value in zip(model.buffers(), before, strict=True):
                    buffer.copy_(value)
            torch.manual_seed(1)
            loss = run()[1]
            grads = {name: p.grad for name, p in model.named_parameters()}
            runs.append(({"loss": loss, **grads}, [b.clone() for b in model.buffers()]))
        (ours, own), (theirs, other) = runs
        worst = max(difference(ours[name], theirs[name]) for name in ours)
        return {
            "equal": all(same(ours[name], theirs[name]) for name in ours),
            "buffers_equal": all(map(same, own, other)),
            "largest_difference": worst,
        }


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def difference(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Relative to the largest value of ``a``; infinite where one has no gradient."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))


# ------------------------------------------------------------------------------------------------ bytes and FLOPs


def bytes_and_flops(settings: Settings, name: str) -> Row:
    """Every method once, and ours at its peak; then budgets at which ours should take no more time than each."""
    bench = Bench(settings, name)
    eager = {"peak": bench.peak(bench.eager), "flops": flops(bench.eager)}
    found: Row = {"parameters": sum(p.numel() for p in bench.task.model.parameters()), "eager": eager}
    points, left_out = found.setdefault("points", []), found.setdefault("left_out", [])
    for method in bench.methods():
        try:
            points.append(of_method(bench, method))
        except NotApplicable as error:
            left_out.append({"peer": method.name, "why": str(error)})
        except Exception as error:  # noqa: BLE001 - whatever fails is said in the results
            left_out.append({"peer": method.name, "why": said(error)})
    points[:] = best_of_families(points, left_out)
    for point in points:
        point["ours"] = at_budget(bench, point["peak"])
    found["our_set_up_seconds"] = bench.our_set_up
    found["ours_in_time"] = budgets_in_time(bench, found) if bench.our_set_up else []
    if bench.attachment and bench.our_set_up:
        curve = bench.attachment.frontier()
        found["frontier"] = {"least": curve.min_budget, "most": curve.max_budget, "points": thinned(curve.points)}
        found["shares"] = of_shares(bench, found)
    return found


def shares(settings: Settings, name: str, known: Row) -> Row:
    """``of_shares`` for a model whose other figures are ``known``."""
    return of_shares(Bench(settings, name), known)


def of_shares(bench: Bench, found: Row) -> Row:
    """For each of ``SHARES`` the plan: what it and what any schedule takes more, as predicted; None if none fits."""
    gradients = 4 * found["parameters"]
    activations = found["eager"]["peak"] - gradients
    return {name: within(bench, int(gradients + share * activations)) for name, share in SHARES.items()}


def within(bench: Bench, budget: int) -> Row | None:
    """The plan for ``budget`` bytes, and the bound of all schedules."""
    try:
        bench.use(budget)
    except rockmate.InfeasibleBudgetError:
        return None
    plan = bench.attachment.plan if bench.attachment else None
    if plan is None:
        return {"budget": budget, "overhead": 0.0, "bound": 0.0}
    eager = plan.problem.eager_time
    bound = None if plan.lower_bound is None else (plan.lower_bound - eager) / eager
    return {"budget": budget, "overhead": plan.predicted_overhead, "bound": bound}


def of_method(bench: Bench, method: Method) -> Row:
    """Its bytes, FLOPs, results, set-up time, and a first look at the time of its step."""
    start = time.perf_counter()
    step = partial(bench.task.step, method.apply(bench.copied()))
    step()
    first = time.perf_counter() - start
    step()
    pairs = [(bench.seconds(bench.eager)[0], bench.seconds(step)[0]) for _ in range(2)]
    row: Row = {"peer": method.name, "family": method.family, "peak": bench.peak(step)}
    row["set_up_seconds"] = max(0.0, first - bench.seconds(step)[1])
    row["first_look"] = statistics.median(theirs / own for own, theirs in pairs)
    row |= bench.compared(step)
    row["flops"] = method.count(bench.copied(), bench.task.step) if method.count else flops(step)
    return row


def best_of_families(points: list[Row], left_out: list[Row]) -> list[Row]:
    """Of ``checkpoint_sequential``, only the numbers of segments that no other beats in both bytes and FLOPs."""
    kept = []
    for p in points:
        rivals = [o for o in points if o["family"] == p["family"] == "checkpoint_sequential"]
        better = [o for o in rivals if o["peak"] <= p["peak"] and o["flops"] <= p["flops"] and o is not p]
        if any((o["peak"], o["flops"]) != (p["peak"], p["flops"]) for o in better):
            why = f"{better[0]['peer']} takes no more bytes and no more FLOPs"
            left_out.append({"peer": p["peer"], "why": why, "peak": p["peak"], "flops": p["flops"]})
        else:
            kept.append(p)
    return kept


def at_budget(bench: Bench, budget: int) -> Row:
    """Ours within ``budget``: or why there is none."""
    start = time.perf_counter()
    try:
        bench.use(budget)
    except rockmate.InfeasibleBudgetError as error:
        return {"budget": budget, "least": error.min_budget}
    seconds = time.perf_counter() - start - bench.seconds(bench.ours)[1]
    plan = bench.attachment.plan if bench.attachment else None
    row: Row = {"budget": budget, "peak": bench.peak(bench.ours), "plan_seconds": seconds}
    row["predicted"] = plan.predicted_overhead if plan is not None else 0.0
    row |= bench.compared(bench.ours)
    row["flops"] = flops(bench.ours)
    row["within"] = row["peak"] <= budget
    return row


def budgets_in_time(bench: Bench, found: Row) -> list[Row]:
    """For each peer the smallest budget whose predicted time is no more than its own, by the first look at it."""
    assert bench.attachment is not None
    known = [p["ours"]["budget"] for p in found["points"]]
    curve = bench.attachment.frontier()
    rows = []
    for point in found["points"]:
        enough = [b for b, overhead in curve.points if 1 + overhead <= max(AS_FREE, point["first_look"])]
        budget = min(enough, default=curve.max_budget)
        if all(abs(budget - b) > NEAR * found["eager"]["peak"] for b in known):
            known.append(budget)
            rows.append(at_budget(bench, budget))
    return rows


def thinned(points: Sequence[tuple[int, float]], most: int = 60) -> list[tuple[int, float]]:
    """Enough of them for a plot."""
    step = max(1, len(points) // most)
    return [*points[:-1:step], points[-1]]


def said(error: Exception) -> str:
    """What went wrong, and in which file; no paths."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().splitlines()
    return f"{type(error).__name__} in {Path(last.filename).name}: {text[0] if text else ''}"[:300]


# ------------------------------------------------------------------------------------------------------- times


def times(settings: Settings, name: str, peers: Mapping[str, int | None], more: Sequence[int]) -> Row:
    """Interleaved steps. ``peers``: with the budget of ours beside it, None where there is none; ``more``: budgets.

    Returns lists of (processor, clock): for each peer, for ours beside it ("ours: PEER") and at the other budgets
    ("ours: BUDGET") as ratios to the eager step before them, for "eager" in seconds.
    """
    bench = Bench(settings, name)
    random.seed()
    steps = {}
    for method in bench.methods():
        if method.name in peers:
            steps[method.name] = partial(bench.task.step, method.apply(bench.copied()))
    for step in steps.values():
        for _ in range(2):
            step()
    # The largest first: until a step was seen, plans leave more room for the loss.
    for budget in sorted({b for b in peers.values() if b is not None} | set(more), reverse=True):
        bench.use(budget)
    found: dict[str, list[tuple[float, ...]]] = {}

    def timed(key: str, step: Callable[[], Any], base: tuple[float, float]) -> None:
        taken = bench.seconds(step)
        found.setdefault(key, []).append(tuple(t / b for t, b in zip(taken, base, strict=True)))

    for k in range(settings.rounds):
        for peer, budget in [*peers.items(), *((None, b) for b in more)]:
            base = bench.seconds(bench.eager)
            found.setdefault("eager", []).append(base)
            turns = [(peer, None), (None, budget)][:: -1 if k % 2 else 1]
            for who, bytes_ in turns:
                if who is not None:
                    timed(who, steps[who], base)
                elif bytes_ is not None:
                    bench.use(bytes_)
                    timed(f"ours: {peer or bytes_}", bench.ours, base)
    return found
