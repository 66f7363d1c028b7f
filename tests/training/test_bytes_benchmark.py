"""The benchmark of bytes: its short version has no miss, and what would be one is told."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_short_version(tmp_path: Path) -> None:
    out = tmp_path / "bytes.json"
    command = [sys.executable, "benchmarks/bytes.py", "--short", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())
    assert len(rows) == 3
    for row in rows:
        assert not row["eager_differs"], "the comparison would say nothing"
        first, *later = row["pairs"]
        assert first["measured"] <= min(first["predicted"], first["budget"])
        assert [pair["at"] for pair in later] == ["0", "0.25", "0.5", "0.75", "1"]
        for pair in later:
            assert pair["measured"] == pair["predicted"] <= pair["budget"] and not pair["differs"]
        assert any(pair["overhead"] > 0 for pair in later)


GOOD = {"at": "0.5", "budget": 100, "predicted": 90, "measured": 90, "differs": []}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"measured": 91}, ["0.5: 1 bytes above the prediction 90"]),
        ({"budget": 89}, ["0.5: 1 bytes above the budget 89"]),
        ({"differs": ["gradients", "outputs"]}, ["0.5: gradients differ from eager mode's"]),
    ],
)
def test_misses_are_told(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], told: list[str]) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("bytes_benchmark", ROOT / "benchmarks" / "bytes.py")
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert program.misses({"pairs": [GOOD | changes], "eager_differs": ["outputs"]}) == told
