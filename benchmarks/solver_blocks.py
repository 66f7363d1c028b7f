"""The blocks of real models, and chains of them, solved: every grid point, plans against proven bounds, tables.

    python benchmarks/solver_blocks.py [--models gpt2 resnet50 ...] [--costs flops] [--short] [--out FILE] [--dump DIR]

Models have random weights. Needs torchvision and timm for all but gpt2. What is measured:

- ``blocks``: every point of the default grid of options, and of a denser grid with limited peaks; per class and in all;
- ``chains``: the planner's cost for a range of budgets, the proven lower bound, the gap between the two, and both
  again after the whole-graph program;
- ``whole``: a chain of five GPT-2 layers against the bound of the whole-graph program, given its time;
- ``tables``: the dynamic program on made-up chains of 200 blocks with 20 options, and of 339 with one.

One solver thread. Seconds of points and tables are CPU time, others wall time. ``--short`` is for tests: a small
model and few points.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rockmate.demo.gpt import GPT
from rockmate.planning.options import PlanOptions
from rockmate.planning.prepare import make_planner
from solvers import ChainPlanner, Grid, InfeasibleError, Problem, improve, keep_everything, solve, walk, write_problem
from solvers.block.block import Option
from solvers.block.ilp import Point, grid_points
from solvers.chain.costs import ChainCosts, kind_views
from solvers.chain.table import ChainTable

Json = dict[str, Any]

DENSE = Grid(
    saves=(0.95, 0.75, 0.4, 0.15, 0.0), stride=1, peaks=(0.15, 0.3, 0.5, 0.8), fresh_peaks=(0.5, 0.3, 0.15), threads=1
)
"""More points with a limited peak than any plan is made from."""

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15)
"""Fractions of the way from the least that any schedule needs to what keeping everything needs."""

_OPERATORS: list[torch.library.Library] = []


def _vision() -> Any:
    """torchvision; where its compiled operators do not load, the schemas that it looks up are defined."""
    try:
        import torchvision  # noqa: F401
    except (OSError, RuntimeError):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _OPERATORS.append(library)
    from torchvision import models

    return models


def _mixer() -> torch.nn.Module:
    _vision()  # timm imports torchvision where it is installed
    import timm

    model: torch.nn.Module = timm.create_model("mixer_s32_224", pretrained=False)
    return model


def _gpt(layers: int = 12) -> tuple[torch.nn.Module, torch.Tensor]:
    return GPT(layers, 256, 4, 256, 1024), torch.randint(0, 1024, (8, 256))


def _images(model: torch.nn.Module, size: int, batch: int = 8) -> tuple[torch.nn.Module, torch.Tensor]:
    return model, torch.randn(batch, 3, size, size)


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor]]] = {
    "gpt2": _gpt,
    "resnet50": lambda: _images(_vision().resnet50(weights=None), 128),
    "regnet_x_3_2gf": lambda: _images(_vision().regnet_x_3_2gf(weights=None), 128),
    "vit": lambda: _images(
        _vision().VisionTransformer(
            image_size=128, patch_size=16, num_layers=12, num_heads=4, hidden_dim=256, mlp_dim=1024, dropout=0.1
        ),
        128,
    ),
    "swin_t": lambda: _images(_vision().swin_t(weights=None), 128),
    "mixer": lambda: _images(_mixer(), 224),
}


def problem_of(model: torch.nn.Module, sample: torch.Tensor, costs: str) -> Problem:
    """The problem of one training step, gradients of parameters being there beforehand."""
    model.train()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return make_planner(model, sample, PlanOptions(costs)).problem


def load(name: str, costs: str = "flops") -> Problem:
    """The problem of one of ``MODELS``."""
    torch.manual_seed(0)
    return problem_of(*MODELS[name](), costs)


def summary(points: list[Point]) -> Json:
    """How many points, how many of them proven (infeasible ones are), and their seconds."""
    proven = sum(p.solved is None or p.solved.optimal for p in points)
    seconds = [p.seconds for p in points]
    gaps = [(p.solved.time - p.solved.bound) / max(1, p.solved.time) for p in points if p.solved]
    return {
        "points": len(points),
        "infeasible": sum(p.solved is None for p in points),
        "proven": proven,
        "worst_gap": max(gaps, default=0.0),
        "median_seconds": statistics.median(seconds),
        "worst_seconds": max(seconds),
        "seconds": sum(seconds),
    }


def blocks(problem: Problem, grids: dict[str, Grid]) -> Json:
    """Every point of ``grids`` for one block of each class."""
    views = kind_views(problem)
    found: Json = {"nodes": len(problem.nodes), "blocks": len(problem.blocks), "classes": len(views)}
    for name, grid in grids.items():
        points = {kind: grid_points(view, grid) for kind, view in views.items() if any(n.rerun for n in view.nodes)}
        found[name] = summary([p for of_kind in points.values() for p in of_kind])
        found[name]["by_class"] = [
            {"class": kind, "nodes": len(views[kind].nodes), **summary(of_kind)} for kind, of_kind in points.items()
        ]
    return found


def chain(problem: Problem, fractions: tuple[float, ...], seconds: float) -> list[Json]:
    """The planner's plans, with the proven bound for each budget; one planner for all of them.

    ``improved``: what the whole-graph program makes of them, and proves, in at most ``seconds`` each.
    """
    keep = walk(problem, keep_everything(problem)).peak
    planner = ChainPlanner(problem, grid=Grid(threads=1))
    least = planner.frontier().lower
    rows: list[Json] = []
    for fraction in fractions:
        budget = round(least + fraction * (keep - least))
        start = time.perf_counter()
        try:
            plan = planner.solve(budget)
        except InfeasibleError as error:
            rows.append({"fraction": fraction, "budget": budget, "least": error.min_budget})
            continue
        middle = time.perf_counter()
        bound = planner.lower_bound(budget)
        end = time.perf_counter()
        better, higher = improve(problem, plan, budget, seconds)
        rows.append(
            {
                "fraction": fraction,
                "budget": budget,
                "of_keep_everything": budget / keep,
                "peak": plan.peak,
                "overhead": plan.overhead,
                "bound": bound / problem.eager_time - 1,
                "gap": (plan.time - bound) / plan.time,
                "seconds": middle - start,
                "bound_seconds": end - middle,
                "improved_overhead": better.overhead,
                "improved_bound": higher / problem.eager_time - 1,
                "improved_gap": (better.time - higher) / better.time,
                "improved_seconds": time.perf_counter() - end,
            }
        )
    return rows


def whole(problem: Problem, fractions: tuple[float, ...], seconds: float) -> list[Json]:
    """The chain's plan against the whole-graph program's best schedule and bound."""
    keep = walk(problem, keep_everything(problem)).peak
    rows = []
    for fraction in fractions:
        budget = round(fraction * keep)
        ours, ilp = (solve(problem, budget, name, time_limit=seconds) for name in ("rotor", "checkmate"))
        rows.append(
            {
                "of_keep_everything": fraction,
                "chain": None if ours.cost is None else ours.cost / problem.eager_time - 1,
                "chain_seconds": ours.seconds,
                "ilp": None if ilp.cost is None else ilp.cost / problem.eager_time - 1,
                "ilp_bound": ilp.bound / problem.eager_time - 1,
                "ilp_status": ilp.status,
                "ilp_seconds": ilp.seconds,
                "chain_over_ilp_bound": None if ours.cost is None else ours.cost / ilp.bound - 1,
            }
        )
    return rows


def made_up_costs(count: int, options: int) -> ChainCosts:
    """A heterogeneous chain of ``count`` blocks with ``options`` each."""
    draw = random.Random(0)
    of_all = []
    for _ in range(count):
        size, duration = draw.randint(10**6, 10**7), draw.randint(10**6, 10**7)
        steps = [k / options for k in range(options)]
        of_all.append(
            tuple(
                Option((), int(size * (1 - x)), size, size, int(duration * x), duration, False, True, 0) for x in steps
            )
        )
    stored = [draw.randint(10**5, 10**6) for _ in range(count + 1)]
    interfaces = tuple(tuple(stored[k] if k > i else 0 for k in range(count + 1)) for i in range(count))
    sizes, times = zip(*((of[0].save, of[0].forward_time) for of in of_all), strict=True)
    gradients = tuple(stored[:-1])
    return ChainCosts(tuple(of_all), interfaces, sizes, times, (0,) * count, gradients, gradients, 0)


def table(count: int, options: int, slots: int) -> Json:
    """One table for a made-up chain."""
    costs = made_up_costs(count, options)
    unit = -(-costs.keep_everything_need() // slots)
    start = time.process_time()
    found = ChainTable(costs, unit, slots)
    seconds = time.process_time() - start
    return {"blocks": count, "options": options, "slots": slots, "seconds": seconds, "optima": len(found.breakpoints())}


def short() -> Json:
    """A little of everything, in seconds."""
    torch.manual_seed(0)
    problem = problem_of(GPT(2, 32, 2, 16, 64), torch.randint(0, 64, (2, 16)), "flops")
    few = Grid(saves=(0.5, 0.0), peaks=(0.5,), fresh_peaks=(0.5,), stride=1, threads=1)
    return {
        "blocks": {"gpt2 (2 layers)": blocks(problem, {"options": few})},
        "chains": {"gpt2 (2 layers)": chain(problem, (0.9, 0.5), 2.0)},
        "whole": whole(problem, (0.9,), 10.0),
        "tables": [table(20, 5, 100)],
    }


def full(names: list[str], costs: str, dump: Path | None, out: Path) -> Json:
    """Everything; prints and writes as it goes."""
    found: Json = {"costs": costs, "blocks": {}, "chains": {}}
    grids = {"options": Grid(threads=1), "dense": DENSE}
    for name in names:
        problem = load(name, costs)
        if dump:
            write_problem(problem, dump / f"{name}.json")
        found["blocks"][name] = blocks(problem, grids)
        found["chains"][name] = chain(problem, BUDGETS, 2.0)
        _show(name, found["blocks"][name], found["chains"][name])
        _write(found, out)
    torch.manual_seed(0)
    found["whole"] = whole(problem_of(*_gpt(5), costs), (0.8, 0.5, 0.3, 0.25), 60.0)
    found["tables"] = [table(200, 20, 500), table(339, 1, 500)]
    for row in (*found["whole"], *found["tables"]):
        print({key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()})
    return found


def _show(name: str, of_blocks: Json, of_chain: list[Json]) -> None:
    print(f"{name}: {of_blocks['nodes']} nodes, {of_blocks['blocks']} blocks, {of_blocks['classes']} classes")
    for grid in ("options", "dense"):
        s = of_blocks[grid]
        print(
            f"  {grid}: {s['proven']} of {s['points']} points proven ({s['infeasible']} infeasible), median "
            f"{s['median_seconds']:.3f} s, worst {s['worst_seconds']:.2f} s, all {s['seconds']:.2f} s"
        )
    for row in of_chain:
        if "gap" not in row:
            print(f"  budget {row['budget']}: the planner needs {row['least']}")
            continue
        print(
            f"  {100 * row['of_keep_everything']:5.1f} % of keep everything: overhead {100 * row['overhead']:6.2f} %, "
            f"bound {100 * row['bound']:6.2f} %, gap {100 * row['gap']:.2f} % of the step, {row['seconds']:.2f} s; "
            f"improved {100 * row['improved_overhead']:6.2f} %, gap {100 * row['improved_gap']:.2f} %, "
            f"{row['improved_seconds']:.1f} s"
        )


def _write(found: Json, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--costs", choices=("flops", "measured"), default="flops")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--dump", type=Path, help="write the problems here")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "solver_blocks.json")
    options = parser.parse_args(argv)
    found = short() if options.short else full(options.models, options.costs, options.dump, options.out)
    _write(found, options.out)


if __name__ == "__main__":
    main()
