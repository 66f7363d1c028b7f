"""The benchmark of plans with compiled pieces beside plans without, with a tiny model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler")
def test_both_plans_keep_the_budget(tmp_path: Path) -> None:
    out = tmp_path / "compiled.json"
    command = [sys.executable, "benchmarks/compiled.py", "--short", "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())
    assert row["fits"] is True
    assert min(row["eager"], row["plan"], row["compiled"]) > 0
    assert "classes" in row["pieces"]
