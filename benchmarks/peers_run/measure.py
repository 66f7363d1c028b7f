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
from peers_run.points import SHARES, SIDES
from rkgb.device import kind_of

Row = dict[str, Any]
AS_FREE = 1.005
"""A frontier's point that is predicted to take less than this much of a step's time is as good as no recomputation."""

NEAR = 0.04
"""Of eager mode's peak: budgets that differ by less are not timed both."""

CANCELLED = 1e-3
"""Of the largest gradient of a model: one whose numbers are all smaller is what rounding leaves, as of a key's bias."""


@dataclass(frozen=True)
class Settings:
    """``budgets``: of those of ``activation_memory_budget``, what is compiled with ``backend``. ``cache``: a folder.

    ``only``: how names of methods begin; all if there are none.
    """

    scale: str
    device: torch.device
    backend: str
    budgets: Sequence[float]
    cache: Path
    rounds: int
    only: Sequence[str] = ()


@dataclass
class Ours:
    """A copy of the model, attached once; its budget is set before each step. ``compile``: with compiled pieces."""

    bench: Bench
    compile: bool
    attachment: rockmate.Attachment | None = None
    set_up: float | None = None

    def __post_init__(self) -> None:
        self.model = self.bench.copied()

    def step(self) -> tuple[Any, torch.Tensor]:
        return self.bench.task.step(self.model)

    def use(self, budget: int) -> None:
        """Plan for ``budget``, and run a step. Raises ``InfeasibleBudgetError`` and ``PieceError``.

        The first step under a plan makes its program; after two, what the loss takes is known.
        """
        start = time.perf_counter()
        if self.attachment is None:
            options: Row = {"cache": self.bench.settings.cache, "progress": False, "compile": self.compile}
            self.attachment = rockmate.attach(self.model, budget, **options)
        elif self.attachment.budget != budget:
            self.attachment.budget = budget
        self.step()
        if self.set_up is None:
            self.step()
            self.set_up = time.perf_counter() - start - 2 * self.bench.seconds(self.bench.eager)[1]


