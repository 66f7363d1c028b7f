"""What the executor itself costs: CPU time in the Python of rockmate and rkgb, for each step of the schedule.

Measured by cProfile, which counts its own work in, so figures are upper bounds. Kernels do not count, and calls of our
functions must not depend on the batch size. Their time does as far as kernels on more data leave less of Python in the
processor's caches: to tell that from work of ours, the Python of ``torch.nn`` in eager mode's steps is measured too.
Schedules are made for the first batch size and run for all.

python benchmarks/executor.py [--layers 12] [--batches 2 8 32] [--memory 100 50 10] [--steps 5] [--out FILE] [--short]
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import json
import pstats
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

# A program in this folder has the name of a package: leave the folder to scripts.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import rkgb  # noqa: E402
import rockmate  # noqa: E402
from rockmate import Rockmate  # noqa: E402
from rockmate.gpt import GPT  # noqa: E402
from rockmate.variants import program_of  # noqa: E402
from solvers import all_baselines, parse_schedule, walk  # noqa: E402

_OURS = tuple(str(Path(package.__file__ or "").parent) for package in (rkgb, rockmate))
_EAGER = (str(Path(torch.nn.__file__ or "").parent),)


@dataclass(frozen=True)
class Row:
    """``memory``: percent of the way from the cheapest checkpoints to no recomputation. ``calls``: of our functions.

    ``eager_ms``: in the Python of ``torch.nn``, in an eager step on the same batch, whose calls are ``eager_calls``.
    """

    memory: int
    batch: int
    schedule_steps: int
    run_again: int
    calls: int
    python_ms: float
    us_per_schedule_step: float
    eager_calls: int
    eager_ms: float


def planned(model: GPT, ids: torch.Tensor, memory: int, program: str | None) -> Rockmate:
    """The model under a budget, or running a given schedule."""
    rk = Rockmate(model, ids, "1 TiB", costs="flops")
    if program is None and memory < 100:
        peaks = [walk(rk.plan.problem, schedule).peak for schedule in all_baselines(rk.plan.problem).values()]
        rk.budget = min(peaks) + (max(peaks) - min(peaks)) * memory // 100 + 64
    elif program is not None:
        last = rk._last
        assert last is not None
        plan = dataclasses.replace(last.plan, schedule=parse_schedule(last.plan.problem, program))
        variant = dataclasses.replace(last, plan=plan, program=program_of(plan))
        rk._front.last.cache.replace(last, variant)
        rk._front.last.last = variant
    assert rk._last is not None
    fixed = dataclasses.replace(rk._last, observer=None)  # the schedule stays, whatever the loss takes
    rk._front.last.cache.replace(rk._last, fixed)
    rk._front.last.last = fixed
    return rk


def python_of(module: torch.nn.Module, ids: torch.Tensor, steps: int, files: tuple[str, ...]) -> tuple[int, float]:
    """Calls of functions of ``files`` in a training step, and the milliseconds of processor time in them alone."""

    def step() -> None:
        module.zero_grad()
        F.cross_entropy(module(ids).flatten(0, 1), ids.flatten()).backward()

    step()
    profile = cProfile.Profile(time.thread_time)
    profile.enable()
    for _ in range(steps):
        step()
    profile.disable()
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    found = [row for (file, _, _), row in stats.items() if file.startswith(files) and not file.endswith("gpt.py")]
    return sum(calls for _, calls, _, _, _ in found) // steps, 1e3 * sum(own for _, _, own, _, _ in found) / steps


def measure(rk: Rockmate, ids: torch.Tensor, memory: int, steps: int) -> Row:
    """Profile ``steps`` training steps, and as many of the original."""
    calls, ours = python_of(rk, ids, steps, _OURS)
    eager_calls, eager = python_of(rk.original, ids, steps, _EAGER)
    count = len(rk.plan.schedule)
    each = round(1e3 * ours / count, 1)
    again = rk.plan.recomputed
    return Row(memory, len(ids), count, again, calls, round(ours, 2), each, eager_calls, round(eager, 2))


def main(argv: list[str] | None = None) -> list[Row]:
    """Print one row for each schedule and batch size; write them as JSON with ``--out``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--memory", type=int, nargs="+", default=[100, 50, 10])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--short", action="store_true", help="two layers, two batch sizes, two budgets")
    options = parser.parse_args(argv)
    if options.short:
        options.layers, options.width, options.length = 2, 32, 16
        options.batches, options.memory, options.steps = [4, 8], [100, 30], 2
    rows = []
    print(
        "memory  batch  schedule steps  run again  our calls  our Python  per schedule step  eager calls  eager Python"
    )
    for memory in options.memory:
        program = None
        for batch in options.batches:
            torch.manual_seed(0)
            model = GPT(options.layers, options.width, 4, options.length, 256)
            ids = torch.randint(256, (batch, options.length))
            rk = planned(model, ids, memory, program)
            program = rk.plan.program()
            row = measure(rk, ids, memory, options.steps)
            rows.append(row)
            print(
                f"{row.memory:>4} %  {row.batch:>5}  {row.schedule_steps:>14}  {row.run_again:>9}  {row.calls:>9}  "
                f"{row.python_ms:>7.2f} ms  {row.us_per_schedule_step:>14.1f} us  "
                f"{row.eager_calls:>11}  {row.eager_ms:>9.2f} ms",
                flush=True,
            )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
