"""Values as JSON and back: an object for a dataclass, a list for a tuple or a set. Fields' types guide the reading.

Types can be dataclasses, ``X | None``, ``tuple[X, ...]``, ``tuple[X, Y]``, ``frozenset[X]``, and what JSON has itself.
"""

from __future__ import annotations

import json
import types
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from solvers.errors import ProblemError


def to_json(value: Any, separators: tuple[str, str] = (", ", ": ")) -> str:
    """``value`` as JSON text in one line; sets are sorted."""
    return json.dumps(value, default=_plain, separators=separators, allow_nan=False)


def members(thing: Any) -> dict[str, Any]:
    """The fields of a dataclass by name."""
    return {field.name: getattr(thing, field.name) for field in fields(thing)}


def _plain(value: Any) -> Any:
    return members(value) if is_dataclass(value) else sorted(value)


def from_json(given: Any, wanted: Any, where: str) -> Any:
    """``given``, from JSON, as a value of the type ``wanted``. ``ProblemError`` begins with ``where`` it is not one."""
    if is_dataclass(wanted):
        return _object(given, wanted, where)
    origin, args = get_origin(wanted), get_args(wanted)
    if origin is types.UnionType:
        inner = next(a for a in args if a is not type(None))
        return None if given is None else from_json(given, inner, where)
    if origin in (tuple, frozenset):
        if not isinstance(given, list):
            raise ProblemError(f"{where} is {given!r:.40}; expected a list")
        if origin is tuple and args[-1] is not Ellipsis:
            if len(given) != len(args):
                raise ProblemError(f"{where} has {len(given)} items; expected {len(args)}")
            return tuple(from_json(x, a, f"{where}[{at}]") for at, (x, a) in enumerate(zip(given, args, strict=True)))
        return origin(from_json(item, args[0], f"{where}[{at}]") for at, item in enumerate(given))
    if type(given) is not wanted:
        raise ProblemError(f"{where} is {given!r:.40}; expected {wanted.__name__}")
    return given


def _object(given: Any, cls: Any, where: str) -> Any:
    if not isinstance(given, dict):
        raise ProblemError(f"{where} is {given!r:.40}; expected an object")
    hints, required = _fields(cls)
    for name in given:
        if name not in hints:
            raise ProblemError(f"{where} has an unknown field {name!r}")
    missing = [name for name in required if name not in given]
    if missing:
        raise ProblemError(f"{where} lacks {', '.join(missing)}")
    return cls(**{name: from_json(item, hints[name], f"{where}.{name}") for name, item in given.items()})


@cache
def _fields(cls: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The types of the fields that a dataclass is made with, and the names of those without a default."""
    hints, known = get_type_hints(cls), [f for f in fields(cls) if f.init]
    return {f.name: hints[f.name] for f in known}, tuple(f.name for f in known if f.default is MISSING)
