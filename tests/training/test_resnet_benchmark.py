"""The benchmark's short version runs: ResNet-50 fits its budget and is eager's, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rockmate.planning.finder import SCALARS

ROOT = Path(__file__).parents[2]


def test_short_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "resnet50.json"
    command = [sys.executable, "benchmarks/resnet50.py", "--short", "--out", str(out)]
    # In a process of its own: it defines what torchvision looks up, which other tests do too.
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())
    assert row["equal"]
    assert row["measured"] <= row["predicted"] + SCALARS <= row["budget"]
    assert row["overhead"] > 0
