"""ResNet-50 as eager and under budgets: peaks in bytes, predicted overhead, equality bit for bit. Needs torchvision.

python benchmarks/resnet50.py [--batch 8] [--size 128] [--budgets 80 70 60]
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

# A program in this folder has the name of a package: leave the folder to scripts.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from rockmate import Rockmate, measure_peak  # noqa: E402


def make_model() -> torch.nn.Module:
    """torchvision's compiled operators do not load on a CPU build of torch: define the schemas it looks up."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from torchvision.models import resnet50

    return resnet50(weights=None).train()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--budgets", type=float, nargs="+", default=[80, 70, 60], help="percent of eager's peak")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = make_model()
    eager = copy.deepcopy(model)
    start = copy.deepcopy(model.state_dict())
    x, y = torch.randn(options.batch, 3, options.size, options.size), torch.randint(0, 1000, (options.batch,))

    def step(module: torch.nn.Module) -> torch.Tensor:
        module.zero_grad()
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        return loss.detach()

    step(eager)
    peak = measure_peak(lambda: step(eager))
    print(f"eager peak {peak} bytes")
    for percent in options.budgets:
        model.zero_grad()
        rk = Rockmate(model, x, int(percent / 100 * peak))
        model.load_state_dict(start)
        eager.load_state_dict(start)
        same = torch.equal(step(eager), step(rk))
        same &= all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))
        same &= all(torch.equal(p, q) for p, q in zip(model.buffers(), eager.buffers(), strict=True))
        measured = measure_peak(lambda rk=rk: step(rk))
        print(
            f"{percent:.0f} %: budget {rk.budget}, predicted {rk.plan.predicted_peak}, measured {measured}, "
            f"predicted overhead {100 * rk.plan.predicted_overhead:.1f} %, equal: {'yes' if same else 'NO'}"
        )


if __name__ == "__main__":
    main()
