"""The benchmark of steps' times runs; what it finds is no test."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler")


@pytest.mark.parametrize(
    "options",
    [(), ("--model", "chain of small mixers"), pytest.param(("--model", "GPT", "--compile"), marks=COMPILER)],
    ids=["demo", "mixers", "compiled"],
)
def test_the_short_benchmark_runs(options: tuple[str, ...], tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "benchmarks" / "overhead.py"
    out = tmp_path / "overhead.json"
    command = [sys.executable, str(program), "--short", *options, "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = json.loads(out.read_text())
    assert [row["percent"] for row in rows] == [100, 70]
    assert all(row["peak_within_budget"] and len(row["each"]) == 2 for row in rows)
    assert rows[1]["predicted"] > 0
    assert all(("classes" in row["pieces"]) == ("--compile" in options) for row in rows)
    assert all((row["compiled"] is not None) == ("--compile" in options) for row in rows)
