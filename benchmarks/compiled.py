"""Whether a plan with compiled pieces is as quick as one without: steps of eager mode, of both plans, in turns.

    OMP_NUM_THREADS=1 python benchmarks/compiled.py [NAME …] [--percent 60] [--rounds 12] [--out FILE] [--short]

NAMEs are those of ``peers_run/models.py``; all by default. The budget is a percentage of eager mode's peak. Times are
medians of the processor's, as multiples of eager mode's. Exit status 1 if a step exceeds the budget. Needs a compiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # so that a test can load this file from elsewhere

from peers_run.models import MODELS

from rockmate import InfeasibleBudgetError, Rockmate, measure_peak

HOST = torch.device("cpu")


def measured(name: str, percent: float, rounds: int, scale: str) -> dict[str, Any]:
    """One model; with ``refused`` where no plan fits."""
    task = MODELS[name].task(scale, HOST)
    budget = int(measure_peak(lambda: task.step(task.model), HOST) * percent / 100)
    calls: dict[str, Any] = {"eager": task.model}
    for key, compile_ in (("plan", False), ("compiled", True)):
        task.model.zero_grad(set_to_none=True)
        sample: Any = task.args or dict(task.kwargs)
        beside = dict(task.kwargs) if task.args and task.kwargs else None
        try:
            calls[key] = Rockmate(
                task.model, sample, budget, sample_kwargs=beside, compile=compile_, cache=False, progress=False
            )
        except InfeasibleBudgetError as error:
            return {"name": name, "refused": str(error).split(":", 1)[0]}
    times: dict[str, list[float]] = {key: [] for key in calls}
    for _ in range(rounds + 2):
        for key, call in calls.items():
            start = time.process_time()
            task.step(call)
            times[key].append(time.process_time() - start)
    seconds = {key: statistics.median(found[2:]) for key, found in times.items()}
    peaks = [measure_peak(partial(task.step, calls[key]), HOST) for key in ("plan", "compiled")]
    return {
        "name": name,
        "eager": seconds["eager"],
        "plan": seconds["plan"] / seconds["eager"],
        "compiled": seconds["compiled"] / seconds["eager"],
        "pieces": calls["compiled"].plan.pieces,
        "fits": max(peaks) <= budget,
    }


def main(argv: list[str] | None = None) -> int:
    """Print one line a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models; all by default")
    parser.add_argument("--percent", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--short", action="store_true", help="a tiny GPT, two rounds")
    options = parser.parse_args(argv)
    names = ["GPT"] if options.short else options.names or list(MODELS)
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"no model is called {unknown[0]!r}: give some of these: {'; '.join(MODELS)}")
    torch.set_num_threads(1)
    rows = []
    for name in names:
        row = measured(
            name, options.percent, 2 if options.short else options.rounds, "tiny" if options.short else "cpu"
        )
        rows.append(row)
        said = row.get("refused") or (
            f"eager {row['eager']:.3f} s, plan {row['plan']:.3f}, compiled {row['compiled']:.3f}; "
            f"pieces {row['pieces']}"
        )
        print(f"{name:<24} {said}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row.get("fits", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