@dataclass
class Bench:
    """A model, its step in eager mode, and ours: with eager kernels, and with compiled pieces."""

    settings: Settings
    name: str
    task: Task = field(init=False)

    def __post_init__(self) -> None:
        torch._dynamo.config.recompile_limit = 256  # all methods share the code of the model's classes
        self.entry = MODELS[self.name]
        self.task = self.entry.task(self.settings.scale, self.settings.device)
        for _ in range(2):
            self.eager()
        self.sides = {side: Ours(self, compiled) for side, compiled in SIDES.items()}
        self.ours = self.sides["ours"]

    def copied(self) -> torch.nn.Module:
        """The same parameters and buffers, in modules that a method can change: where tensors lie costs time."""
        model = self.task.model
        memo = {id(t): t for t in (*model.parameters(), *model.buffers())}
        return copy.deepcopy(model, memo)

    def eager(self) -> tuple[Any, torch.Tensor]:
        return self.task.step(self.task.model)

    def methods(self) -> list[Method]:
        found = methods(self.entry, self.task, self.settings.backend, self.settings.budgets)
        return [m for m in found if not self.settings.only or m.name.startswith(tuple(self.settings.only))]

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
        floor = CANCELLED * max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
        worst = max(difference(ours[name], theirs[name], floor) for name in ours)
        return {
            "equal": all(same(ours[name], theirs[name]) for name in ours),
            "buffers_equal": all(map(same, own, other)),
            "largest_difference": worst,
        }


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def difference(a: torch.Tensor | None, b: torch.Tensor | None, floor: float) -> float:
    """Relative to the largest value of ``a``, or to ``floor``; infinite where one has no gradient."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return float((a - b).abs().max() / a.abs().max().clamp_min(floor))


# ------------------------------------------------------------------------------------------------ bytes and FLOPs


def bytes_and_flops(settings: Settings, name: str, alone: bool = True) -> Row:
    """Every method once, and ours at its peak; beside what compiles, ours compiled too. Unless that is to be added to
    what is known: budgets at which ours should take no more time than each, the frontier and ``of_shares``.
    """
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
        for side, ours in bench.sides.items():
            if point["family"].startswith("compile") or not ours.compile:
                point[side] = at_budget(ours, point["peak"])
    found["our_set_up_seconds"], found["ours_in_time"] = bench.ours.set_up, []
    if alone and bench.ours.attachment and bench.ours.set_up:
        found["ours_in_time"] = budgets_in_time(bench.ours, found)
        curve = bench.ours.attachment.frontier()
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
        bench.ours.use(budget)
    except rockmate.InfeasibleBudgetError:
        return None
    plan = bench.ours.attachment.plan if bench.ours.attachment else None
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


def at_budget(ours: Ours, budget: int) -> Row:
    """Ours within ``budget``: or why there is none."""
    bench, start = ours.bench, time.perf_counter()
    try:
        ours.use(budget)
    except rockmate.InfeasibleBudgetError as error:
        return {"budget": budget, "least": error.min_budget}
    except rockmate.PieceError as error:
        return {"budget": budget, "why": said(error)}
    seconds = time.perf_counter() - start - bench.seconds(ours.step)[1]
    plan = ours.attachment.plan if ours.attachment else None
    row: Row = {"budget": budget, "peak": bench.peak(ours.step), "plan_seconds": seconds}
    row["predicted"] = plan.predicted_overhead if plan is not None else 0.0
    row |= bench.compared(ours.step) | ({"pieces": plan and plan.pieces.partition("\n")[0]} if ours.compile else {})
    row["flops"] = flops(ours.step)
    row["within"] = row["peak"] <= budget
    return row


def budgets_in_time(ours: Ours, found: Row) -> list[Row]:
    """For each peer the smallest budget whose predicted time is no more than its own, by the first look at it."""
    assert ours.attachment is not None
    known = [p["ours"]["budget"] for p in found["points"]]
    curve = ours.attachment.frontier()
    rows = []
    for point in found["points"]:
        enough = [b for b, overhead in curve.points if 1 + overhead <= max(AS_FREE, point["first_look"])]
        budget = min(enough, default=curve.max_budget)
        if all(abs(budget - b) > NEAR * found["eager"]["peak"] for b in known):
            known.append(budget)
            rows.append(at_budget(ours, budget))
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


def times(settings: Settings, name: str, peers: Mapping[str, Mapping[str, int]], more: Sequence[int]) -> Row:
    """Interleaved steps. ``peers``: with the budgets of ours beside it, by ``SIDES``; ``more``: budgets.

    Returns lists of (processor, clock): for each peer, for ours beside it ("ours: PEER", "ours compiled: PEER") and at
    the other budgets ("ours: BUDGET") as ratios to the eager step before them, for "eager" in seconds.
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
    rows = [*peers.items(), *((None, {"ours": b}) for b in more)]
    # The largest first: until a step was seen, plans leave more room for the loss.
    for side, budget in sorted({pair for _, beside in rows for pair in beside.items()}, key=lambda p: -p[1]):
        bench.sides[side].use(budget)
    found: dict[str, list[tuple[float, ...]]] = {}

    def timed(key: str, step: Callable[[], Any], base: tuple[float, float]) -> None:
        taken = bench.seconds(step)
        found.setdefault(key, []).append(tuple(t / b for t, b in zip(taken, base, strict=True)))

    for k in range(settings.rounds):
        for peer, budgets in rows:
            base = bench.seconds(bench.eager)
            found.setdefault("eager", []).append(base)
            for who in [*([peer] if peer else []), *budgets][:: -1 if k % 2 else 1]:
                if who == peer:
                    timed(who, steps[who], base)
                else:
                    bench.sides[who].use(budgets[who])
                    timed(f"{who}: {peer or budgets[who]}", bench.sides[who].step, base)
    return found
