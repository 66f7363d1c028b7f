"""Chains in time: Rockmate and rotor against checkpoint_sequential, at its own measured peak.

For each chain and number of segments, each of these takes steps in turn, in an order that is drawn anew every round:
the plain model, ``checkpoint_sequential``, Rockmate, ``rotor.Checkpointable`` with its default algorithm, and with that
of the paper. Ours get the measured peak of ``checkpoint_sequential`` as their budget. Rotor has room for the numbers of
any loss beside it, as the loss here takes less, and its measured peak is compared. Each step's time is divided by
the plain one's of its round. Memory is laid out anew before every step, and there are several processes, since
layouts change times (see ``benchmarks/overhead.py``).

python benchmarks/chains.py [NAME ...] [--processes 3] [--rounds 16] [--out benchmarks/results/chains.json] [--short]

With ``--flops`` nothing is timed: the FLOPs of a step of rotor's and of ``checkpoint_sequential`` are counted, relative
to the plain one's. Rotor plans with costs="flops", so that the figures are those of any machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from rkgb.device import kind_of
from rockmate import Rockmate, measure_peak, rotor
from rockmate.demo.compare import MALLOC

sys.path.insert(0, str(Path(__file__).parent))  # so that another file can import this one

from overhead import laid_out_anew
from peers_run.models import MixerLayer
from rotor import flops_of, transformer

from solvers.rotor.chain import Chain as RotorChain
from solvers.rotor.walk import walk_sequence

Chain = tuple[Callable[[], tuple[nn.Sequential, torch.Tensor]], tuple[int, ...]]
PLAIN, SEGMENTS = "plain", "checkpoint_sequential"
NUMBERS = kind_of(torch.device("cpu")).scalars


class InvertedResidual(nn.Module):
    """Widens six times, convolves each channel on its own, and narrows again (MobileNetV2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 6 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True)),
            *(nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide)),
            *(nn.ReLU6(inplace=True), nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def mixer(layers: int, tokens: int, width: int, batch: int) -> tuple[nn.Sequential, torch.Tensor]:
    return nn.Sequential(*(MixerLayer(tokens, width) for _ in range(layers))), torch.randn(batch, tokens, width)


def residuals(layers: int, width: int, batch: int, size: int) -> tuple[nn.Sequential, torch.Tensor]:
    return nn.Sequential(*(InvertedResidual(width) for _ in range(layers))), torch.randn(batch, width, size, size)


def language(layers: int, width: int, batch: int, length: int) -> tuple[nn.Sequential, torch.Tensor]:
    return transformer(layers, width, length, 512), torch.randint(512, (batch, length))


def encoders(layers: int, width: int, batch: int, length: int) -> tuple[nn.Sequential, torch.Tensor]:
    made = (nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True) for _ in range(layers))
    return nn.Sequential(*made), torch.randn(batch, length, width)


def resnet(name: str, batch: int, size: int) -> tuple[nn.Sequential, torch.Tensor]:
    return getattr(rotor.models, name)(num_classes=100), torch.randn(batch, 3, size, size)


CHAINS: dict[str, Chain] = {
    "mixer, 16 layers, 64 x 96, batch 16": (partial(mixer, 16, 64, 96, 16), (14, 10, 4)),
    "12 inverted residuals, 8 x 48 x 48": (partial(residuals, 12, 8, 8, 48), (6, 3)),
    "transformer, 12 x 256, batch 8, length 128": (partial(language, 12, 256, 8, 128), (6, 3)),
    "ResNet-50, batch 8, 96 x 96": (partial(resnet, "resnet50", 8, 96), (8, 4)),
    "10 encoder layers with dropout, 128, batch 8, length 64": (partial(encoders, 10, 128, 8, 64), (5, 3)),
}
SHORT: dict[str, Chain] = {"mixer, 4 layers, 16 x 16, batch 2": (partial(mixer, 4, 16, 16, 2), (3,))}


