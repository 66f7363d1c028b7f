"""At this memory, how much slower? What people use today to save memory, and Rockmate at no more memory.

    OMP_NUM_THREADS=1 python benchmarks/peers.py [--models GPT ViT …] [--processes 2] [--rounds 3] [--quick]
    python benchmarks/peers.py --peers compile  # measures these methods anew; the other results stay
    python benchmarks/peers.py --shares     # adds plans for shares of the activation memory to results that are there
    python benchmarks/peers.py --page       # writes the pages from the results that are there

For each model a worker process measures bytes and FLOPs of a step with each method, then of ours with the method's
measured peak as its budget. Further processes time the steps: each method's beside eager mode's and ours, in turns; all
times are ratios to the eager step just before. All of them run with one thread and the same settings of glibc. Results
go to benchmarks/results/peers.json after each model; the tables and plots beside it and docs/peers.md are written from
them. Exit status 1 if one of our peaks exceeds its budget or one of our gradients differs from eager mode's in a bit.
What a model or method lacks (a library, a compiler) is said in the results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the packages need not be installed

from peers_run.points import broken, budgets_beside, merged
from peers_run.report import write

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "peers.md"
QUICK = ("chain of small mixers",)
QUICK_PEERS = ("checkpoint, every block", "checkpoint_sequential")
COMPILED = (0.1, 0.3, 0.5, 0.7, 0.9)
"""The values of ``activation_memory_budget`` that are compiled on a CPU, where one takes minutes."""


def worker(options: argparse.Namespace) -> Any:
    """What the parent asked for, in this process."""
    import torch
    from peers_run.measure import Settings, bytes_and_flops, shares, times

    asked = json.loads(options.worker)
    settings = Settings(
        asked["scale"],
        torch.device(asked["device"]),
        asked["backend"],
        asked["budgets"],
        Path(asked["cache"]),
        asked["rounds"],
        asked["only"],
    )
    if asked["device"] == "cpu":
        torch.set_num_threads(1)
    if "known" in asked:
        return shares(settings, asked["model"], asked["known"])
    if "peers" in asked:
        return times(settings, asked["model"], asked["peers"], asked["more"])
    return bytes_and_flops(settings, asked["model"], not asked["add"])


def run(asked: dict[str, Any], limit: float) -> Any:
    """A worker's results; raises ``RuntimeError`` with the end of what it said if it fails."""
    from rockmate.demo.compare import MALLOC

    folder = Path(asked["cache"])
    folder.mkdir(exist_ok=True)
    environment = os.environ | MALLOC | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor"), "ROCKMATE_CACHE": "off"}
    out = folder / "result.json"
    command = [sys.executable, __file__, "--worker", json.dumps(asked), "--out", str(out)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took more than {limit:.0f} seconds") from None
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or "no message").splitlines()[-1])
    return json.loads(out.read_text())


