"""Imports go one way: solvers know no torch, neither they nor rkgb know rockmate, and no files import one another."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

import rockmate

ROOT = Path(__file__).parents[1]
PACKAGES = ("rkgb", "solvers", "rockmate")

# Graphs are drawn in a room that is above them, and a notebook asks a graph for its picture.
ALLOWED = {("rkgb.notebook", "rkgb.render")}

# Imported by what needs them: pictures, plots, other solvers than HiGHS, grouping nodes, capturing calls, commands;
# libraries of people's models, and notebooks.
LATER = (
    "rkgb.render.drawing",
    "rockmate.planning.picture",
    "graphviz",
    "matplotlib",
    "networkx",
    "pulp",
    "torch._dynamo",
    "click",
    "rockmate.cli",
)
OTHERS = ("transformers", "torchvision", "accelerate", "lightning", "IPython")


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
    ("package", "forbidden"),
    [
        ("solvers", {"torch", "rkgb", "rockmate"}),
        ("rkgb", {"rockmate", "solvers"}),
    ],
)
def test_imports_go_one_way(package: str, forbidden: set[str]) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        assert not imported(path) & forbidden, path.name


def modules() -> dict[str, Path]:
    """Every file of the packages, by the name that it is imported under."""
    files = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imports(path: Path, known: set[str]) -> Iterator[str]:
    """Modules of ``known`` that a file imports, within functions and for types, too.

    ``from package import name`` imports the module ``name`` of the package if there is one, or else the package.
    """
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else str(node.module) for name in inner]
        yield from known.intersection(names)


def test_no_files_import_one_another() -> None:
    known = modules()
    edges = {(name, other) for name, path in known.items() for other in imports(path, set(known)) if other != name}
    assert edges >= ALLOWED
    circles = [sorted(c) for c in nx.strongly_connected_components(nx.DiGraph(edges - ALLOWED)) if len(c) > 1]
    assert circles == []


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
    assert rockmate.__version__ == project["version"], "install again: make does, where pyproject.toml has changed"
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf8")
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == project["version"]


def test_what_is_not_needed_yet_is_not_imported() -> None:
    code = f"import sys, rockmate; print(*(name for name in {LATER + OTHERS} if name in sys.modules))"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == []
