"""The main job: train a GPT-2-like model on real text as it is, and under budgets, and compare.

    python -m rockmate.demo [--layers 12] [--budgets 80 60 40 25] [--steps 3] [--device cpu]

Prints one table and writes the frontier plot (time against memory).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from rkgb.device import default_device, kind_of
from rkgb.randomness import random_states
from rockmate import InfeasibleBudgetError, Rockmate, measure_peak, measure_step
from rockmate.budget import show_bytes
from rockmate.demo.gpt import GPT
from rockmate.demo.text import batches, load_tokens
from rockmate.planning.plan import Plan

# glibc gives large blocks back to the system and faults them in again; this would be most of what a step's
# time shows, for every method alike.
MALLOC = {"MALLOC_TRIM_THRESHOLD_": "20000000000", "MALLOC_MMAP_MAX_": "0", "MALLOC_TOP_PAD_": "67108864"}

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets."""


def main(argv: list[str] | None = None) -> int:
    """Run the demo; the exit status is 1 if a budget was exceeded or a result differs from eager's."""
    options = _parser().parse_args(argv)
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = GPT(options.layers, options.width, options.heads, options.length, options.vocabulary).to(device)
    generator = torch.Generator().manual_seed(0)
    tokens = load_tokens(options.vocabulary)
    data = [
        (x.to(device), y.to(device))
        for x, y in batches(tokens, options.batch, options.length, options.steps, generator)
    ]
    eager = copy.deepcopy(model)
    if options.grads_allocated:
        for p in (*model.parameters(), *eager.parameters()):
            p.grad = torch.zeros_like(p)
    step = partial(_step, keep_grads=options.grads_allocated)
    step(eager, data[0])
    eager_peak = measure_peak(lambda: step(eager, data[0]), device)
    print(f"GPT with {sum(p.numel() for p in model.parameters()):,} parameters; eager peak {show_bytes(eager_peak)}")
    print(_ROW.format("budget", "of eager", "predicted", "measured", "overhead", "measured", "equal", "set-up seconds"))
    good = True
    measured = []
    rk = None
    for percent in options.budgets:
        model.zero_grad(set_to_none=not options.grads_allocated)
        try:
            rk = Rockmate(model, data[0][0], int(eager_peak * percent / 100), costs=options.costs)
        except InfeasibleBudgetError as error:
            print(f"{percent:>4} %: {error}")
            good = False
            continue
        equal = _same_training(rk, eager, data, options.grads_allocated)
        peak = measure_peak(partial(step, rk, data[0]), device)
        # The model itself, not its copy: where parameters lie in memory changes a step's time by some percent.
        slower = overhead(partial(step, rk.original, data[0]), partial(step, rk, data[0]), options.pairs, device)
        measured.append((peak, slower))
        good = good and equal and peak <= rk.budget
        plan = rk.plan
        assert isinstance(plan, Plan)  # the GPT is one graph
        print(
            _ROW.format(
                show_bytes(rk.budget),
                f"{percent} %",
                show_bytes(plan.predicted_peak),
                show_bytes(peak),
                f"{100 * plan.predicted_overhead:+.1f} %",
                f"{100 * slower:+.1f} %",
                "yes" if equal else "NO",
                " ".join(f"{name} {s:.1f}" for name, s in plan.setup_seconds.items()),
            ),
            flush=True,
        )
    print("equal: outputs, gradients, buffers, loss curve and random state are eager's, bit for bit")
    if rk is not None:
        out = Path(options.out)
        rk.frontier().plot(out / "frontier.png", measured=measured)
        seen = measure_step(partial(step, rk, data[0]), device)
        assert isinstance(rk.plan, Plan)
        rk.plan.plot_memory(out / "memory.png", measured=seen)
        print(f"time against memory: {out / 'frontier.png'}; memory of the last plan's step: {out / 'memory.png'}")
    return 0 if good else 1


_ROW = "{:>10}  {:>8}  {:>10}  {:>10}  {:>9}  {:>9}  {:>5}  {}"


def _step(model: torch.nn.Module, batch: Batch, keep_grads: bool) -> Batch:
    """One training step without the optimizer; gradients begin as None, or as zeros that are there already.

    Returns its outputs, which are held to the end, and its loss.
    """
    model.zero_grad(set_to_none=not keep_grads)
    logits = model(batch[0])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
    loss.backward()
    return logits.detach(), loss.detach()


def _same_training(rk: Rockmate, eager: torch.nn.Module, data: list[Batch], keep_grads: bool) -> bool:
    """Train copies of both from the same state; every figure must be equal, bit for bit."""
    start = copy.deepcopy(eager.state_dict())
    runs = [list(_trained(m, data, keep_grads)) for m in (eager, rk)]
    eager.load_state_dict(start)
    rk.original.load_state_dict(start)
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def _trained(model: torch.nn.Module, data: list[Batch], keep_grads: bool) -> Iterator[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in data:
        yield from (*_step(model, batch, keep_grads), *random_states(batch[:1]))
        yield from (p.grad.clone() for p in model.parameters() if p.grad is not None)
        yield from (b.clone() for b in model.buffers())
        optimizer.step()


def overhead(base: Callable[[], object], other: Callable[[], object], pairs: int, device: torch.device) -> float:
    """Median over interleaved pairs of how much longer ``other`` takes, as a fraction."""

    def seconds(function: Callable[[], object]) -> float:
        kind_of(device).synchronize(device)
        start = time.perf_counter()
        function()
        kind_of(device).synchronize(device)
        return time.perf_counter() - start

    base(), other()
    ratios = []
    for k in range(pairs):
        taken = {function: seconds(function) for function in ((other, base) if k % 2 else (base, other))}
        ratios.append(taken[other] / taken[base])
    return statistics.median(ratios) - 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rockmate.demo", description=(__doc__ or "").splitlines()[0])
    for name, default in (("layers", 12), ("width", 256), ("heads", 4), ("length", 256), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3, help="training steps compared with eager")
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs of timed steps")
    parser.add_argument("--budgets", type=float, nargs="+", default=[80, 60, 40, 25], help="percent of eager's peak")
    parser.add_argument("--costs", choices=("measured", "flops"), default="measured")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--grads-allocated", action="store_true", help="gradients stay allocated between steps")
    parser.add_argument("--out", default="out", help="folder for the plot")
    return parser
