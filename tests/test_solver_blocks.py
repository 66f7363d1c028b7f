"""The benchmark of the solvers on real models, on a small one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "solver_blocks.py"


def test_short_benchmark(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("solver_blocks", PROGRAM)
    assert spec
    assert spec.loader
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.main(["--short", "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    (blocks,) = found["blocks"].values()
    assert blocks["options"]["proven"] == blocks["options"]["points"] > blocks["options"]["infeasible"]
    (chain,) = found["chains"].values()
    assert all(row["peak"] <= row["budget"] and 0 <= row["bound"] <= row["overhead"] for row in chain)
    (whole,) = found["whole"]
    assert whole["ilp_bound"] <= whole["ilp"]
    assert whole["chain_over_ilp_bound"] >= 0
    (table,) = found["tables"]
    assert table["optima"] > 1
