"""Programs of this repository as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def load(path: str | Path) -> ModuleType:
    """The module of a file, made anew. ``path``: from the root of the repository."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)  # where dataclasses and inspect look
    spec.loader.exec_module(module)
    return module
