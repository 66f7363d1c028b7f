"""The benchmark of training scripts, at toy sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_scripts_with_batches_of_several_lengths(tmp_path: Path) -> None:
    out = tmp_path / "scripts.json"
    command = [sys.executable, "benchmarks/scripts.py", "--short", "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())
    assert [row["name"] for row in rows] == ["transformer", "resnet", "experts"]
    for row in rows:
        assert row["equal"]
        assert 0 < row["peak"] <= row["budget"]
        assert 0 < row["plans"] < row["sizes"] or row["name"] != "resnet"
