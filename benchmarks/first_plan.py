"""Seconds until a model has its first plan: in a fresh process, and in the next one, which finds it on disk.

    python benchmarks/first_plan.py [NAME …] [--processes 3] [--short] [--out FILE]

Each run has two fresh processes with one new folder as ``cache=``. Both measure an eager step, the median of three, and
then how long ``Rockmate(model, sample, budget)`` takes, with a budget of 60 % of that step's peak. Prints one line a
model, of medians over the runs. Exit status 1 if a planned step exceeds its budget. GPT-2 needs transformers, 8 GB and
two cores; the convolutional networks need timm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rockmate import Rockmate, measure_peak
from rockmate.demo.compare import MALLOC
from rockmate.demo.gpt import GPT

TESTS = Path(__file__).resolve().parents[1] / "tests"

PERCENT = 60
"""Budget, of the eager step's peak."""

Make = Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class Case:
    """``make``: a model that returns its loss, and its arguments. ``goal``: the first plan's seconds or, if these are
    more, ``steps`` eager steps; ``from_disk``: seconds.
    """

    make: Make
    threads: int = 1
    goal: float = 0.0
    steps: float = 0.0
    from_disk: float | None = None


class WithLoss(nn.Module):
    """A model and its cross entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x).flatten(0, -2), labels.flatten())


def demo(layers: int, width: int, length: int, batch: int) -> Make:
    """The demo's GPT."""

    def make() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        model = WithLoss(GPT(layers, width, length=length))
        x = torch.randint(0, 1024, (batch, length))
        return model, {"x": x, "labels": x}

    return make


def convolutional(name: str) -> Make:
    """timm's network of this name, on two images of 224 × 224."""

    def make() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        imports_can_go_on()
        import timm

        return WithLoss(timm.create_model(name)), {"x": torch.randn(2, 3, 224, 224), "labels": torch.tensor([0, 1])}

    return make


def imports_can_go_on() -> None:
    """Of torchvision, which other libraries import."""
    sys.path.append(str(TESTS / "training"))
    from vision import import_can_go_on

    import_can_go_on()


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 of transformers, 124 million parameters, batch 4 × 512."""
    imports_can_go_on()
    from transformers import GPT2Config, GPT2LMHeadModel

    x = torch.randint(0, 50257, (4, 512))
    return GPT2LMHeadModel(GPT2Config(use_cache=False)), {"input_ids": x, "labels": x}


CASES = {
    "GPT of the demo": Case(demo(12, 256, 256, 8), goal=4.5, from_disk=2.5),
    "GPT-2": Case(gpt2, 2, steps=1.5),
    **{name: Case(convolutional(name), goal=8.0, steps=10) for name in ("coat_tiny", "nfnet_l0", "hrnet_w18_small")},
}
SHORT = {"small GPT": Case(demo(4, 64, 64, 4))}


def run(case: Case, folder: str) -> dict[str, Any]:
    """One process."""
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    model, sample = case.make()

    def step(m: nn.Module) -> None:
        m.zero_grad(set_to_none=True)
        result = m(**sample)
        loss = result if isinstance(result, torch.Tensor) else result.loss
        del result  # with the scores
        loss.backward()

    times = []
    for _ in range(4):
        start = time.perf_counter()
        step(model)
        times.append(time.perf_counter() - start)
    budget = measure_peak(lambda: step(model), "cpu") * PERCENT // 100
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    rk = Rockmate(model, sample, budget, cache=folder)
    seconds = time.perf_counter() - start
    peaks = [measure_peak(lambda: step(rk), "cpu") for _ in range(2)]
    phases = {name: round(value, 2) for name, value in rk.plan.setup_seconds.items()}
    return {
        "eager": statistics.median(times[1:]),
        "setup": seconds,
        "phases": phases,
        "peak": max(peaks),
        "budget": budget,
    }


def in_a_process(name: str, folder: str, short: bool, threads: int) -> dict[str, Any]:
    """``run`` in a fresh process."""
    command = [sys.executable, __file__, name, "--one", folder, *["--short"] * short]
    environment = os.environ | MALLOC | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(name: str, case: Case, processes: int, short: bool) -> dict[str, Any]:
    """All runs of one model."""
    first, second = [], []
    for _ in range(processes):
        with tempfile.TemporaryDirectory() as folder:
            first.append(in_a_process(name, folder, short, case.threads))
            second.append(in_a_process(name, folder, short, case.threads))
    eager = statistics.median(x["eager"] for x in first + second)
    return {
        "name": name,
        "threads": case.threads,
        "eager": round(eager, 2),
        "first": round(statistics.median(x["setup"] for x in first), 2),
        "second": round(statistics.median(x["setup"] for x in second), 2),
        "goal": round(max(case.goal, case.steps * eager), 2),
        "goal_from_disk": case.from_disk,
        "phases": {k: [x["phases"].get(k, 0) for x in first] for k in first[0]["phases"]},
        "peak": max(x["peak"] for x in first + second),
        "budget": min(x["budget"] for x in first + second),
    }


def main(argv: list[str] | None = None) -> int:
    """Print one row a model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="models; all by default")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="a toy model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    cases = SHORT if options.short else CASES
    if options.one:
        print(json.dumps(run(cases[options.names[0]], options.one)))
        return 0
    if unknown := [name for name in options.names if name not in cases]:
        parser.error(f"no model is called {unknown[0]!r}: give some of these: {'; '.join(cases)}")
    print("model            threads  eager step  first plan  from disk  goals           of budget  phases")
    rows = []
    for name in options.names or cases:
        row = measured(name, cases[name], options.processes, options.short)
        rows.append(row)
        phases = ", ".join(f"{k} {statistics.median(v):.1f}" for k, v in row["phases"].items())
        goals = "  ".join(f"{row[k] or 0:>4.1f} s" for k in ("goal", "goal_from_disk"))
        print(
            f"{name:<16} {row['threads']:>7}  {row['eager']:>8.2f} s  {row['first']:>8.2f} s  {row['second']:>7.2f} s"
            f"  {goals}  {100 * row['peak'] / row['budget']:>12.1f} %  {phases}",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["peak"] <= row["budget"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
