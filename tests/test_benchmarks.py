"""The short versions of the benchmarks run and hold what they promise; the times that they find are no test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT, load

from rkgb.device import Cpu

COMPILER = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler")
Short = Callable[..., Any]


@pytest.fixture(autouse=True)
def _small_models_are_planned_as_large_ones() -> None:
    """Not here: benchmarks run what takes little time, as users' programs do."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Short:
    """Runs the short version of a program in this process, which spares an import of torch; the processes that it
    starts are its own. Returns what it writes to ``out`` in ``tmp_path``.
    """
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def run(name: str, *options: str, out: str = "found.json", written: str = "found.json") -> Any:
        program = load(f"benchmarks/{name}.py")
        monkeypatch.setattr(
            sys, "argv", [str(program.__file__), *(options or ["--short"]), "--out", str(tmp_path / out)]
        )
        status = program.main()
        assert status == 0 or not isinstance(status, int)
        return json.loads((tmp_path / written).read_text())

    return run


def test_bytes(short: Short) -> None:
    rows = short("bytes")
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
def test_misses_of_bytes_are_told(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], told: list[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    program = load("benchmarks/bytes.py")
    assert program.misses({"pairs": [GOOD | changes], "eager_differs": ["outputs"]}) == told


def test_chains_in_time(short: Short) -> None:
    ((row,),) = short("chains").values()
    assert row["within"]
    assert row["time"].keys() == {"checkpoint_sequential", "Rockmate", "rotor", "rotor, the paper's"}
    assert all(len(times) == 1 and times[0] > 0 for times in row["each"].values())


def test_estimates(short: Short) -> None:
    assert len(short("estimate")) == 2


def test_first_plans(short: Short) -> None:
    """A second process finds the plan on disk."""
    (row,) = short("first_plan", "--short", "--processes", "1")
    assert 0 < row["peak"] <= row["budget"]
    assert row["eager"] > 0
    assert row["first"] > 0
    assert row["second"] > 0
    assert "measure" in row["phases"]


def test_losses(short: Short, tmp_path: Path) -> None:
    """A loss that a model computes costs no more than the loss alone."""
    language, experts = short("losses")["models"]
    assert (language["least"], language["most"]) == (language["least alone"], language["most alone"])
    for row in (*language["rows"], *experts["rows"]):
        assert abs(row["measured"] - row["predicted"]) <= Cpu.scalars
        assert row["measured"] <= row["budget"]
        assert row["overhead"] > 0
        assert not row["warnings"]
    page = (tmp_path / "found.md").read_text()
    assert page.index("None.") < page.index("| tiny experts | held |")


@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("--model", "GPT", "--compile", "--channels-last"), marks=COMPILER)],
    ids=["demo", "compiled"],
)
def test_overhead(short: Short, options: tuple[str, ...]) -> None:
    rows = short("overhead", "--short", *options)
    assert [row["percent"] for row in rows] == [100, 70]
    assert all(row["peak_within_budget"] and len(row["each"]) == 2 for row in rows)
    assert rows[1]["predicted"] > 0
    assert all(("classes" in row["pieces"]) == ("--compile" in options) for row in rows)
    assert all((row["compiled"] is not None) == ("--compile" in options) for row in rows)


def test_peers(short: Short, tmp_path: Path) -> None:
    """Every peer gets a row, and the pages are made of the results."""
    (found,) = short("peers", "--quick")["models"].values()
    every, *chained = sorted(found["points"], key=lambda p: p["family"])
    assert every["peer"] == "checkpoint, every block"
    assert {p["family"] for p in chained} == {"checkpoint_sequential"}
    for p in found["points"]:
        assert p["equal"] and p["ours"]["equal"]
        assert p["ours"]["peak"] <= p["ours"]["budget"] == p["peak"] < found["eager"]["peak"]
        assert p["flops"] >= found["eager"]["flops"]
        assert len(found["times"][p["peer"]]) == len(found["times"][f"ours: {p['peer']}"]) == 2
    assert len(chained) + len(found["left_out"]) == 5  # every number of segments, from 2 to 6
    tables, page = ((tmp_path / name).read_text(encoding="utf8") for name in ("peers.md", "page.md"))
    assert all(f"| {p['peer']} |" in tables and f"| {p['peer']} |" in page for p in found["points"])
    for share in filter(None, found["shares"].values()):
        assert share["bound"] is None or share["bound"] <= share["overhead"]
    assert any(found["shares"].values())
    assert "Not all checks passed" not in page
    assert (tmp_path / "peers" / "chain-of-small-mixers.svg").exists()


def test_resnet50(tmp_path: Path) -> None:
    """It fits its budget and is eager's, bit for bit. In a process of its own: it defines what torchvision looks up,
    which other tests do too.
    """
    out = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/resnet50.py", "--short", "--out", str(out)]
    known = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=known, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())
    assert row["equal"]
    assert row["measured"] <= row["predicted"] + Cpu.scalars <= row["budget"]
    assert row["overhead"] > 0


def test_rotor(short: Short, tmp_path: Path) -> None:
    """On small models ours keeps to every peak of checkpoint_sequential with no more FLOPs."""
    found = short("rotor", out="", written="rotor-short.json")
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


def test_scripts(short: Short) -> None:
    """With batches of several lengths."""
    rows = short("scripts")
    assert [row["name"] for row in rows] == ["transformer", "resnet", "experts"]
    for row in rows:
        assert row["equal"]
        assert 0 < row["peak"] <= row["budget"]
        assert 0 < row["plans"] < row["sizes"] or row["name"] != "resnet"


def test_solver_blocks(short: Short) -> None:
    found = short("solver_blocks")
    (blocks,) = found["blocks"].values()
    assert blocks["options"]["proven"] == blocks["options"]["points"] > blocks["options"]["infeasible"]
    (chain,) = found["chains"].values()
    assert all(row["peak"] <= row["budget"] and 0 <= row["bound"] <= row["overhead"] for row in chain)
    (whole,) = found["whole"]
    assert whole["ilp_bound"] <= whole["ilp"]
    assert whole["chain_over_ilp_bound"] >= 0
    (table,) = found["tables"]
    assert table["optima"] > 1


def test_solver_graphs(short: Short, tmp_path: Path) -> None:
    """Without public graphs, it says so instead of counting them."""
    found = short("solver_graphs", "--short", "--seconds", "3", "--graphs", str(tmp_path / "none"))
    assert found["public"].startswith("not run: no directory")
    lines = [*found["synthetic"], *found["large"]]
    assert all(line["bound_percent"] <= line["overhead_percent"] for line in lines if line["status"] != "unknown")
    assert found["walker"]["rejections"] == 0
    assert sum(found["walker"]["by_solver_and_status"].values()) == found["walker"]["problems"] == 100
