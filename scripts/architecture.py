"""The example of ARCHITECTURE.md: one small model at every stage, as text.

    python scripts/architecture.py           print it
    python scripts/architecture.py --write   put it between the markers of ARCHITECTURE.md

A test compares the document with what this file makes.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from rkgb import Graphs, make_all_graphs
from rockmate import Plan, Rockmate
from rockmate.run.compiled import compile_schedule
from rockmate.run.program import HandOver, Program
from solvers import Run

DOCUMENT = Path(__file__).resolve().parent.parent / "ARCHITECTURE.md"
BUDGET = "35 KiB"


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(x))
        y = F.gelu(self.down(h))
        return y.flatten()


def make_plan() -> Plan:
    """The plan of the example."""
    return Rockmate(TwoLayers(), torch.randn(64, 8), BUDGET, costs="flops", cache=False).plan


def make_sections() -> dict[str, str]:
    """The text of every stage, by the name in its marker."""
    graphs = make_all_graphs(TwoLayers(), torch.randn(64, 8), costs="flops")
    plan = make_plan()
    return {
        "model": inspect.getsource(TwoLayers),
        "B": str(graphs.B),
        "D": str(graphs.D),
        "S": str(graphs.S),
        "K": str(graphs.K),
        "costs": "\n".join(_costs(graphs)),
        "plan": "\n".join(line for line in str(plan).splitlines() if not line.startswith("set-up")),
        "schedule": plan.program(),
        "program": "\n".join(_program(plan, compile_schedule(plan.graph, plan.schedule))),
    }


def _costs(graphs: Graphs) -> Iterator[str]:
    """The costs of the nodes of K as a table."""
    row = "{:<10}{:>14}{:>14}{:>15}{:>18}{:>16}{:>17}".format
    yield row(
        "node", "forward time", "forward peak", "backward time", "gradients before", "gradients peak", "gradients after"
    )
    for node in graphs.K.nodes:
        b = node.backward
        yield row(node.name, node.time, node.peak, *((b.time, b.before, b.peak, b.after) if b else 4 * ("",)))


def _program(plan: Plan, program: Program) -> Iterator[str]:
    """What the executor does beside running the nodes in order."""
    names, data = [n.name for n in plan.graph.nodes], [d.name for d in plan.graph.data]
    for i, code in enumerate(program.nodes):
        kept = "autograd keeps what it saves" if code.first.native else "autograd keeps slots"
        dropped = "".join(f", then drop {program.s.shown[v]}" for v in code.first.dead_values)
        yield f"forward {names[i]}: {kept}{dropped}"
    given = set(program.handed_over)
    if given:
        yield f"end of the forward: leave {', '.join(data[d] for d in program.handed_over)} to autograd"
    for i, steps in zip(program.stages, program.before, strict=True):
        told = []
        for step in steps:
            if isinstance(step, Run):
                told.append(f"run {names[step.node]} again")
            elif isinstance(step, HandOver):
                told.append(f"leave {data[step.data]} to autograd")
                given.add(step.data)
            elif step.data not in given:
                told.append(f"drop {data[step.data]}")
        yield f"before backward {names[i]}: {', '.join(told)}"


def fill(document: str) -> str:
    """``document`` with the text of every stage between its markers."""
    sections = make_sections()

    def put(match: re.Match[str]) -> str:
        name = match[1]
        kind = "python" if name in ("model", "schedule") else "text"
        return f"<!-- generated: {name} -->\n```{kind}\n{sections.pop(name).rstrip()}\n```\n<!-- end: {name} -->"

    filled = re.sub(r"<!-- generated: (\w+) -->.*?<!-- end: \1 -->", put, document, flags=re.DOTALL)
    if sections:
        raise ValueError(f"the document has no markers for {', '.join(sections)}")
    return filled


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(fill(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        for title, text in make_sections().items():
            print(f"# {title}\n{text.rstrip()}\n")