def asked_of(name: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """What a worker is asked for."""
    from peers_run.methods import BUDGETS

    return {
        "model": name,
        "scale": options.scale,
        "device": options.device,
        "backend": options.backend,
        "budgets": options.budgets
        if options.budgets is not None
        else (COMPILED if options.device == "cpu" else BUDGETS),
        "cache": str(Path(folder) / name.replace(" ", "_")),
        "rounds": options.rounds,
        "only": options.peers,
    }


def shares_of(name: str, options: argparse.Namespace, folder: str, found: dict[str, Any]) -> Any:
    """Plans for shares of the activation memory that was ``found`` before."""
    known = {key: found[key] for key in ("parameters", "eager")}
    return run({**asked_of(name, options, folder), "known": known}, options.limit)


def one_model(name: str, options: argparse.Namespace, folder: str, add: bool = False) -> dict[str, Any]:
    """Bytes first, then times, in processes of their own. ``add``: to what is known of the model."""
    asked = asked_of(name, options, folder)
    start = time.time()
    found = run({**asked, "add": add}, options.limit)
    peers = budgets_beside(found["points"])
    more = [row["budget"] for row in found["ours_in_time"] if "peak" in row]
    runs = [run({**asked, "peers": peers, "more": more}, options.limit) for _ in range(options.processes)]
    found["times"] = {key: [[round(t, 5) for t in pair] for r in runs for pair in r[key]] for key in runs[0]}
    found["budgets"] = asked["budgets"]
    found["seconds"] = time.time() - start
    return found


def added(name: str, options: argparse.Namespace, folder: str, known: dict[str, Any]) -> dict[str, Any]:
    """What is ``known`` of a model with some methods measured anew; if that fails, with the reason in their place."""
    try:
        found = one_model(name, options, folder, add=True)
    except RuntimeError as error:
        why = {"left_out": [{"peer": family, "why": str(error)} for family in options.peers]}
        found = {"points": [], "times": {}, "budgets": known["budgets"], "seconds": "failed", **why}
    return merged(known, found, options.peers)


def environment(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    import torch

    return {
        "device": options.device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": 1,
        "compiler": options.backend,
        "why": options.why,
        "processes": options.processes,
        "rounds": options.rounds,
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="by name; all by default")
    parser.add_argument("--peers", nargs="+", default=[], help="how names of methods begin; all by default")
    parser.add_argument("--processes", type=int, default=2, help="in which times are measured")
    parser.add_argument("--rounds", type=int, default=3, help="of interleaved steps in each process")
    parser.add_argument("--budgets", type=float, nargs="*", help="of activation_memory_budget, for all models")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one process")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few peers, few steps")
    parser.add_argument(
        "--shares", action="store_true", help="only plan for shares of the memory, beside what is known"
    )
    parser.add_argument("--page", action="store_true", help="only write the pages")
    parser.add_argument("--out", type=Path, default=RESULTS / "peers.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    compiler = shutil.which("g++") or shutil.which("clang++") or options.device != "cpu"
    options.backend = "inductor" if compiler else "aot_eager_decomp_partition"
    options.why = "" if compiler else "there is no C++ compiler: compiled methods run on eager mode's kernels"
    options.scale = "cpu" if options.device == "cpu" else "gpu"
    if options.quick:
        options.scale, options.processes, options.rounds, options.peers = "tiny", 1, 2, options.peers or QUICK_PEERS
    return options


def main() -> int:
    """Measure models one after the other; add them to the results."""
    options = parsed()
    if options.worker:
        options.out.write_text(json.dumps(worker(options)))
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(options.out.read_text()) if options.out.exists() else {"models": {}}
    if not options.page:
        from peers_run.models import MODELS

        if options.peers and "environment" in results:
            results.setdefault("added", {})[" ".join(options.peers)] = environment(options)
        elif not options.shares:
            results["environment"] = environment(options)
        with tempfile.TemporaryDirectory() as folder:
            names = options.models or (QUICK if options.quick else MODELS)
            if unknown := [n for n in names if n not in (results["models"] if options.shares else MODELS)]:
                raise SystemExit(f"{options.out if options.shares else 'peers_run/models.py'} has no {unknown[0]}")
            for name in names:
                try:
                    if options.shares:
                        results["models"][name] |= {"shares": shares_of(name, options, folder, results["models"][name])}
                    elif options.peers and "points" in results["models"].get(name, ()):
                        results["models"][name] = added(name, options, folder, results["models"][name])
                    else:
                        results["models"][name] = one_model(name, options, folder)
                except RuntimeError as error:
                    if options.shares:
                        raise
                    results["models"][name] = {"error": str(error)}
                results["models"] = {n: results["models"][n] for n in MODELS if n in results["models"]}
                results["not_run"] = [n for n in MODELS if n not in results["models"]]
                options.out.write_text(json.dumps(results, indent=1) + "\n")
                print(f"{name}: {results['models'][name].get('seconds', 'failed')}", flush=True)
    page = PAGE if options.out == RESULTS / "peers.json" else options.out.with_name("page.md")
    write(results, options.out.parent, page)
    wrong = broken(results)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
