"""Problems as files: our own JSON for every kind, and the node-link graphs that others publish.

Our format is one object: ``"format": "rockmate-problem"``, ``"version": 1``, ``"kind"``, and the fields of the
class of that kind, by their names; bytes and times are whole numbers, references are positions. The kinds:

- ``"graph"`` (``GraphProblem``): ``unit``, ``scale``, ``nodes`` with ``name``, ``time``, ``size``, ``reads`` and
  ``transient``;
- ``"step"`` (``Problem``): ``nodes`` with ``name``, ``time``, ``reads``, ``makes``, ``peak``, ``backward`` (null, or
  ``time``, ``reads``, ``before``, ``peak``, ``after``), ``rerun`` and ``rng``; ``data`` with ``name``, ``size`` and
  ``owner``; ``held``; ``returned``; ``loss``; ``blocks`` with ``start``, ``stop`` and ``kind``.

``solvers.files.node_link`` reads the public graphs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from solvers.errors import ProblemError
from solvers.files.node_link import from_node_link
from solvers.files.values import from_json, members, to_json
from solvers.problem import Problem
from solvers.whole.graph import GraphProblem

FORMAT, VERSION = "rockmate-problem", 1
KINDS: dict[str, type] = {"graph": GraphProblem, "step": Problem}
"""Kinds of problems that files hold, by the name they have there."""


def write_problem(problem: Any, path: str | Path) -> None:
    """Write ``problem`` to ``path`` in our format; ``read_problem`` gives an equal one back."""
    names = {cls: name for name, cls in KINDS.items()}
    if type(problem) not in names:
        known = ", ".join(cls.__name__ for cls in KINDS.values())
        raise ProblemError(f"cannot write a {type(problem).__name__}; a problem is one of: {known}")
    problem.verify()
    content = {"format": FORMAT, "version": VERSION, "kind": names[type(problem)], **members(problem)}
    Path(path).write_text(to_json(content, (",", ":")) + "\n", encoding="utf-8")


def read_problem(path: str | Path) -> Any:
    """The problem in a file: one of ours, or a public node-link graph (as a ``GraphProblem``).

    ``ProblemError`` says what is wrong with the file, and where. The problem is verified.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ProblemError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ProblemError(f"{path}: is not JSON: {error}") from error
    try:
        problem = _problem_of(content)
        problem.verify()
    except ProblemError as error:
        raise ProblemError(f"{path}: {error}") from error
    return problem


def _problem_of(content: object) -> Any:
    if not isinstance(content, dict):
        raise ProblemError(f"holds a {type(content).__name__}; expected an object")
    if content.get("format") != FORMAT:
        if "nodes" in content and ("links" in content or "edges" in content):
            return from_node_link(content)
        raise ProblemError(f'is neither of our format ("format": "{FORMAT}") nor a node-link graph')
    if content.get("version") != VERSION:
        raise ProblemError(f"has version {content.get('version')!r}; this library reads version {VERSION}")
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ProblemError(f"has kind {kind!r}; known: {', '.join(KINDS)}")
    return from_json({k: v for k, v in content.items() if k not in ("format", "version", "kind")}, KINDS[kind], kind)
