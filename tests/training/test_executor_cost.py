"""What the executor does beside kernels: counted, since times are nobody's promise here."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def benchmark() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "executor.py"
    spec = importlib.util.spec_from_file_location("executor_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["executor_benchmark"] = importlib.util.module_from_spec(spec)  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def test_work_in_python_does_not_grow_with_the_batch(tmp_path: Path) -> None:
    rows = benchmark().main(["--short", "--out", str(tmp_path / "executor.json")])
    assert len(json.loads((tmp_path / "executor.json").read_text())) == len(rows) == 4
    keep, tight = rows[:2], rows[2:]
    assert {row.batch for row in keep} == {row.batch for row in tight} == {4, 8}
    for pair in (keep, tight):
        assert pair[0].schedule_steps == pair[1].schedule_steps
        assert pair[0].calls == pair[1].calls
    assert keep[0].run_again == 0 < tight[0].run_again
