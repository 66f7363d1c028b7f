"""Imports go one way: solvers know no torch, and neither they nor rkgb know rockmate."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize(
    ("package", "forbidden"), [("solvers", {"torch", "rkgb", "rockmate"}), ("rkgb", {"rockmate", "solvers"})]
)
def test_imports_go_one_way(package: str, forbidden: set[str]) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        assert not imported(path) & forbidden, path.name
