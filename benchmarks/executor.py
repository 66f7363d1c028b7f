"""What the executor itself costs: CPU time of whole steps, of each node that runs again, and in Python alone.

First (``Launch``) a model of tiny kernels, where all is launches: eager mode, torch.utils.checkpoint on every block,
plans that keep everything and that run everything again, and attached models under which nothing runs again, each step
the least of many, taken in turns. A node that runs again costs what the backward takes beyond that of the plan that
keeps everything; of this, torch's own dispatch is what the same operations take when they are called one after the
other, with gradients recorded as in the plan.

Then the CPU time in the Python of rockmate and rkgb, for each step of schedules. Measured by cProfile, which counts its
own work in, so figures are upper bounds. Kernels do not count, and calls of our functions must not depend on the batch
size. Their time does as far as kernels on more data leave less of Python in the processor's caches: to tell that from
work of ours, the Python of ``torch.nn`` in eager mode's steps is measured too.
Schedules are made for the first batch size and run for all.

python benchmarks/executor.py [--repeat 100] [--layers 12] [--batches 2 8 32] [--memory 100 50 10] [--steps 5]
    [--autocast] [--out FILE] [--short]

``--autocast``: forwards, and the operations alone, run under autocast with bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import dataclasses
import gc
import json
import pstats
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import rkgb
import rockmate
from rkgb.graphs import substitute
from rkgb.program import source_values
from rockmate import Rockmate
from rockmate.calls.runnable import Runnable, program_of
from rockmate.demo.gpt import GPT
from rockmate.run.executor import CallState
from rockmate.run.program import Program
from solvers import Schedule, all_baselines, parse_schedule, walk
from solvers.schedule import Run

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


@dataclass(frozen=True)
class Step:
    """CPU milliseconds of a step's phases; ``what`` runs it. ``forward_to_eager``: the ratio of the forwards, which is
    to be at most 1.15 for attached models.
    """

    what: str
    forward_ms: float
    backward_ms: float
    forward_to_eager: float


@dataclass(frozen=True)
class Launch:
    """``us_per_rerun``: of CPU, for each of the ``reruns``; ``us_of_torch``: of these, the operations alone."""

    steps: tuple[Step, ...]
    reruns: int
    us_per_rerun: float
    us_of_torch: float
    us_beyond: float


class Checkpointed(torch.nn.Module):
    """A block under torch.utils.checkpoint."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def launch(layers: int, repeat: int, autocast: bool) -> Launch:
    """Steps on a model of tiny kernels, in turns, ``repeat`` times."""

    def cast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=autocast)

    torch.manual_seed(0)
    model = GPT(layers, 32, 4, 16, 256)
    checkpointed = copy.deepcopy(model)
    checkpointed.layers = torch.nn.ModuleList(Checkpointed(block) for block in checkpointed.layers)
    ids = torch.randint(256, (1, 16))
    spacious, kept = copy.deepcopy(model), copy.deepcopy(model)
    rockmate.attach(spacious, "1 TiB", costs="flops", cache=False)
    rockmate.attach(kept, "100%", costs="flops", cache=False)
    with cast():
        rk = planned(model, ids, 100, None)
    assert rk._last is not None
    keeping = rk._last
    everything = scheduled(keeping, all_baselines(rk.plan.problem)["recompute all"])
    with cast():
        calls = operations_again(everything.program, model, ids)
    sources = everything.program.s.d.sources

    def ours(runnable: Runnable) -> torch.Tensor:
        use(rk, runnable)
        logits: torch.Tensor = rk(ids)
        return logits

    forwards: dict[str, Callable[[], torch.Tensor]] = {
        "eager": lambda: model(ids),
        "checkpoint on every block": lambda: checkpointed(ids),
        "ours, all kept": lambda: ours(keeping),
        "ours, all run again": lambda: ours(everything),
        "the same, executor alone": lambda: CallState(
            everything.program, source_values(sources, model, [ids])
        ).forward()[0],
        "attached, budget does not bind": lambda: spacious(ids),
        "attached, planned, nothing runs again": lambda: kept(ids),
    }
    taken: dict[str, list[tuple[float, float]]] = {what: [] for what in forwards}
    bare = []
    gc.collect()
    for k in range(3 + repeat):
        for what, forward in forwards.items():
            times = timed(forward, cast, (model, checkpointed, spacious, kept), ids)
            if k >= 3:  # the first steps learn and allocate
                taken[what].append(times)
        with cast():
            start = time.thread_time()
            results = [function(*args, **kwargs) for function, args, kwargs in calls]
            bare.append(time.thread_time() - start)
        del results
    least = {what: [1e3 * min(phase) for phase in zip(*times, strict=True)] for what, times in taken.items()}
    steps = [
        Step(what, round(forward, 2), round(backward, 2), round(forward / least["eager"][0], 2))
        for what, (forward, backward) in least.items()
    ]
    reruns = everything.plan.recomputed
    backward = {what: min(phase for _, phase in times) for what, times in taken.items()}
    whole = 1e6 * (backward["ours, all run again"] - backward["ours, all kept"]) / reruns
    alone = 1e6 * min(bare) / reruns
    return Launch(tuple(steps), reruns, round(whole, 1), round(alone, 1), round(whole - alone, 1))


