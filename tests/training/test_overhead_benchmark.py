"""The benchmark of steps' times runs; what it finds is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("model", [(), ("--model", "chain of small mixers")], ids=["demo", "mixers"])
def test_the_short_benchmark_runs(model: tuple[str, ...], tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "benchmarks" / "overhead.py"
    out = tmp_path / "overhead.json"
    command = [sys.executable, str(program), "--short", *model, "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = json.loads(out.read_text())
    assert [row["percent"] for row in rows] == [100, 70]
    assert all(row["peak_within_budget"] and len(row["each"]) == 2 for row in rows)
    assert rows[1]["predicted"] > 0
