"""The benchmark runs, and on small models ours keeps to every peak of checkpoint_sequential with no more FLOPs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_short_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("rotor_benchmark", ROOT / "benchmarks" / "rotor.py")
    assert spec and spec.loader
    program = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "rotor_benchmark", program)
    spec.loader.exec_module(program)
    monkeypatch.setattr(sys, "argv", ["rotor.py", "--short", "--out", str(tmp_path)])
    program.main()
    found = json.loads((tmp_path / "rotor-short.json").read_text())
    assert len(found["models"]) == 2
    for model in found["models"].values():
        assert model["points"]
        for point in model["points"]:
            assert point["ours_peak"] <= point["peak"]
            assert (point["least_flops"] or 1) <= point["ours_flops"] <= point["flops"]
    bounds = [p["least_flops"] for name, model in found["models"].items() if "former" in name for p in model["points"]]
    assert bounds and all(bound >= 1 for bound in bounds)
    example = found["example"]
    assert example["equal"] and example["measured"] <= example["limit"] == int(0.83 * example["plain_peak"])
    report = (tmp_path / "rotor-short.md").read_text()
    assert report.startswith("# rotor against checkpoint_sequential") and "Mean gain over the models" in report
