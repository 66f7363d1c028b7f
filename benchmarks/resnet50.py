"""ResNet-50 as eager and under budgets: peaks in bytes, predicted overhead, equality bit for bit. Needs torchvision.

python benchmarks/resnet50.py [--batch 8] [--size 128] [--budgets 80 70 60] [--out FILE] [--short]
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from rockmate import Rockmate, measure_peak


def make_model() -> torch.nn.Module:
    """torchvision's; where its compiled operators do not load, the schemas that it looks up are defined."""
    try:
        import torchvision  # noqa: F401
    except (OSError, RuntimeError):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from torchvision.models import resnet50

    return resnet50(weights=None).train()


@dataclass(frozen=True)
class Row:
    """One budget: bytes, the predicted overhead as a fraction of eager's step, results equal bit for bit or not."""

    percent: float
    budget: int
    predicted: int
    measured: int
    overhead: float
    equal: bool


def rows(batch: int, size: int, budgets: list[float]) -> Iterator[Row]:
    """Train a step as eager and under each budget (percent of eager's peak)."""
    torch.manual_seed(0)
    model = make_model()
    eager = copy.deepcopy(model)
    start = copy.deepcopy(model.state_dict())
    x, y = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))

    def step(module: torch.nn.Module) -> torch.Tensor:
        module.zero_grad()
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        return loss.detach()

    step(eager)
    peak = measure_peak(lambda: step(eager))
    print(f"eager peak {peak} bytes")
    for percent in budgets:
        model.zero_grad()
        rk = Rockmate(model, x, int(percent / 100 * peak), cache=False)
        model.load_state_dict(start)
        eager.load_state_dict(start)
        same = torch.equal(step(eager), step(rk))
        same &= all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))
        same &= all(torch.equal(p, q) for p, q in zip(model.buffers(), eager.buffers(), strict=True))
        measured = measure_peak(partial(step, rk))
        yield Row(percent, rk.budget, rk.plan.predicted_peak, measured, rk.plan.predicted_overhead, same)


def main() -> int:
    """Print a line for each budget; 1 if a budget was exceeded or a result differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--budgets", type=float, nargs="+", default=[80, 70, 60], help="percent of eager's peak")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--short", action="store_true", help="a small batch, one budget")
    options = parser.parse_args()
    if options.short:
        options.batch, options.size, options.budgets = 8, 64, [90]
    found = []
    for row in rows(options.batch, options.size, options.budgets):
        found.append(row)
        print(
            f"{row.percent:.0f} %: budget {row.budget}, predicted {row.predicted}, measured {row.measured}, "
            f"predicted overhead {100 * row.overhead:.1f} %, equal: {'yes' if row.equal else 'NO'}",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
    return 0 if all(row.equal and row.measured <= row.budget for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
