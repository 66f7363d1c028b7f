"""Problems as text and as files: our own JSON for every kind, and the node-link graphs that others publish.

``format_problem`` and ``parse_problem`` are for text, ``write_problem`` and ``read_problem`` for files. Both have the
same format, in files without spaces. It is one object: ``"format": "rockmate-problem"``, ``"version": 1``, ``"kind"``,
and the fields of the class of that kind, by their names. Bytes and times are whole numbers, references are positions.
The kinds:

- ``"graph"`` (``GraphProblem``): ``unit``, ``scale``, ``nodes`` with ``name``, ``time``, ``size``, ``reads`` and
  ``transient``;
- ``"step"`` (``Problem``): ``nodes`` with ``name``, ``time``, ``reads``, ``makes``, ``peak``, ``backward`` (null, or
  ``time``, ``reads``, ``before``, ``peak``, ``after``), ``rerun``, ``rng``, ``warm`` (null, or nanoseconds) and
  ``within`` (null, or [node, node]);
  ``data`` with ``name``, ``size`` and ``owner``; ``held``; ``returned``; ``loss``; ``blocks`` with ``start``, ``stop``
  and ``kind``;
- ``"chain"`` (``solvers.rotor.chain.Chain``): ``stages`` with the fields of ``Stage``; ``values``, a list of [storage,
  bytes] for each; ``output_gradient``; ``loss``; ``unit``.

``solvers.files.node_link`` reads the public graphs.
"""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from solvers.errors import ProblemError
from solvers.files.node_link import from_node_link
from solvers.files.values import from_json, members, to_json
from solvers.problem import Problem
from solvers.rotor.chain import Chain
from solvers.whole.graph import GraphProblem

FORMAT, VERSION = "rockmate-problem", 1
KINDS: dict[str, type] = {"graph": GraphProblem, "step": Problem, "chain": Chain}
"""Kinds of problems that files hold, by the name they have there."""


def format_problem(problem: Any) -> str:
    """``problem`` as text, a line for each node, datum, block or stage; ``parse_problem`` gives an equal one back.

    Raises ``ProblemError`` if ``problem`` is none.
    """
    fields = ",\n".join(f"{to_json(name)}: {_lines(value)}" for name, value in _content(problem).items())
    return f"{{\n{fields}\n}}\n"


def _lines(value: Any) -> str:
    """``value`` as JSON: a dataclass in a tuple has a line of its own."""
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return "[\n  " + ",\n  ".join(map(to_json, value)) + "\n]"
    return to_json(value)


def parse_problem(text: str) -> Any:
    """The problem in ``text``, verified: one of ours, or a public node-link graph (as a ``GraphProblem``).

    ``ProblemError`` says what is wrong with the text, and where.
    """
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ProblemError(f"is not JSON: {error}") from error
    problem = _problem_of(content)
    problem.verify()
    return problem


def write_problem(problem: Any, path: str | Path) -> None:
    """Write ``problem`` to ``path`` in our format; ``read_problem`` gives an equal one back."""
    Path(path).write_text(to_json(_content(problem), (",", ":")) + "\n", encoding="utf-8")


def read_problem(path: str | Path) -> Any:
    """The problem in a file; as ``parse_problem``, whose errors it begins with ``path``."""
    try:
        return parse_problem(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ProblemError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProblemError(f"{path}: is not JSON: {error}") from error
    except ProblemError as error:
        raise ProblemError(f"{path}: {error}") from error


def _content(problem: Any) -> dict[str, Any]:
    names = {cls: name for name, cls in KINDS.items()}
    if type(problem) not in names:
        known = ", ".join(cls.__name__ for cls in KINDS.values())
        raise ProblemError(f"cannot write a {type(problem).__name__}; a problem is one of: {known}")
    problem.verify()
    return {"format": FORMAT, "version": VERSION, "kind": names[type(problem)], **members(problem)}


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
