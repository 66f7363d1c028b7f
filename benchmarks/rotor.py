"""rotor.Checkpointable against torch.utils.checkpoint.checkpoint_sequential at equal measured peak.

For each model: checkpoint_sequential with every number of segments, over the flattened layers, early stop on; of these
the best-tuned, those that no other beats in both peak and FLOPs; then ours under each such peak as the limit. Peaks are
those of the allocator over one whole step. FLOPs are those of the whole step, as a ratio to the plain step; they are
counted on a batch of 2, on which the same sequence runs (the ratio does not depend on the batch). Planned with
costs="flops".
The least FLOPs at a peak are a proven bound for all schedules of the model's operations (solvers.walk's), in which only
FLOPs count: no plan can gain more than it allows. It is asked for transformers only, elsewhere it is 1: operations in
place run as one in our graphs, and a stage may do with less.

Further: the complete example of rotor's documentation (ResNet-18, batch 32 at 224x224, under 83 % of its plain peak),
and the time of the dynamic program for 339 layers and 500 slots.

    OMP_NUM_THREADS=1 python benchmarks/rotor.py [--short] [--only NAME ...] [--bounds] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

import rkgb.device
from rkgb.device.roofline import Roofline
from rockmate import InfeasibleBudgetError, Rockmate, measure_peak, rotor
from rockmate.demo.gpt import Layer
from solvers.rotor.chain import Chain, Stage
from solvers.rotor.plans import no_checkpoint_sequence, persistent
from solvers.rotor.walk import walk_sequence

Make = Callable[[], tuple[nn.Sequential, Callable[[int], torch.Tensor], int]]


class Embedding(nn.Module):
    """Tokens (batch, length) to (batch, length, width), with learned positions."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) + self.positions(torch.arange(x.shape[1]))


def transformer(layers: int, width: int, length: int, vocabulary: int) -> nn.Sequential:
    """A GPT of whole layers: explicit attention, 4 heads, dropout 0.1."""
    blocks = [Layer(width, 4, length, 0.1) for _ in range(layers)]
    end = [nn.LayerNorm(width), nn.Linear(width, vocabulary)]
    return nn.Sequential(Embedding(vocabulary, length, width), *blocks, *end)


def classifier(name: str, batch: int, size: int, **options: Any) -> Make:
    def make() -> tuple[nn.Sequential, Callable[[int], torch.Tensor], int]:
        return getattr(rotor.models, name)(**options), lambda n: torch.randn(n, 3, size, size), batch

    return make


def language(layers: int, batch: int, width: int, length: int, vocabulary: int) -> Make:
    def make() -> tuple[nn.Sequential, Callable[[int], torch.Tensor], int]:
        model = transformer(layers, width, length, vocabulary)
        return model, lambda n: torch.randint(vocabulary, (n, length)), batch

    return make


MODELS: dict[str, Make] = {
    "transformer, 24 layers, batch 4, length 128, width 128": language(24, 4, 128, 128, 512),
    "ResNet-50, batch 16, 96x96": classifier("resnet50", 16, 96),
    "ResNet-101, batch 32, 64x64": classifier("resnet101", 32, 64),
    "VGG-16, batch 32, 64x64": classifier("vgg16", 32, 64),
    "DenseNet-121, batch 16, 64x64": classifier("densenet121", 16, 64),
}
BOUNDED = "transformer"
SHORT: dict[str, Make] = {
    "ResNet-18, batch 8, 64x64": classifier("resnet18", 8, 64, num_classes=10),
    "transformer, 4 layers, batch 4, length 64, width 64": language(4, 4, 64, 64, 64),
}


@dataclass(frozen=True)
class Point:
    """Peaks in bytes; FLOPs as ratios to the plain step."""

    segments: int
    peak: int
    flops: float
    ours_peak: int | None
    ours_predicted: int | None
    ours_flops: float | None
    rotor_flops: float | None
    least_flops: float | None = None

    @property
    def gain(self) -> float | None:
        """Throughput of ours to theirs; None where ours does not fit."""
        return None if self.ours_flops is None else self.flops / self.ours_flops


