"""The short version of ``benchmarks/peers.py``: every peer gets a row, and the pages are made of the results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_short_comparison_with_peers(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    command = [sys.executable, "benchmarks/peers.py", "--quick", "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(out.read_text())["models"].values()
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
