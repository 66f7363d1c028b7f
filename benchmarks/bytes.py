"""Bytes: of many models under several budgets each, the peak that was predicted, the one that is measured, the budget.

    OMP_NUM_THREADS=1 python benchmarks/bytes.py [NAME …] [--cases FILE] [--out FILE] [--again] [--short]
        [--compile]

For each model the budgets are the least, that of a step which runs nothing again, and a quarter, half and three
quarters of the way between. A step under each is compared with eager mode's: outputs, gradients and buffers, bit for
bit. Then the peak of another one is measured. The very first step, planned before anything is known of the loss, is
measured half-way, unless the plan for it is made in it. A miss is a peak above its budget or above the prediction, a
bit that differs where eager mode repeats itself, or an error that is no refusal; then the exit status is 1. A model
that is refused is counted as refused, with the error's words.

The loss has no numbers: it is a tensor without elements whose backward makes gradients that were drawn before. So no
byte is the loss's own, and predictions are held to the byte. Times are modelled (``costs="flops"``), so that plans are
the same on every run. With ``--compile`` all pieces run compiled, and steps are compared with one that keeps
everything, also compiled. Models that OUT has already are not run again, but with ``--again``. NAMEs are those of CASES
(``architectures.py``, which needs timm and torchvision; ``features.py`` has others), or parts of them.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the packages need not be installed

from zoo import difference, forget_gradients, fresh, load, plain_checkpoints

from rkgb.errors import GraphError, MeasureError
from rkgb.trees import tensors_of
from rockmate import Rockmate, measure_peak
from rockmate.errors import RockmateError
from rockmate.planning.plan import Plan

HERE = Path(__file__).resolve().parent
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
SHORT = ("features.py", ("norms_and_pools", "statistics_in_a_chain", "detached_branches"))


class Ends(torch.autograd.Function):
    """A loss without elements; the gradients of the tensors ``ys`` are copies of ``seeds``."""

    @staticmethod
    def forward(ctx: Any, seeds: list[torch.Tensor], *ys: torch.Tensor) -> torch.Tensor:
        ctx.seeds = seeds
        return ys[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return (None, *(seed.clone() for seed in ctx.seeds))


class Step:
    """Steps of one model, whose gradients of outputs are the same in all of them."""

    def __init__(self) -> None:
        self.seeds: list[torch.Tensor] = []

    def __call__(self, call: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """A forward and a backward; the outputs, which are held meanwhile."""
        torch.manual_seed(1)
        outputs = tensors_of(call(*args, **kwargs))
        ends = [t for t in outputs if t.requires_grad]
        if not self.seeds:
            draw = torch.Generator().manual_seed(2)
            self.seeds = [torch.randn(t.shape, generator=draw, dtype=torch.float64).to(t.dtype) for t in ends]
        torch.autograd.backward(Ends.apply(self.seeds, *ends), torch.empty(0))
        return outputs


@contextlib.contextmanager
def put_back(model: torch.nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
    """Buffers become afterwards what they were, but for those that a first call makes anew, and gradients go."""
    before = [b.clone() for b in model.buffers()]
    yield
    forget_gradients(model, args, kwargs)
    with torch.no_grad():
        for b, old in zip(model.buffers(), before, strict=True):
            if b.shape == old.shape:
                b.copy_(old)


def results(step: Step, call: Any, model: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, list[Any]]:
    """What a step gives, to be compared."""
    with put_back(model, args, kwargs):
        outputs = step(call, args, kwargs)
        return {
            "outputs": [t.detach().clone() for t in outputs],
            "gradients": [p.grad for p in model.parameters()] + [t.grad for t in tensors_of((args, kwargs))],
            "buffers": [b.clone() for b in model.buffers()],
        }


def differing(found: dict[str, list[Any]], expected: dict[str, list[Any]]) -> list[str]:
    """What of two steps is not equal bit for bit."""
    return [what for what in found if difference(found[what], expected[what]) > 0]


def examined(built: Any, row: dict[str, Any], compiled: bool) -> None:
    """Fill the ``row`` of a model with a figure for each pair of it and a budget."""
    step = Step()
    reference = fresh(built)
    with plain_checkpoints():
        expected = results(step, reference[0], *reference)
        row["eager_differs"] = differing(results(step, reference[0], *reference), expected)
    del reference
    model, args, kwargs = built
    rk = Rockmate(model, args, "100 TiB", sample_kwargs=kwargs, costs="flops", cache=False, compile=compiled)
    if compiled:
        row["pieces"] = getattr(rk.plan, "pieces", "").partition("\n")[0]
        expected = results(step, rk, model, args, kwargs)
    row["operations"] = len(rk.plan.graph.s.d.nodes if isinstance(rk.plan, Plan) else rk.plan.problem.nodes)
    step_again, pairs = partial(step, rk, args, kwargs), row["pairs"]
    with put_back(model, args, kwargs):
        try:
            pairs.append(first_step(rk, step_again))
        except MeasureError as error:  # the first call makes a plan, for numbers that the seed brings
            row["first_step"] = f"not measured: {error}"
    with put_back(model, args, kwargs):
        step_again()
    found = rk.frontier()
    for fraction in FRACTIONS:
        rk.budget = found.min_budget + round(fraction * (found.max_budget - found.min_budget))
        differs = differing(results(step, rk, model, args, kwargs), expected)
        with put_back(model, args, kwargs):
            step_again()  # what forward made at its first call may ask for another plan
        with put_back(model, args, kwargs):
            pairs.append(pair(rk, f"{fraction:g}", measure_peak(step_again, rk)) | {"differs": differs})


def first_step(rk: Rockmate, run: Any) -> dict[str, Any]:
    """The pair of the model and a budget half-way, in the first step of all."""
    found = rk.frontier()
    rk.budget = (found.min_budget + found.max_budget) // 2
    plan = rk.plan
    measured = measure_peak(run, rk)
    return pair(rk, "first", measured) | {"predicted": plan.predicted_peak, "overhead": plan.predicted_overhead}


def pair(rk: Rockmate, at: str, measured: int) -> dict[str, Any]:
    return {
        "at": at,
        "budget": rk.budget,
        "predicted": rk.plan.predicted_peak,
        "measured": measured,
        "overhead": round(rk.plan.predicted_overhead, 4),
    }


def misses(row: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    found = [f"error: {row['error']}"] if "error" in row else []
    for p in row["pairs"]:
        if p["measured"] > p["budget"]:
            found.append(f"{p['at']}: {p['measured'] - p['budget']} bytes above the budget {p['budget']}")
        if p["measured"] > p["predicted"]:
            found.append(f"{p['at']}: {p['measured'] - p['predicted']} bytes above the prediction {p['predicted']}")
        if differs := [what for what in p.get("differs", ()) if what not in row["eager_differs"]]:
            found.append(f"{p['at']}: {', '.join(differs)} differ from eager mode's")
    return found


def run(cases: Path, name: str, compiled: bool = False) -> dict[str, Any]:
    """The row of one model."""
    row: dict[str, Any] = {"model": name, "pairs": [], "eager_differs": []}
    torch.compiler.reset()  # it captures a function a few times only, and models of a family share theirs
    start = time.perf_counter()
    try:
        examined(load(cases).build(name), row, compiled)
    except (GraphError, RockmateError) as error:
        # A measurement or a budget that was to fit is no matter of the model.
        refused = not row["pairs"] and not isinstance(error, MeasureError)
        row["refused" if refused else "error"] = f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - whatever a model throws is a line of the table
        row["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    row["misses"] = misses(row)
    print(f"{show(row)} ({time.perf_counter() - start:.1f} s)", flush=True)
    return row


def show(row: dict[str, Any]) -> str:
    below = [p["predicted"] - p["measured"] for p in row["pairs"]]
    verdict = "refused: " + row["refused"][:120] if "refused" in row else "ok"
    return (
        f"{row['model']:45} {'MISS ' + '; '.join(row['misses'])[:400] if row['misses'] else verdict} "
        f"predicted less measured {below}"
    )


def summary(rows: list[dict[str, Any]]) -> str:
    """One line for all models."""
    pairs = [p for row in rows for p in row["pairs"]]
    later = [p["predicted"] - p["measured"] for p in pairs if p["at"] != "first"]
    counts = collections.Counter(below == 0 for below in later)
    refused = [row["model"] for row in rows if "refused" in row]
    missed = [row["model"] for row in rows if row["misses"]]
    return (
        f"{len(pairs)} pairs of {len(rows)} models: {len(missed)} missed {missed}, {len(refused)} refused {refused}; "
        f"after the first step predicted is measured in {counts[True]} of {len(later)}, at most "
        f"{max(later, default=0)} bytes above"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models, or parts of their names; all by default")
    parser.add_argument("--cases", type=Path, default=HERE / "architectures.py", help="the file that builds the models")
    parser.add_argument("--out", type=Path, help="the results; rows that are there stay")
    parser.add_argument("--again", action="store_true", help="run models that OUT has already")
    parser.add_argument("--compile", action="store_true", help="with compiled pieces")
    parser.add_argument("--short", action="store_true", help=f"{', '.join(SHORT[1])} of {SHORT[0]}")
    options = parser.parse_args()
    cases, wanted = (HERE / SHORT[0], SHORT[1]) if options.short else (options.cases, tuple(options.names))
    names = [name for name in load(cases).names() if not wanted or any(part in name for part in wanted)]
    known = json.loads(options.out.read_text()) if options.out and options.out.exists() else []
    rows = {row["model"]: row for row in known}
    torch.set_num_threads(1)
    for name in names:
        if options.again or name not in rows:
            rows[name] = run(cases, name, options.compile)
            if options.out:
                options.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows.values()) + "\n]\n")
    print(summary(list(rows.values())))
    return 1 if any(row["misses"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
