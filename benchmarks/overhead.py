"""What a step under each budget takes longer than the model's own, over several processes: the demo's model, or, with
``--model``, some or all of those that are compared with peers (``peers_run/models.py``). ``--compile``: of plans with
compiled pieces as well, beside those of eager kernels; that needs a compiler. ``--channels-last``: the planned model
and its images are in that memory format, and eager mode's, to which they are compared, are not.

The same kernel takes up to a quarter longer in one step than in another by where its memory happens to lie, and two
steps that allocate alike find the same places for as long as a process lives. So every step is given a memory laid out
anew, at random (as Stabilizer does: Curtsinger and Berger, ASPLOS 2013), steps are compared in interleaved pairs, and
parameters change their places with the process. On one thread the processor's time is taken, which a virtual machine
that waits for its host does not spend; on several, the clock's.

python benchmarks/overhead.py [--model NAME … | --model all] [--compile] [--channels-last] [--processes 4] [--pairs 25]
    [--budgets 100 80 60 40] [--threads 1] [--out FILE] [--short]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from rockmate import InfeasibleBudgetError, Rockmate, measure_peak
from rockmate.demo.compare import MALLOC
from rockmate.demo.gpt import GPT

sys.path.insert(0, str(Path(__file__).parent))  # so that a test can load this file from elsewhere

from peers_run.models import MODELS, Task


@dataclass(frozen=True)
class Row:
    """``percent`` of eager's peak. Overheads as fractions: ``predicted``, the median over the processes; ``measured``,
    the geometric mean over all pairs; ``each``: that of each process. ``standard_error``: over the processes, which
    differ by more than the pairs of one do. ``compiled``: measured, with compiled pieces.
    """

    model: str
    percent: float
    predicted: float
    measured: float
    standard_error: float
    each: tuple[float, ...]
    peak_within_budget: bool
    compiled: float | None = None
    pieces: str = ""


def laid_out_anew() -> list[torch.Tensor]:
    """Blocks that lie in the way of what is allocated while they are held, with holes between them."""
    blocks = [torch.empty(random.randrange(1, 2 << 20)) for _ in range(60)]
    return random.sample(blocks, 30)


def task_of(options: argparse.Namespace) -> Task:
    """The model, its arguments and the loss."""
    if options.model:
        return MODELS[options.model[0]].task("tiny" if options.short else "cpu", torch.device("cpu"))
    torch.manual_seed(0)
    model = GPT(options.layers, options.width, 4, options.length, options.vocabulary)
    x, y = torch.randint(options.vocabulary, (2, options.batch, options.length))
    return Task(model, (x,), lambda output: F.cross_entropy(output.flatten(0, 1), y.flatten()))


def in_channels_last(task: Task) -> Task:
    """The same with a copy of the model, and images, in that memory format."""
    last = {"memory_format": torch.channels_last}
    args = tuple(x.to(**last) if isinstance(x, torch.Tensor) and x.dim() == 4 else x for x in task.args)
    return replace(task, model=copy.deepcopy(task.model).to(**last), args=args)


def in_one_process(options: argparse.Namespace) -> dict[float, tuple[float, list[list[float]], bool, str]]:
    """For each budget: predicted overhead, logarithms of the ratios in each pair (of eager kernels, then of compiled
    pieces), whether all peaks were within it, and how many pieces there are.

    Budgets that no plan fits are said, and left out.
    """
    torch.set_num_threads(options.threads)
    task = task_of(options)
    model, planned = task.model, in_channels_last(task) if options.channels_last else task
    for p in [*model.parameters(), *planned.model.parameters()]:
        p.grad = torch.zeros_like(p)

    def step(module: torch.nn.Module) -> None:
        module.zero_grad(set_to_none=False)
        given = task if module is model else planned
        given.loss(module(*given.args, **given.kwargs)).backward()

    clock = time.process_time if options.threads == 1 else time.perf_counter

    def seconds(module: torch.nn.Module) -> float:
        held = laid_out_anew()
        start = clock()
        step(module)
        end = clock()
        del held
        return end - start

    step(model)
    peak = measure_peak(partial(step, model))
    found = {}
    for percent in options.budgets:
        budget, compiled = int(peak * percent / 100), (False, True) if options.compile else (False,)
        how: dict[str, Any] = {"sample_kwargs": dict(task.kwargs), "cache": False}
        try:
            ours = [Rockmate(planned.model, planned.args, budget, compile=c, **how) for c in compiled]
        except InfeasibleBudgetError as error:
            print(f"{percent:.0f} %: {error}", file=sys.stderr, flush=True)
            continue
        for rk in ours:
            step(rk)  # which may plan anew, by what the loss was seen to take
        within = all(measure_peak(partial(step, rk)) <= budget for rk in ours)
        pairs: list[list[float]] = [[] for _ in ours]
        for k in range(options.pairs):
            taken = {call: seconds(call) for call in [model, *ours][:: -1 if k % 2 else 1]}
            for logs, rk in zip(pairs, ours, strict=True):
                logs.append(math.log(taken[rk] / taken[model]))
        found[percent] = ours[0].plan.predicted_overhead, pairs, within, ours[-1].plan.pieces.partition("\n")[0]
    return found


def rows(options: argparse.Namespace, model: str) -> list[Row]:
    """Run the processes, one after the other. A row for each budget that a plan fits in all of them."""
    command = [sys.executable, __file__, *options.argv, "--child", *(("--model", model) if model else ())]
    found = []
    for k in range(options.processes):
        done = subprocess.run(command, env=os.environ | MALLOC, stdout=subprocess.PIPE, check=True, text=True)
        found.append({float(percent): values for percent, values in json.loads(done.stdout).items()})
        print(f"process {k + 1} of {options.processes} is done", file=sys.stderr, flush=True)
    made = []
    for percent in options.budgets:
        if not all(percent in run for run in found):
            continue
        predicted, pairs, within, pieces = zip(*(run[percent] for run in found), strict=True)
        sides = [[statistics.mean(logs) for logs in side] for side in zip(*pairs, strict=True)]
        error = statistics.stdev(sides[0]) / len(found) ** 0.5
        measured, *compiled = (math.expm1(statistics.mean(means)) for means in sides)
        each, also = tuple(map(math.expm1, sides[0])), (*compiled, *pieces[:1]) if compiled else ()
        made.append(Row(model, percent, statistics.median(predicted), measured, error, each, all(within), *also))
    return made


def said(row: Row) -> str:
    """A line of the table."""
    each = " ".join(f"{100 * m:+.1f}" for m in row.each)
    compiled = "" if row.compiled is None else f"  compiled {100 * row.compiled:+.1f} %, pieces {row.pieces}"
    return (
        f"{row.percent:>4.0f} %  {100 * row.predicted:>+7.1f} %  {100 * row.measured:>+6.1f} %  "
        f"{100 * row.standard_error:>12.1f} %  ({each})  {row.model}{compiled}"
    )


def main(argv: list[str] | None = None) -> list[Row]:
    """Print one row for each budget; write them as JSON with ``--out``."""
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 12), ("width", 256), ("length", 256), ("batch", 8), ("vocabulary", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--model",
        nargs="+",
        choices=["all", *MODELS],
        default=[],
        help="instead of the demo's, whose sizes the arguments above are",
    )
    parser.add_argument("--compile", action="store_true", help="plans with compiled pieces too")
    parser.add_argument("--channels-last", action="store_true", help="the memory format of the planned model")
    parser.add_argument("--processes", type=int, default=4, help="two or more")
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budgets", type=float, nargs="+", default=[100, 80, 60, 40, 25, 20], help="percent")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--short", action="store_true", help="a small model, two processes, two budgets")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.argv = sys.argv[1:] if argv is None else argv
    if options.processes < 2:
        parser.error("--processes must be two or more: the standard error is that over processes")
    if options.short:
        options.layers, options.width, options.length, options.vocabulary = 2, 32, 64, 64
        options.processes, options.pairs, options.budgets = 2, 1, [100, 70]
    if options.child:
        print(json.dumps(in_one_process(options)))
        return []
    made = []
    print("budget  predicted  measured  standard error  (each process)")
    for model in MODELS if "all" in options.model else options.model or [""]:
        for row in rows(options, model):
            made.append(row)
            print(said(row), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps([asdict(row) for row in made], indent=1) + "\n")
    return made


if __name__ == "__main__":
    main()
