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
import types
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from solvers.errors import ProblemError
from solvers.files.node_link import from_node_link
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
    content = {"format": FORMAT, "version": VERSION, "kind": names[type(problem)], **asdict(problem)}
    text = json.dumps(content, default=sorted, separators=(",", ":"), allow_nan=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


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
        problem = _from_json(content)
        problem.verify()
    except ProblemError as error:
        raise ProblemError(f"{path}: {error}") from error
    return problem


def _from_json(content: object) -> Any:
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
    return _value({k: v for k, v in content.items() if k not in ("format", "version", "kind")}, KINDS[kind], kind)


def _value(given: Any, wanted: Any, where: str) -> Any:
    """``given``, from JSON, as a value of the type ``wanted``; errors name ``where`` it stands."""
    if is_dataclass(wanted):
        return _object(given, wanted, where)
    origin, args = get_origin(wanted), get_args(wanted)
    if origin is types.UnionType:
        inner = next(a for a in args if a is not type(None))
        return None if given is None else _value(given, inner, where)
    if origin in (tuple, frozenset):
        if not isinstance(given, list):
            raise ProblemError(f"{where} is {given!r:.40}; expected a list")
        return origin(_value(item, args[0], f"{where}[{at}]") for at, item in enumerate(given))
    if type(given) is not wanted:
        raise ProblemError(f"{where} is {given!r:.40}; expected {wanted.__name__}")
    return given


def _object(given: Any, cls: Any, where: str) -> Any:
    if not isinstance(given, dict):
        raise ProblemError(f"{where} is {given!r:.40}; expected an object")
    hints = get_type_hints(cls)
    known = [f for f in fields(cls) if f.init]
    for name in given:
        if name not in {f.name for f in known}:
            raise ProblemError(f"{where} has an unknown field {name!r}")
    missing = [f.name for f in known if f.default is MISSING and f.name not in given]
    if missing:
        raise ProblemError(f"{where} lacks {', '.join(missing)}")
    return cls(**{name: _value(item, hints[name], f"{where}.{name}") for name, item in given.items()})
