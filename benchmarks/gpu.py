"""Everything that only a GPU shows, in one run of at most ten minutes on a machine that has nothing but torch.

Sections, the most valuable first: versions, tests, zoo (results against eager mode), bytes (promised and allocated),
scripts (training plainly and attached), time (beside torch's own ways to save memory), launch (does a step wait for
Python), fits (the largest batch), peers (the measurements of peers.py). Each part of a section is a process of its own
with a deadline; what hangs or crashes is recorded, and the rest runs. Results are JSON lines, appended as they come.
``--dry`` runs all of it at toy sizes on the CPU.

    python benchmarks/gpu.py --out results.jsonl [--sections zoo,bytes] [--seconds 600] [--limit time=60] [--dry]
    python benchmarks/gpu.py --page results.jsonl > gpu.md

Beside torch it needs what rockmate does (see pyproject.toml). torchvision, transformers and pytest
are used where they are installed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the packages need not be installed

from gpu_run.page import page
from gpu_run.runner import SECTIONS, Run, end_with_parent


def child(options: argparse.Namespace) -> None:
    """One part of a section, in this process."""
    end_with_parent()
    import torch
    from gpu_run.context import Context

    from rkgb.device import default_device

    name = options.device or ("cpu" if options.dry else default_device())
    if name == "cpu" and not options.dry:
        sys.exit("there is no GPU here: --dry runs everything at toy sizes on the CPU")
    section = next(s for s in SECTIONS if s.name == options.child)
    module = importlib.import_module(f"gpu_run.{section.module}")
    device = torch.device(name if name == "cpu" or ":" in name else f"{name}:0")
    module.run(Context(section.name, options.part, device, options.dry, options.out, options.end))


def main() -> int:
    """Run sections, or print the page of what they wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="the results, appended to")
    parser.add_argument("--sections", help="names with commas between them; all by default")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all of it")
    parser.add_argument("--limit", action="append", default=[], metavar="SECTION=SECONDS", help="for each of its parts")
    parser.add_argument("--dry", action="store_true", help="toy sizes, on the CPU")
    parser.add_argument("--device", default="", help="by default the GPU, or the CPU of a dry run")
    parser.add_argument("--jobs", type=int, default=0, help="processes at the same time where no time is measured")
    parser.add_argument("--page", type=Path, metavar="RESULTS", help="print these results as Markdown")
    for name in ("child", "part"):
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.page:
        print(page(options.page), end="")
        return 0
    if options.child:
        child(options)
        return 0
    named = options.sections.split(",") if options.sections else [s.name for s in SECTIONS]
    unknown = [
        n for n in (*named, *(x.partition("=")[0] for x in options.limit)) if n not in {s.name for s in SECTIONS}
    ]
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; there are {', '.join(s.name for s in SECTIONS)}")
    limits = {name: float(seconds) for name, _, seconds in (x.partition("=") for x in options.limit)}
    jobs = options.jobs or max(2, min(13, (os.cpu_count() or 1) - 2))
    sections = [s for s in SECTIONS if s.name in named]
    Run(sections, options.out.resolve(), options.seconds, options.dry, options.device, jobs, limits)()
    return 0


if __name__ == "__main__":
    sys.exit(main())
