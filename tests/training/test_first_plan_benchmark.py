"""The benchmark of the seconds until a plan, with a toy model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_second_process_finds_the_plan_on_disk(tmp_path: Path) -> None:
    out = tmp_path / "first_plan.json"
    command = [sys.executable, "benchmarks/first_plan.py", "--short", "--processes", "1", "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())
    assert 0 < row["peak"] <= row["budget"]
    assert row["eager"] > 0
    assert row["first"] > 0
    assert row["second"] > 0
    assert "measure" in row["phases"]
