"""Random small modules under random budgets: results are eager mode's and peaks are within budgets, or it is a find.

    OMP_NUM_THREADS=1 python benchmarks/random_modules.py [--examples 1000] [--seed 0] [--jobs 2] [--way WAY] [--out F]
    python benchmarks/random_modules.py --join FILE FILE … --out FILE
    python benchmarks/random_modules.py --number NUMBER [--way WAY]

``tests/random_modules.py`` makes the modules: tens of kinds of operations, in any order, on tiny tensors. Each is
trained for some steps in eager mode, by ``attach`` whose budget is set later, by ``attach`` with a budget in bytes, and
by a ``Rockmate`` if it is one graph. Budgets are between the least that can be planned and eager mode's peak. Outputs,
losses, gradients, parameters, buffers, attributes and states of generators are compared after each step, bit for bit;
the peak of the last one is measured. Prints a table of verdicts with their reasons, and one of the kinds of operations.
A find is made smaller and printed as a program. Exit status 1 if there is one. ``--number`` shows one module and what
came of it. ``--join`` makes one of the results of several runs, of other seeds each. With ``--way compiled`` pieces are
compiled, and results under a budget are compared with those under one for which nothing runs again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the packages need not be installed

import torch
from random_modules import RandomModule, random_module
from random_training import WAYS, Outcome, fraction_of, lasting, outcome_of, reference, smallest, sort_of, ways_of

from solvers.tables import text_table

RENEWED = 50
"""Modules that one process trains at most: TorchDynamo keeps what it captured."""

NUMBERS = 10**6
"""Modules of one seed."""


def outcomes(module: RandomModule, ways: list[str]) -> list[Outcome]:
    """What comes of the module in each of the ways."""
    like = {kind: kind(module.source) for kind in set(map(reference, ways))}
    return [outcome_of(like[reference(way)], way, fraction_of(module, way)) for way in ways]


def rows(numbers: range, ways: list[str] | None) -> list[dict[str, Any]]:
    """What came of the modules of these numbers in these ways, or in all with eager kernels."""
    torch.set_num_threads(1)
    with lasting():
        return [_row(number, ways) for number in numbers]


def _row(number: int, ways: list[str] | None) -> dict[str, Any]:
    """What came of module ``number``, with its finds made smaller."""
    module = random_module(number)
    found = outcomes(module, ways or ways_of(module))
    finds = [_find(module, o) for o in found if o.verdict == "failed"]
    return {
        "number": number,
        "kinds": module.kinds,
        "outcomes": [vars(o) | {"sort": sort_of(o)} for o in found],
        "finds": finds,
    }


def _find(module: RandomModule, outcome: Outcome) -> dict[str, Any]:
    small = smallest(module, outcome)
    found = {"number": module.number, "way": outcome.way, "fraction": outcome.fraction, "reason": outcome.reason}
    print(shown(found | {"source": small.source}), flush=True)
    return found | {"source": small.source}


def shown(find: dict[str, Any]) -> str:
    """A find as a program, after what it is."""
    where = f"module {find['number']}, {find['way']}, budget at {find['fraction']}"
    return f"\n# {where}: {find['reason']}\n{find['source']}"


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all modules. ``verdicts``: of each way, and ``examples`` of modules that came to each."""
    every = [o | {"number": r["number"]} for r in found for o in r["outcomes"]]
    verdicts = {way: dict(Counter(o["sort"] for o in every if o["way"] == way).most_common()) for way in WAYS}
    planned = [o for o in every if o["verdict"] == "planned" and None not in (o["measured"], o["predicted"])]
    below = [o["predicted"] - o["measured"] for o in planned]
    return {
        "modules": len(found),
        "verdicts": verdicts,
        "examples": {o["sort"]: o["number"] for o in every if o["verdict"] != "planned"},
        "kinds": dict(Counter(kind for r in found for kind in r["kinds"]).most_common()),
        "measured": len(planned),
        "exact": sum(gap <= 0 for gap in below),
        "most below": max(below, default=0),
        "finds": [find for r in found for find in r["finds"]],
    }


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Summaries of several runs as one."""

    def total(counts: list[dict[str, int]]) -> dict[str, int]:
        return dict(sum(map(Counter, counts), Counter[str]()).most_common())

    return {
        "modules": sum(p["modules"] for p in parts),
        "verdicts": {way: total([p["verdicts"][way] for p in parts]) for way in WAYS},
        "examples": {sort: number for p in parts for sort, number in p["examples"].items()},
        "kinds": total([p["kinds"] for p in parts]),
        "measured": sum(p["measured"] for p in parts),
        "exact": sum(p["exact"] for p in parts),
        "most below": max(p["most below"] for p in parts),
        "finds": [find for p in parts for find in p["finds"]],
    }


def tables(found: dict[str, Any]) -> str:
    """The summary for people."""
    sorts = sorted({sort for counts in found["verdicts"].values() for sort in counts})
    counts = [
        [s, *(str(found["verdicts"][way].get(s, 0)) for way in WAYS), str(found["examples"].get(s, ""))] for s in sorts
    ]
    kinds = [[kind, str(count)] for kind, count in found["kinds"].items()]
    return (
        f"{text_table([['', *WAYS, 'for example'], *counts], left=[0])}\n\n"
        f"{text_table([['in so many modules', ''], *kinds], left=[0])}\n\n"
        f"{found['modules']} modules; predicted is measured in {found['exact']} of {found['measured']} steps, and at "
        f"most {found['most below']} bytes above; {len(found['finds'])} finds"
    )


def show(number: int, ways: list[str]) -> int:
    """One module and what comes of it."""
    module = random_module(number)
    print(module.source)
    found = outcomes(module, ways or ways_of(module))
    for outcome in found:
        print(outcome)
    return int(any(o.verdict == "failed" for o in found))


def searched(numbers: range, jobs: int, ways: list[str] | None) -> dict[str, Any]:
    """What came of the modules of these numbers."""
    parts = [numbers[k : k + RENEWED] for k in range(0, len(numbers), RENEWED)]
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        return summary([row for part in pool.imap(partial(rows, ways=ways), parts) for row in part])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000, help="how many modules")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, help="the results as JSON")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="results of earlier runs: train nothing")
    parser.add_argument("--number", type=int, help="show this module alone, as finds and tables name it")
    parser.add_argument("--way", choices=WAYS, action="append", help="train in this way alone")
    options = parser.parse_args()
    if options.number is not None:
        return show(options.number, options.way)
    if options.join:
        found = joined([json.loads(file.read_text()) for file in options.join])
    else:
        found = searched(
            range(options.seed * NUMBERS, options.seed * NUMBERS + options.examples), options.jobs, options.way
        )
    print(tables(found))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["finds"] else 0


if __name__ == "__main__":
    sys.exit(main())