def step(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    model.zero_grad()
    output = run(x)  # held to the end, as in a training loop
    output.square().mean().backward()


def flops_of(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        step(model, run, x)
    return counter.get_total_flops()


def compare(make: Make) -> tuple[int, list[Point]]:
    """The plain step's peak, and ours against each best-tuned checkpoint_sequential."""
    torch.manual_seed(0)
    model, sample, batch = make()
    x, small = sample(batch), sample(2)
    layers = list(rotor.Checkpointable(model).functions)
    step(model, model, x)
    plain_peak, plain = measure_peak(lambda: step(model, model, x)), flops_of(model, model, small)
    tried = []
    for segments in range(2, len(layers) + 1):

        def run(x: torch.Tensor, segments: int = segments) -> torch.Tensor:
            return checkpoint_sequential(layers, segments, x, use_reentrant=False)

        flops = flops_of(model, run, small)
        tried.append((measure_peak(lambda run=run: step(model, run, x)), flops, segments))
    best = [t for t in tried if not any(o[0] <= t[0] and o[1] <= t[1] and o[:2] != t[:2] for o in tried)]
    model.zero_grad()
    ours = rotor.Checkpointable(model, x, costs="flops")
    points = []
    for peak, flops, segments in sorted({b[:2]: b for b in best}.values()):
        whole = None
        try:
            ours.compute_sequence(peak, algo="rotor")
            whole = flops_of(model, ours, small) / plain
        except InfeasibleBudgetError:
            pass
        try:
            ours.compute_sequence(peak)
        except InfeasibleBudgetError as error:
            print(f"{segments} segments: {error}", flush=True)
            points.append(Point(segments, peak, flops / plain, None, None, None, whole))
            continue
        counted = flops_of(model, ours, small) / plain
        measured = measure_peak(lambda: step(model, ours, x))
        points.append(Point(segments, peak, flops / plain, measured, ours.get_expected_memory(), counted, whole))
        print(points[-1], f"gain {points[-1].gain}", flush=True)
    return plain_peak, points


def least_flops(model: nn.Module, x: torch.Tensor, peak: int) -> float:
    """No schedule of the model's operations within ``peak`` takes fewer, as a ratio to the plain step."""
    with mock.patch.object(rkgb.device.Cpu, "roofline", lambda *_: Roofline(10**12, 1_000)):  # bytes take no time
        plan = Rockmate(model, x, peak, costs="flops", loss_memory=0, cache=False).plan
    assert plan.lower_bound is not None
    return plan.lower_bound / plan.problem.eager_time


def add_bounds(make: Make, points: list[dict[str, Any]]) -> None:
    """The least FLOPs of points that were compared before."""
    torch.manual_seed(0)
    model, sample, batch = make()
    x = sample(batch)
    for point in points:
        point["least_flops"] = least_flops(model, x, point["peak"])
        print(point["segments"], "segments: at least", point["least_flops"], flush=True)


def example(batch: int, size: int) -> dict[str, Any]:
    """ResNet-18 under 83 % of its plain peak."""
    torch.manual_seed(0)
    model = rotor.models.resnet18()
    plain = copy.deepcopy(model)
    x, y = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))

    def run(m: nn.Module) -> torch.Tensor:
        m.zero_grad()
        loss = F.cross_entropy(m(x), y)
        loss.backward()
        return loss.detach()

    start = copy.deepcopy(plain.state_dict())
    run(plain)
    peak = measure_peak(lambda: run(plain))
    limit = int(0.83 * peak)
    chk = rotor.Checkpointable(model, x, limit, costs="flops")
    plain.load_state_dict(start)
    same = torch.equal(run(plain), run(chk))
    same &= all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    same &= all(torch.equal(p, q) for p, q in zip(model.buffers(), plain.buffers(), strict=True))
    measured = measure_peak(lambda: run(chk))
    return {
        "batch": batch,
        "size": size,
        "plain_peak": peak,
        "limit": limit,
        "predicted": chk.get_expected_memory(),
        "measured": measured,
        "overhead_predicted": chk.walked().overhead,
        "equal": same,
        "sequence": repr(chk.sequence),
    }


def dynamic_program(length: int, slots: int, fraction: float) -> dict[str, Any]:
    """CPU seconds of the dynamic program on a chain of uneven stages."""
    rng = random.Random(0)
    stages, values = [], [((0, 0),)]
    for i in range(length):
        out, held, time_ = rng.randint(1, 1000), rng.randint(0, 3000), rng.randint(1, 100)
        before = values[-1][0][1]
        peaks = held + out, out + 100, held + out, before
        stages.append(Stage(str(i), time_, 0, 2 * time_, held, *peaks, before, 50))
        values.append(((i + 1, out),))
    chain = Chain(tuple(stages), tuple(values), values[-1][0][1])
    full = walk_sequence(chain, no_checkpoint_sequence(chain)).peak
    start = time.process_time()
    sequence = persistent(chain, int(fraction * full), slots)
    spent = time.process_time() - start
    walked = walk_sequence(chain, sequence)
    return {"stages": length, "slots": slots, "limit": fraction, "cpu_seconds": spent, "overhead": walked.overhead}


