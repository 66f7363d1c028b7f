"""The benchmark of chains in time runs; what it finds is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_short_benchmark_runs(tmp_path: Path) -> None:
    program, out = Path(__file__).parents[2] / "benchmarks" / "chains.py", tmp_path / "chains.json"
    command = [sys.executable, str(program), "--short", "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    ((row,),) = json.loads(out.read_text()).values()
    assert row["within"]
    assert row["time"].keys() == {"checkpoint_sequential", "Rockmate", "rotor", "rotor, the paper's"}
    assert all(len(times) == 1 and times[0] > 0 for times in row["each"].values())
