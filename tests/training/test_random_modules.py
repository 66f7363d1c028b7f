"""Random small modules train as in eager mode, within their budgets; and what would be a find is found."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import random_training
import torch
from random_modules import Drawing, random_module
from random_operations import GROUPS
from random_training import Eager, Outcome, Training, fraction_of, lasting, outcome_of, smallest, sort_of, ways_of

ROOT = Path(__file__).parents[2]


OPEN: set[int] = set()
"""Modules with defects that are known and not mended."""


def test_a_hundred_modules() -> None:
    """``benchmarks/random_modules.py --number`` shows each of them."""
    verdicts: Counter[str] = Counter()
    finds: dict[int, str] = {}

    with lasting():
        for module in map(random_module, range(100)):
            ways = ways_of(module)
            way = ways[module.number % len(ways)]
            outcome = outcome_of(Eager(module.source), way, fraction_of(module, way))
            verdicts[outcome.verdict] += 1
            if outcome.verdict == "failed":
                finds[module.number] = f"{way}: {outcome.reason}"
    assert finds.keys() == OPEN, finds
    assert verdicts["planned"] > verdicts.total() / 2, verdicts


def test_a_module_is_a_program_and_the_same_each_time() -> None:
    module = random_module(1)
    assert module.source == random_module(1).source != random_module(2).source
    space: dict[str, Any] = {}
    exec(module.source, space)
    space["loss"](space["Net"]()(*space["batch"](0))).backward()


def test_each_operation_fits_somewhere() -> None:
    """None of the texts is one that never runs."""
    left = {operation for group, _ in GROUPS.values() for operation in group}
    for number in range(300):
        drawing = Drawing(random.Random(number))
        for _ in range(4):
            drawing.add()
        left = {operation for operation in left if not drawing.take(operation)}
    assert not left, [operation.text for operation in left]


def _judged(monkeypatch: pytest.MonkeyPatch, source: str, budget: int, then: Any = None) -> Outcome:
    """What comes of a way that is eager mode, but for what ``then`` does after two steps; its plan is none."""

    def way(training: Training, outcome: Outcome) -> Any:
        training.step()
        training.step()
        if then is not None:
            then(training)
        return SimpleNamespace(budget=budget, plan=None)

    monkeypatch.setitem(random_training.WAYS, "way", way)
    return outcome_of(Eager(source), "way", 1.0)


def test_eager_mode_is_no_find(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random_module(3).source
    assert _judged(monkeypatch, source, 2**30).verdict == "planned"


def _a_bit(training: Training) -> None:
    with torch.no_grad():
        p = next(p for p in training.model.parameters() if p.requires_grad)
        p.view(-1)[0] = torch.nextafter(p.view(-1)[0], torch.tensor(torch.inf))


def _a_count(training: Training) -> None:
    training.model.count += 1  # type: ignore[operator]


def _a_draw(training: Training) -> None:
    torch.rand(1)


@pytest.mark.parametrize(("then", "what"), [(_a_bit, "parameter"), (_a_count, "attribute"), (_a_draw, "generator")])
def test_what_is_not_eager_modes_is_found(monkeypatch: pytest.MonkeyPatch, then: Any, what: str) -> None:
    found = _judged(monkeypatch, random_module(3).source, 2**30, then)
    assert found.verdict == "failed"
    assert f"step 2: {what}" in found.reason


def test_a_peak_above_the_budget_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = Eager(random_module(3).source)
    assert _judged(monkeypatch, eager.source, eager.peak).verdict == "planned"
    found = _judged(monkeypatch, eager.source, eager.peak - 1)
    assert sort_of(found) == "failed: above the budget"


def test_a_find_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to the statements that it needs, and those that they need."""

    def then(training: Training) -> None:
        if "gelu" in training.source:
            raise ValueError("gelu")

    module = next(m for m in map(random_module, range(100)) if m.source.count("gelu") == 1 and len(m.statements) > 8)
    found = _judged(monkeypatch, module.source, 2**30, then)
    assert found.reason == "ValueError: gelu"
    small = smallest(module, found)
    assert "gelu" in small.source
    assert len(small.statements) < len(module.statements)
    assert all("gelu" not in s.source for s in small.smaller() if not Eager(s.source).fails)


def test_short_version_of_the_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "random_modules.json"
    command = [sys.executable, "benchmarks/random_modules.py", "--examples", "2", "--jobs", "1", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["modules"] == 2
    assert not found["finds"]
    assert sum(found["verdicts"]["attach"].values()) == 2
    for kind in random_module(0).kinds:
        assert found["kinds"][kind] >= 1
        assert kind in done.stdout
    both = tmp_path / "both.json"
    subprocess.run([*command[:2], "--join", out, out, "--out", both], cwd=ROOT, env=environment, check=True)
    joined = json.loads(both.read_text())
    assert (joined["modules"], joined["measured"]) == (4, 2 * found["measured"])
    assert joined["verdicts"]["attach"] == {sort: 2 * n for sort, n in found["verdicts"]["attach"].items()}
