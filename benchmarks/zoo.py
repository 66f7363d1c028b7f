"""Every model of the zoo: graphs, a plan half-way between least and most memory, one step compared with eager mode.

    python benchmarks/zoo.py [NAME …] [--device cpu] [--jobs 2] [--json FILE] [--cases ../shared/zoo.py]
        [--compile]

Prints a line a case and exits with 1 if one misses: outputs, gradients, buffers and random state equal to eager mode's
(where eager mode does not agree with itself, as near as that), measured peak at most the budget. A case in
``REFUSED`` must be refused with that error. With ``--compile`` all pieces run compiled, and the step is compared with
that of keeping everything, also compiled; how far that is from eager mode is a figure (dropout draws otherwise).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint

from rkgb.randomness import random_states
from rkgb.trace.preserved import preserved
from rkgb.trees import flatten, tensors_of, unflatten
from rockmate import Rockmate, measure_peak
from rockmate.planning.plan import Plan

CASES = Path(__file__).resolve().parents[2] / "shared" / "zoo.py"

# What no plan can be made for, and the error that says so.
REFUSED = {
    "autograd_grad_inside": "UnsupportedError",  # gradients inside forward
    "hf_wav2vec2_specaug_ctc": "UnsupportedError",  # masks drawn by NumPy, others at every call
}


def load(path: Path) -> Any:
    """The module that builds the cases: ``names()`` and ``build(name) -> (model, args, kwargs)``."""
    if not path.exists():
        sys.exit(f"{path} is not there; --cases names the file that builds the models")
    spec = importlib.util.spec_from_file_location("zoo_cases", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["zoo_cases"] = importlib.util.module_from_spec(spec)  # TorchDynamo looks it up by name
    spec.loader.exec_module(module)
    return module


def step(call: Any, model: torch.nn.Module, args: Any, kwargs: Any, seeds: dict[int, torch.Tensor]) -> dict[str, Any]:
    """One forward and backward with fixed output gradients; what is to be compared."""
    torch.manual_seed(1)
    outputs = tensors_of(call(*args, **kwargs))
    ends = [(k, t) for k, t in enumerate(outputs) if t.requires_grad]
    for k, t in ends:
        if k not in seeds:
            seeds[k] = torch.randn(t.shape, generator=torch.Generator().manual_seed(k)).to(t)
    torch.autograd.backward([t for _, t in ends], [seeds[k] for k, _ in ends])
    return {
        "outputs": [t.detach().clone() for t in outputs],
        "gradients": [p.grad for p in model.parameters()] + [t.grad for t in tensors_of((args, kwargs))],
        "buffers": [b.clone() for b in model.buffers()],
        "random": random_states(model.parameters()),
    }


def difference(a: list[Any], b: list[Any]) -> float:
    """The largest relative difference, 0.0 where all is equal bit for bit."""
    worst = 0.0
    for x, y in zip(map(_dense, a), map(_dense, b), strict=True):
        if (x is None) != (y is None) or (x is not None and x.shape != y.shape):
            return float("inf")
        if x is not None and not torch.equal(x, y) and not torch.allclose(x, y, rtol=0, atol=0, equal_nan=True):
            gap = (x.double() - y.double()).abs().max() / y.double().abs().max().clamp_min(1e-30)
            worst = max(worst, float(gap))
    return worst


def _dense(t: torch.Tensor | None) -> torch.Tensor | None:
    """Gradients of sparse embeddings, and adjacency matrices, are compared as what they stand for."""
    return t if t is None or t.layout == torch.strided else t.detach().to_dense()


@contextlib.contextmanager
def plain_checkpoints() -> Iterator[None]:
    """torch.utils.checkpoint changes batch norm's statistics twice a step; the reference changes them once."""
    original = torch.utils.checkpoint.checkpoint
    torch.utils.checkpoint.checkpoint = lambda f, *args, use_reentrant=None, preserve_rng_state=True, **kwargs: f(
        *args, **kwargs
    )
    try:
        yield
    finally:
        torch.utils.checkpoint.checkpoint = original


def fresh(built: Any) -> Any:
    model, args, kwargs = copy.deepcopy(built)
    for t, u in zip(tensors_of((args, kwargs)), tensors_of(built[1:]), strict=True):
        t.requires_grad_(u.requires_grad)
    return model, args, kwargs


def moved(built: Any, device: str) -> Any:
    """The case on ``device``."""
    if device == "cpu":
        return built
    leaves, spec = flatten(built[1:])
    there = [
        t.to(device).detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in leaves
    ]
    return (built[0].to(device), *unflatten(there, spec))


