"""The results: JSON lines, appended as they come by all processes of a run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write(out: Path, record: Mapping[str, Any]) -> None:
    """Append one line, at once, so that it is whole beside the lines of other processes."""
    line = json.dumps({"at": round(time.time(), 2), **record}) + "\n"
    file = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines of the last run in ``path``; the last one of a run that was killed may be cut."""
    found = []
    for line in path.read_text(encoding="utf8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    begun = [k for k, record in enumerate(found) if "begun" in record]
    return found[begun[-1] :] if begun else found