def step(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Gradients begin as None; the output is held to the end."""
    model.zero_grad()
    output = call(x)
    output.square().mean().backward()


def seconds(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Of the processor, on one thread."""
    held = laid_out_anew()
    start = time.process_time()
    step(model, call, x)
    end = time.process_time()
    del held
    return end - start


def overhead_of_segments(chain: RotorChain, segments: int) -> float:
    """What ``checkpoint_sequential`` adds to a step without recomputation, by the times that rotor measured of stages.

    All segments but the last, which keeps everything, run without keeping anything, and again before their backward.
    """
    extra, length = 0, chain.length // segments
    for i, stage in enumerate(chain.stages[: (segments - 1) * length]):
        extra += stage.forward_time - (stage.tail if i % length == length - 1 else 0)
    return extra / sum(stage.forward_time + stage.backward_time for stage in chain.stages)


def in_one_process(case: Chain, rounds: int) -> list[dict[str, Any]]:
    """For each number of segments: peaks, predicted overheads, and logarithms of each round's ratios.

    Those of rotor and of segments are predicted by the same measured times.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, numbers = case
    model, x = make()
    step(model, model, x)
    plain = measure_peak(partial(step, model, model, x))
    found = []
    for segments in numbers:
        theirs = partial(checkpoint_sequential, rotor.Checkpointable(model).functions, segments, use_reentrant=False)
        calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {PLAIN: model, SEGMENTS: theirs}
        step(model, theirs, x)
        peak = measure_peak(partial(step, model, theirs, x))
        model.zero_grad()
        chain: RotorChain | None = None
        rockmate = Rockmate(model, x, peak, cache=False)
        predicted = {"Rockmate": rockmate.plan.predicted_overhead}
        calls["Rockmate"] = rockmate
        for name, algorithm in (("rotor", "persistent"), ("rotor, the paper's", "rotor")):
            ours = calls[name] = rotor.Checkpointable(model, x)
            ours.compute_sequence(peak + NUMBERS, algo=algorithm)
            assert ours.chain is not None and ours.sequence is not None
            chain = chain or ours.chain
            predicted[name] = walk_sequence(chain, ours.sequence).overhead
        assert chain is not None
        predicted[SEGMENTS] = overhead_of_segments(chain, segments)
        for _, call in 3 * [*calls.items()]:  # the first steps may plan anew, by what the loss was seen to take
            step(model, call, x)
        model.zero_grad()
        peaks = {name: measure_peak(partial(step, model, call, x)) for name, call in calls.items()}
        logs: dict[str, list[float]] = {name: [] for name in calls if name != PLAIN}
        for _ in range(rounds):
            order = random.sample([*calls], len(calls))
            taken = {name: seconds(model, calls[name], x) for name in order}
            for name, ratios in logs.items():
                ratios.append(math.log(taken[name] / taken[PLAIN]))
            gc.collect()
        found.append(
            {"segments": segments, "plain": plain, "peak": peak, "peaks": peaks, "predicted": predicted, "logs": logs}
        )
    return found


def counted(case: Chain) -> list[dict[str, float]]:
    """For each number of segments: FLOPs of a step, relative to the plain one's."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, numbers = case
    model, x = make()
    ours = rotor.Checkpointable(model, x, costs="flops")
    step(model, model, x)
    plain, found = flops_of(model, model, x), []
    for segments in numbers:
        theirs = partial(checkpoint_sequential, ours.functions, segments, use_reentrant=False)
        step(model, theirs, x)
        peak = measure_peak(partial(step, model, theirs, x))
        ours.compute_sequence(peak + NUMBERS)
        assert measure_peak(partial(step, model, ours, x)) <= peak
        ratios = {name: flops_of(model, call, x) / plain for name, call in ((SEGMENTS, theirs), ("rotor", ours))}
        found.append({"segments": segments, **ratios})
    return found


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of what the processes found for one number of segments.

    ``time``: of each, relative to the plain step; the median of the processes' medians. ``each``: these medians.
    ``to_theirs``: the same relative to ``checkpoint_sequential``.
    """
    first = runs[0]
    each = {name: [math.exp(statistics.median(run["logs"][name])) for run in runs] for name in first["logs"]}
    theirs = {
        name: [
            math.exp(statistics.median(a - b for a, b in zip(run["logs"][name], run["logs"][SEGMENTS], strict=True)))
            for run in runs
        ]
        for name in first["logs"]
        if name != SEGMENTS
    }
    return {
        **{key: first[key] for key in ("segments", "plain", "peak")},
        "within": all(peak <= run["peak"] for run in runs for name, peak in run["peaks"].items() if name != PLAIN),
        "predicted": {name: statistics.median(run["predicted"][name] for run in runs) for name in first["predicted"]},
        "time": {name: statistics.median(of) for name, of in each.items()},
        "each": each,
        "to_theirs": {name: statistics.median(of) for name, of in theirs.items()},
        "each_to_theirs": theirs,
    }


def main(argv: list[str] | None = None) -> dict[str, list[dict[str, Any]]]:
    """Print a line for each point; write all figures as JSON with ``--out``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help="parts of the names of chains; all if none is given")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--short", action="store_true", help="one small chain, one process, two rounds")
    parser.add_argument("--flops", action="store_true", help="count, without timing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    chains = SHORT if options.short else CHAINS
    if options.short:
        options.processes, options.rounds = 1, 2
    if options.child:
        print(json.dumps(in_one_process(chains[options.child], options.rounds)))
        return {}
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in chains:
        if options.names and not any(part in name for part in options.names):
            continue
        if options.flops:
            for row in counted(chains[name]):
                ratios = ", ".join(f"{who} {of:.3f}" for who, of in row.items() if who != "segments")
                print(f"{name}: {row['segments']} segments: {ratios}", flush=True)
            continue
        command = [sys.executable, __file__, "--child", name, "--rounds", str(options.rounds)]
        command += ["--short"] if options.short else []
        runs = []
        for _ in range(options.processes):
            done = subprocess.run(command, env=os.environ | MALLOC, stdout=subprocess.PIPE, check=True, text=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        rows[name] = [merged(list(same)) for same in zip(*runs, strict=True)]
        for row in rows[name]:
            times = ", ".join(f"{who} {t:.3f}" for who, t in row["time"].items())
            mib = f"{row['peak'] / 2**20:.1f} of {row['plain'] / 2**20:.1f} MiB"
            print(f"{name}: {row['segments']} segments, {mib}: {times}", flush=True)
    if options.flops:
        return {}
    ratios = [of for of_chain in rows.values() for row in of_chain for of in row["to_theirs"].values()]
    gain = 1 - math.exp(statistics.mean(map(math.log, ratios)))
    print(f"ours to checkpoint_sequential: {100 * gain:.1f} % faster on average, the worst {max(ratios):.3f}")
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
