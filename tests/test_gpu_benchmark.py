"""``benchmarks/gpu.py`` at toy sizes on the CPU: every section reports, and what hangs costs no other its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT, load

PROGRAM = "benchmarks/gpu.py"
SECTIONS = ("versions", "tests", "zoo", "bytes", "scripts", "time", "launch", "fits", "peers")


def gpu(*options: str, **settings: str) -> str:
    command = [sys.executable, PROGRAM, *options]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def records_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dry run in which ``versions`` has no time."""
    out = tmp_path_factory.mktemp("gpu") / "results.jsonl"
    gpu("--dry", "--out", str(out), "--limit", "versions=0.1")
    return out


@pytest.fixture(scope="module")
def records(results: Path) -> list[dict[str, Any]]:
    return records_in(results)


def rows_of(records: list[dict[str, Any]], section: str) -> list[dict[str, Any]]:
    return [r["row"] for r in records if r.get("section") == section and "row" in r]


def test_every_section_reports_and_one_without_time_is_said_to_be(records: list[dict[str, Any]]) -> None:
    ended = {(r["section"], r["part"]): r["ended"] for r in records if "ended" in r}
    assert ended.pop(("versions", "")) == "timed out"
    assert {section for section, _ in ended} == set(SECTIONS) - {"versions"}
    assert set(ended.values()) == {"done"}, [r.get("why") for r in records if "ended" in r]
    assert all(rows_of(records, section) for section, _ in ended)
    assert "finished" in records[-1]
    assert [r["row"] for r in records if "error" in r.get("row", {})] == []


def test_tests_on_a_gpu_run_or_say_why_not(records: list[dict[str, Any]]) -> None:
    rows = rows_of(records, "tests")
    assert len(rows) >= 9
    assert all(r["outcome"] == "passed" or (r["outcome"] == "skipped" and "GPU" in r["why"]) for r in rows), rows


def test_models_are_compared_with_eager_mode(records: list[dict[str, Any]]) -> None:
    rows = rows_of(records, "zoo")
    assert {r["case"] for r in rows} == {"dropout_mlp", "mlp", "tv_squeezenet1_1"}
    assert all(r["equal"] and r["random"] == 0 for r in rows if "skipped" not in r), rows


def test_bytes_and_traces(records: list[dict[str, Any]], results: Path) -> None:
    rows = rows_of(records, "bytes")
    pairs, traces = ([r for r in rows if key in r] for key in ("requested_bytes", "replayed"))
    assert len(pairs) == 8 and len(traces) == 2
    assert all(r["requested_bytes"] <= r["budget_bytes"] for r in pairs)
    assert all(r["predicted_reserved_bytes"] >= r["predicted_allocated_bytes"] > 0 for r in pairs)
    assert all(r["replayed"] and results.with_name(r["file"]).exists() for r in traces), traces


def test_every_model_is_timed_and_every_peer_is_tried(records: list[dict[str, Any]]) -> None:
    rows = rows_of(records, "time")
    assert {r["case"] for r in rows} == {"gpt", "llama", "resnet50", "vit", "unet"}
    methods = {r["method"] for r in rows if r["case"] == "gpt"}
    assert methods == {
        "eager",
        "checkpoint every block",
        "selective checkpoint",
        "compile + checkpoint every block",
        "compile, activation_memory_budget 0.4",
    }
    beside = [r for r in rows if r["method"] != "eager"]
    assert all(r["our_peak_bytes"] <= r["peak_bytes"] for r in beside if "our_least_bytes" not in r)


def test_scripts_are_attached(records: list[dict[str, Any]]) -> None:
    (row,) = rows_of(records, "scripts")
    assert row["equal"] and row["plans"] and row["peak_bytes"] <= row["budget_bytes"], row


def test_launches_and_batches(records: list[dict[str, Any]]) -> None:
    methods = [r["method"] for r in rows_of(records, "launch")]
    assert len(methods) == 4 and sum(m.startswith("ours") for m in methods) == 2
    (row,) = (r for r in rows_of(records, "fits") if "our_batch" in r)
    assert row["our_batch"] >= row["eager_batch"] > 0


def test_the_page(results: Path, records: list[dict[str, Any]], tmp_path: Path) -> None:
    page = gpu("--page", str(results))
    assert "| versions | timed out |" in page
    assert all(f"## {section}\n" in page for section in SECTIONS[1:])
    assert "cut short" not in page
    cut = tmp_path / "cut.jsonl"
    cut.write_text("\n".join(json.dumps(r) for r in records[: len(records) // 2]) + '\n{"section": "ti')
    assert "cut short" in gpu("--page", str(cut))


def test_what_a_part_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that hangs, and has a process of its own that hangs, is over soon after its limit; one that crashes is
    said to have."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu_run" / ".."))
    runner = load("benchmarks/gpu_run/runner.py")
    program, pid, out = tmp_path / "program.py", tmp_path / "pid", tmp_path / "out.jsonl"
    program.write_text(
        "import subprocess, sys, time\n"
        "if 'tests' in sys.argv: sys.exit('broken')\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(runner, "PROGRAM", program)
    sections = [s for s in runner.SECTIONS if s.name in ("versions", "tests")]
    start = time.time()
    runner.Run(sections, out, 60.0, False, "", 1, {"versions": 5.0})()
    assert time.time() - start < 50
    first, second = (r for r in records_in(out) if "ended" in r)
    assert first["ended"] == "timed out"
    assert second["ended"] == "ended with 1" and second["why"].strip() == "broken"
    for _ in range(100):
        state = Path(f"/proc/{pid.read_text()}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the process that a part started still runs")


def test_the_thirty_cases_and_the_forty_eight_pairs() -> None:
    """What a run on a GPU has, shared among its parts."""
    code = (
        "from gpu_run import cases, memory, models, runner\n"
        "from gpu_run.context import portion\n"
        "parts = {s.name: s.parts for s in runner.SECTIONS}\n"
        "made = list(cases.builders())\n"
        "assert len(made) == 30\n"
        "assert sorted(sum((portion(made, p) for p in parts['zoo']), [])) == sorted(made)\n"
        "assert len(models.WORKS) * len(memory.FRACTIONS) == 48\n"
        "for s in runner.SETTINGS:\n"
        "    mine = [p.removeprefix(s + '/') for p in parts['bytes'] if p.startswith(s)]\n"
        "    assert sorted(sum((portion(models.WORKS, p) for p in mine), [])) == sorted(models.WORKS)\n"
        "assert all(memory.TRACED[name] in memory.FRACTIONS and name in models.WORKS for name in memory.TRACED)\n"
    )
    path = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
