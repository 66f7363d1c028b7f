"""The benchmark's short version runs: a loss that a model computes costs no more than the loss alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rockmate.planning.finder import SCALARS

ROOT = Path(__file__).parents[2]


def test_short_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "losses.json"
    command = [sys.executable, "benchmarks/losses.py", "--short", "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    language, experts = json.loads(out.read_text())["models"]
    assert (language["least"], language["most"]) == (language["least alone"], language["most alone"])
    for row in (*language["rows"], *experts["rows"]):
        assert abs(row["measured"] - row["predicted"]) <= SCALARS
        assert row["measured"] <= row["budget"]
        assert row["overhead"] > 0
        assert not row["warnings"]
    page = out.with_suffix(".md").read_text()
    assert page.index("None.") < page.index("| tiny experts | held |")
