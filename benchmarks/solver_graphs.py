"""Whole graphs, solved: the public instances, synthetic ones, large ones, and how often the walker rejects.

    python benchmarks/solver_graphs.py [--graphs DIR] [--parts public large ...] [--seconds 60] [--short] [--out FILE]

- ``public``: every node-link graph in DIR at .9 and .8 of its no-recompute peak (some lower), solved by one thread of
  HiGHS: overhead, proven bound, gap, wall and CPU seconds, beside the best figures known from others;
- ``synthetic``: layered graphs of our own, likewise;
- ``large``: an encoder-decoder of 2,526 nodes at three budgets, with the memory of the planner;
- ``walker``: 20,000 generated graphs and training steps, each with a solver drawn at random; what the walker rejects
  would raise. It counts solutions by status;
- ``blocks``: all of ``benchmarks/solver_blocks.py``, which needs torch and writes its own results.

Wall time says little on a shared machine; CPU time is that of this process. ``--short`` is for tests.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from collections import Counter
from pathlib import Path
from typing import Any

from instances import encoder_decoder, layered, training_step

from solvers import GraphProblem, Problem, Solution, read_problem, solve, solver_names
from solvers.whole.stages import staged_graph, staged_step
from solvers.whole.whole_graph import least_step

ROOT = Path(__file__).resolve().parent.parent
KNOWN: dict[tuple[str, float], float] = {
    ("fcn8_train", 0.9): 0.029,
    ("fcn8_train", 0.8): 0.136,
    ("unet_train", 0.9): 1.129,
    ("unet_train", 0.8): 1.984,
    ("random_layered_100", 0.9): 0.789,
    ("random_layered_100", 0.8): 2.297,
    ("resnet50_train", 0.9): 0.108,
    ("resnet50_train", 0.8): 0.279,
    ("resnet50_train", 0.5): 1.50,
}
"""Overheads in percent: proven optima, for resnet50 the best known, as ``../shared/graphs/README.md`` quotes them."""

LOWER = {"resnet50_train": (0.7, 0.6, 0.5), "unet_train": (0.6, 0.5, 0.41), "fcn8_train": (0.7, 0.62)}
"""Smaller budgets, per graph, after .9 and .8 which all have."""

PARTS = ("public", "synthetic", "large", "walker", "blocks")
Json = dict[str, Any]


def keep_peak(problem: GraphProblem | Problem) -> int:
    peak = solve(problem, 2**62, "keep_all").peak
    assert peak is not None
    return peak


def row(name: str, problem: GraphProblem, fraction: float, seconds: float, solver: str = "auto") -> Json:
    """One solve, as a line of the table."""
    budget = int(fraction * keep_peak(problem))
    cpu = time.process_time()
    found = solve(problem, budget, solver, time_limit=seconds)
    eager = problem.eager_time or 1
    line: Json = {
        "graph": name,
        "nodes": len(problem.nodes),
        "budget": fraction,
        "solver": solver,
        "status": found.status,
        "overhead_percent": None if found.cost is None else 100 * (found.cost - eager) / eager,
        "bound_percent": 100 * (found.bound - eager) / eager,
        "gap_percent": None if found.cost is None else 100 * found.gap,
        "known_percent": KNOWN.get((name, fraction)),
        "wall_seconds": round(found.seconds, 3),
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "reason": found.reason,
    }
    cost = "-" if found.cost is None else f"{line['overhead_percent']:.4f}"
    print(
        f"{name:22s} {len(problem.nodes):5d} {fraction:5.2f} {found.status:10s} {cost:>9s} % "
        f">= {line['bound_percent']:8.4f} %  known {line['known_percent'] or '-'!s:>6}  "
        f"{found.seconds:7.2f} s wall {line['cpu_seconds']:7.2f} s CPU",
        flush=True,
    )
    return line


def public(folder: Path, seconds: float) -> list[Json]:
    """All graphs in ``folder``."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        problem = read_problem(path)
        for fraction in (0.9, 0.8, *LOWER.get(path.stem, ())):
            lines.append(row(path.stem, problem, fraction, seconds))
    return lines


def synthetic(counts: tuple[int, ...], seconds: float) -> list[Json]:
    """Layered graphs and encoder-decoders of our own, for where the public ones are not at hand."""
    lines = []
    for count in counts:
        lines += [row(f"layered_{count}", layered(count, 1), fraction, seconds) for fraction in (0.9, 0.8)]
    return lines


def large(layers: int, fractions: tuple[float, ...], seconds: float) -> list[Json]:
    """An encoder-decoder, planned by the whole-graph solver; the smallest budget also by the hierarchical one."""
    problem = encoder_decoder(layers)
    lines = []
    for fraction, solver in (*((f, "auto") for f in fractions), (fractions[-1], "hierarchical")):
        line = row(f"encoder_decoder_{layers}", problem, fraction, seconds, solver)
        line["planner_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        lines.append(line)
    return lines


def _drawn(draw: random.Random) -> GraphProblem | Problem:
    """A small problem of any kind."""
    seed = draw.randrange(2**31)
    kind = draw.randrange(100)
    if kind < 2:
        return encoder_decoder(1, batch=draw.choice((1, 2, 4)), length=draw.choice((16, 64, 256)))
    if kind < 60:
        return layered(draw.randrange(1, 20), seed)
    return training_step(draw.randrange(1, 7), seed)


def walker(count: int, seconds: float) -> Json:
    """``solve`` on ``count`` problems: it raises where the walker rejects, so that all of them pass or none."""
    draw = random.Random(0)
    seen: Counter[str] = Counter()
    walked = 0
    for _ in range(count):
        problem = _drawn(draw)
        staged = staged_graph(problem) if isinstance(problem, GraphProblem) else staged_step(problem)
        budget = draw.randint(least_step(staged)[0], keep_peak(problem))
        name = draw.choice(solver_names(problem))
        found: Solution = solve(problem, budget, name, time_limit=seconds)
        assert found.schedule is None or (found.peak or 0) <= budget
        walked += found.schedule is not None
        seen[f"{type(problem).__name__} {name} {found.status}"] += 1
    print(f"{count} problems, {walked} schedules walked, none rejected")
    return {"problems": count, "schedules": walked, "rejections": 0, "by_solver_and_status": dict(sorted(seen.items()))}


def _part(part: str, options: argparse.Namespace) -> Any:
    """What one part finds."""
    if part == "public":
        if options.graphs.is_dir():
            return public(options.graphs, options.seconds)
        print(f"public: no graphs in {options.graphs}; say where they are with --graphs")
        return f"not run: no directory {options.graphs}"
    if part == "synthetic":
        return synthetic((30, 60) if options.short else (100, 250, 500), options.seconds)
    if part == "large":
        return large(2, (0.5,), 5.0) if options.short else large(30, (0.7, 0.5, 0.3), 285.0)
    return walker(100 if options.short else 20_000, 0.5)


def main(arguments: list[str] | None = None) -> Json:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, default=ROOT.parent / "shared" / "graphs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=None)
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of one solve")
    parser.add_argument("--short", action="store_true", help="a minute in all, for tests")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "solver_graphs.json")
    options = parser.parse_args(arguments)
    parts = options.parts or (PARTS[:-1] if options.short else PARTS)
    found: Json = {"solver": "HiGHS, one thread", "seconds": options.seconds}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if part == "blocks":
            from benchmarks import solver_blocks

            solver_blocks.main([])
            continue
        found[part] = _part(part, options)
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