def timed(
    forward: Callable[[], torch.Tensor],
    cast: Callable[[], torch.autocast],
    models: tuple[torch.nn.Module, ...],
    ids: torch.Tensor,
) -> tuple[float, float]:
    """CPU seconds of a forward, under ``cast``, and of its backward."""
    for model in models:
        model.zero_grad(set_to_none=False)
    start = time.thread_time()
    with cast():
        logits = forward()
    middle = time.thread_time()
    loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
    begun = time.thread_time()
    loss.backward()
    return middle - start, time.thread_time() - begun


def operations_again(
    program: Program, model: GPT, ids: torch.Tensor
) -> list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """The operations that ``program`` runs again, with the arguments that they get in a step."""
    again = {step.node for steps in program.before for step in steps if isinstance(step, Run)}
    values = source_values(program.s.d.sources, model, [ids])
    calls = []
    for i, node in enumerate(program.nodes):
        for op in node.first.ops:
            args = substitute(op.args, values.__getitem__)
            kwargs = {name: substitute(a, values.__getitem__) for name, a in op.kwargs.items()}
            result = op.function(*args, **kwargs)
            for v, t in zip(op.outputs, result if op.several else (result,), strict=False):
                values[v] = t.detach().requires_grad_(program.s.d.values[v].requires_grad)
            if i in again:
                calls.append((op.function, args, kwargs))
    return calls


def use(rk: Rockmate, runnable: Runnable) -> None:
    """Run ``runnable`` from now on."""
    assert rk._last is not None
    calls = rk._front.last
    assert calls is not None
    calls.cache.replace(rk._last, runnable)
    calls.last = runnable


def scheduled(runnable: Runnable, schedule: Schedule) -> Runnable:
    """The runnable with another schedule."""
    plan = dataclasses.replace(runnable.plan, schedule=schedule)
    return dataclasses.replace(runnable, plan=plan, program=program_of(plan))


def planned(model: GPT, ids: torch.Tensor, memory: int, program: str | None) -> Rockmate:
    """The model under a budget, or running a given schedule."""
    rk = Rockmate(model, ids, "1 TiB", costs="flops", cache=False)
    if program is None and memory < 100:
        peaks = [walk(rk.plan.problem, schedule).peak for schedule in all_baselines(rk.plan.problem).values()]
        rk.budget = min(peaks) + (max(peaks) - min(peaks)) * memory // 100 + 64
    elif program is not None:
        assert rk._last is not None
        use(rk, scheduled(rk._last, parse_schedule(rk.plan.problem, program)))
    assert rk._last is not None
    use(rk, dataclasses.replace(rk._last, observer=None))  # the schedule stays, whatever the loss takes
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


def main(argv: list[str] | None = None) -> tuple[Launch, list[Row]]:
    """Print the steps, and one row for each schedule and batch size; write them as JSON with ``--out``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--memory", type=int, nargs="+", default=[100, 50, 10])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--autocast", action="store_true", help="forwards run under autocast with bfloat16")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--short", action="store_true", help="two layers, two batch sizes, two budgets")
    options = parser.parse_args(argv)
    if options.short:
        options.layers, options.width, options.length = 2, 32, 16
        options.batches, options.memory, options.steps, options.repeat = [4, 8], [100, 30], 2, 3
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    launched = launch(options.layers, options.repeat, options.autocast)
    torch.set_num_threads(threads)
    print("step                                      forward   backward      whole  forward to eager's")
    for step in launched.steps:
        whole = step.forward_ms + step.backward_ms
        print(
            f"{step.what:<39}{step.forward_ms:>7.2f} ms {step.backward_ms:>7.2f} ms {whole:>7.2f} ms"
            f"{step.forward_to_eager:>20.2f}"
        )
    print(
        f"{launched.reruns} nodes run again, each for {launched.us_per_rerun} us: {launched.us_of_torch} us of torch's "
        f"own and {launched.us_beyond} us beyond\n"
    )
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
        found = {"launch": asdict(launched), "python": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return launched, rows


if __name__ == "__main__":
    main()