def report(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# rotor against checkpoint_sequential", "", *(__doc__ or "").split("\n\n")[1].splitlines(), ""]
    means, bounds, most = [], [], []
    for name, found in results["models"].items():
        points = [Point(**p) for p in found["points"]]
        gains = [p.gain for p in points if p.gain is not None]
        most.append(sum(p.flops / (p.least_flops or 1) for p in points) / len(points))
        misses = len(points) - len(gains)
        means.append(sum(gains) / len(gains))
        bounds.append(sum(p.flops for p in points if p.gain is not None) / len(gains))
        mib = found["plain_peak"] / 2**20
        lines += [f"## {name}", "", f"Plain peak {mib:.1f} MiB. Mean gain {100 * (means[-1] - 1):.1f} %, ", ""]
        lines[-2] += f"least {100 * (min(gains) - 1):.1f} %; without any recomputation "
        lines[-2] += f"{100 * (bounds[-1] - 1):.1f} %, at most {100 * (most[-1] - 1):.1f} % within these peaks; "
        lines[-2] += f"{misses} of {len(points)} peaks that ours cannot reach."
        lines += [
            "| segments | peak | its FLOPs | ours: peak | FLOPs | gain | FLOPs, whole stages | least FLOPs |",
            "|---|---|---|---|---|---|---|---|",
        ]
        plain = found["plain_peak"]
        for p in points:
            whole = "does not fit" if p.rotor_flops is None else f"{p.rotor_flops:.3f}"
            ours = "does not fit | | "
            if p.gain is not None and p.ours_peak is not None:
                ours = f"{100 * p.ours_peak / plain:.1f} % | {p.ours_flops:.3f} | {100 * p.gain - 100:+.1f} %"
            start = f"| {p.segments} | {100 * p.peak / plain:.1f} % | {p.flops:.3f} | {ours} | {whole} | "
            lines.append(start + (f"{p.least_flops:.3f} |" if p.least_flops else "not asked |"))
        lines.append("")
    if means:
        gain, bound, limit = (100 * (sum(of) / len(of) - 1) for of in (means, bounds, most))
        lines += [
            f"Mean gain over the models: **{gain:.1f} %**; without any recomputation it would be {bound:.1f} %, and no "
            f"schedule of the operations within these peaks reaches more than {limit:.1f} %.",
            "",
        ]
    if e := results.get("example"):
        lines += [
            "## The complete example",
            "",
            f"ResNet-18, batch {e['batch']} at {e['size']}x{e['size']}: plain peak {e['plain_peak']} bytes, "
            f"limit {e['limit']}, predicted {e['predicted']}, measured {e['measured']}, "
            f"predicted overhead {100 * e['overhead_predicted']:.1f} %, "
            f"results equal: {'yes' if e['equal'] else 'NO'}.",
            "",
        ]
    for d in results.get("dynamic_program", []):
        lines.append(
            f"Dynamic program, {d['stages']} stages, {d['slots']} slots, limit {100 * d['limit']:.0f} %: "
            f"{d['cpu_seconds']:.1f} s of CPU."
        )
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="small models, seconds instead of an hour")
    parser.add_argument("--only", nargs="*", help="models whose name contains one of these; 'example', 'dp'")
    parser.add_argument("--bounds", action="store_true", help="only the least FLOPs, for the points in the results")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    models = SHORT if options.short else MODELS
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / ("rotor-short.json" if options.short else "rotor.json")
    more = path.exists() and (options.only or options.bounds)
    results: dict[str, Any] = json.loads(path.read_text()) if more else {"models": {}}

    def wanted(name: str) -> bool:
        return not options.only or any(part.lower() in name.lower() for part in options.only)

    def save() -> None:
        path.write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".md").write_text(report(results))

    if options.bounds:
        for name, found in results["models"].items():
            if wanted(name) and name.startswith(BOUNDED):
                add_bounds(models[name], found["points"])
                save()
        return
    if wanted("dp"):
        size = (40, 100) if options.short else (339, 500)
        results["dynamic_program"] = [dynamic_program(*size, fraction) for fraction in (0.5, 0.2)]
        save()
    if wanted("example"):
        results["example"] = example(8, 128) if options.short else example(32, 224)
        save()
    for name, make in models.items():
        if wanted(name):
            print(name, flush=True)
            peak, points = compare(make)
            results["models"][name] = {"plain_peak": peak, "points": [asdict(p) for p in points]}
            if name.startswith(BOUNDED):
                add_bounds(make, results["models"][name]["points"])
            save()
    print(report(results))


if __name__ == "__main__":
    main()