def run(cases: Path, name: str, device: str = "cpu", compiled: bool = False) -> dict[str, Any]:
    """The figures of one case; ``miss`` says what went wrong, or is empty."""
    row: dict[str, Any] = {"case": name, "miss": ""}
    start = time.perf_counter()
    try:
        _figures(moved(load(cases).build(name), device), row, compiled)
    except Exception as error:  # noqa: BLE001 - whatever a model throws is a line of the table
        row["error"] = f"{type(error).__name__}: {error}"
        row["miss"] = "" if REFUSED.get(name) == type(error).__name__ else "error"
        traceback.print_exc()
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def _figures(built: Any, row: dict[str, Any], compiled: bool) -> None:
    seeds: dict[int, torch.Tensor] = {}
    eager, again = fresh(built), fresh(built)
    with plain_checkpoints():
        expected = step(eager[0], *eager, seeds)
        repeated = step(again[0], *again, seeds)
    model, args, kwargs = fresh(built)
    start = time.perf_counter()
    options: dict[str, Any] = {"compile": True, "costs": "flops"} if compiled else {}
    rk = Rockmate(model, args, "100 TiB", sample_kwargs=kwargs, cache=False, **options)
    unchanged = partial(preserved, model, tensors_of((args, kwargs)), [name for name, _ in model.named_parameters()])
    with unchanged():
        bare(rk, args, kwargs, seeds)  # what forward makes at its first call may ask for another plan
    forget_gradients(model, args, kwargs)
    with unchanged():
        kept = step(rk, model, args, kwargs, seeds)  # makes the plan for the values that this seed brings
    if compiled:
        row["from_eager"] = max(difference(kept[what], expected[what]) for what in ("outputs", "gradients", "buffers"))
        row["pieces"] = getattr(rk.plan, "pieces", "").partition("\n")[0]
        expected = repeated = kept
    del kept  # a step that holds its outputs is another one
    forget_gradients(model, args, kwargs)
    row["graph_seconds"] = round(time.perf_counter() - start, 1)
    row["followed"] = rk.reason  # why the model is not one graph
    if isinstance(rk.plan, Plan):
        graphs = rk._last.planner.graphs
        sizes = [b - a for a, b in graphs.S.blocks]
        row.update(operations=len(graphs.D.nodes), nodes=len(graphs.S.nodes), blocks=len(sizes), largest=max(sizes))
        row["classes"] = len(set(graphs.classes))
    else:
        row.update(operations=len(rk.plan.problem.nodes), nodes=0, blocks=0, largest=0, classes=0)
    start = time.perf_counter()
    frontier = rk.frontier()
    rk.budget = (frontier.min_budget + frontier.max_budget) // 2
    row["solve_seconds"] = round(time.perf_counter() - start, 1)
    row.update(min=frontier.min_budget, max=frontier.max_budget, budget=rk.budget, predicted=rk.plan.predicted_peak)
    row["overhead"] = rk.plan.predicted_overhead
    found = step(rk, model, args, kwargs, seeds)
    for what in found:
        gap, own = difference(found[what], expected[what]), difference(repeated[what], expected[what])
        row[what] = gap
        if gap > 2 * own:
            row["miss"] += f" {what} {gap:.1e} (eager itself {own:.1e})"
    del found, expected, repeated, eager, again

    forget_gradients(model, args, kwargs)
    bare(rk, args, kwargs, seeds)  # what forward made at its first call may ask for another plan
    forget_gradients(model, args, kwargs)
    row["measured"] = measure_peak(lambda: bare(rk, args, kwargs, seeds), rk)
    row["plans"] = rk.plans_made
    if row["measured"] > row["budget"]:
        row["miss"] += f" peak {row['measured']} above the budget {row['budget']}"


def forget_gradients(model: torch.nn.Module, args: Any, kwargs: Any) -> None:
    for t in (*model.parameters(), *tensors_of((args, kwargs))):
        t.grad = None


def bare(rk: Rockmate, args: Any, kwargs: Any, seeds: dict[int, torch.Tensor]) -> None:
    """A step that keeps nothing of its own."""
    torch.manual_seed(1)
    outputs = tensors_of(rk(*args, **kwargs))
    ends = [(k, t) for k, t in enumerate(outputs) if t.requires_grad]
    torch.autograd.backward([t for _, t in ends], [seeds[k] for k, _ in ends])


def show(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['case']:30} {'MISS' if row['miss'] else 'refused'} {row['error'][:150]} ({row['seconds']} s)"
    return (
        f"{row['case']:30} {'MISS' + row['miss'] if row['miss'] else 'ok':6} ops {row['operations']:5} "
        f"S {row['nodes']:4} "
        f"blocks {row['blocks']:3}/{row['classes']:2} largest {row['largest']:3} "
        f"{'followed ' if row['followed'] else ''}"
        f"{'from eager {from_eager:.1e}, pieces {pieces} '.format(**row) if 'pieces' in row else ''}"
        f"budget {row['budget']:>11,} of {row['max']:>11,} measured {row['measured'] / row['budget']:.3f} overhead "
        f"{100 * row['overhead']:5.1f} % graphs {row['graph_seconds']} solve {row['solve_seconds']} "
        f"all {row['seconds']} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases; all by default")
    parser.add_argument("--cases", type=Path, default=CASES, help="the file that builds the models")
    parser.add_argument("--device", default="cpu", help="where they run")
    parser.add_argument("--compile", action="store_true", help="with compiled pieces")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    names = options.names or load(options.cases).names()
    rows = []
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=8) as pool:
        for row in pool.imap(_one, [(options.cases, name, options.device, options.compile) for name in names]):
            rows.append(row)
            print(show(row), flush=True)
    missed = [row["case"] for row in rows if row["miss"]]
    print(
        f"{len(rows) - len(missed)} of {len(rows)} cases as they should be" + (f"; missed: {missed}" if missed else "")
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if missed else 0


def _one(job: tuple[Path, str, str, bool]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return run(*job)


if __name__ == "__main__":
    sys.exit(main())
