"""``FILE:FUNCTION``: the model and the sample that a function of the user's returns."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from rkgb.trace.code import is_the_users
from rockmate.cli.errors import Misuse

RETURNS = (
    "return model, sample (or model, sample, sample_kwargs): the sample is a tensor, a tuple of positional arguments, "
    "or a dict of keyword arguments"
)


@dataclass(frozen=True)
class Target:
    """``FILE:FUNCTION`` or ``package.module:FUNCTION``, taken apart. ``path``: None for a module."""

    text: str
    where: str
    function: str
    path: Path | None


@dataclass(frozen=True)
class Given:
    """What a function returned. ``sample`` and ``sample_kwargs`` are as ``Rockmate`` takes them."""

    target: str
    model: torch.nn.Module
    sample: Any
    sample_kwargs: dict[str, Any] | None


def target_of(text: str) -> Target:
    """The parts of ``text``. Raises ``Misuse`` where they are not there, before anything is imported."""
    where, _, function = text.rpartition(":")
    if not where or function.endswith(".py") or "/" in function or "\\" in function:  # "C:\model.py" has a colon, too
        path = Path(text.rstrip(":"))
        there = f". {_listed(path)}" if path.is_file() else ""
        raise Misuse(f"{text!r} names no function: give FILE:FUNCTION, such as {text.rstrip(':')}:make{there}")
    path = Path(where)
    if path.is_dir():
        raise Misuse(f"{where} is a folder: give a file in it, such as {path / 'model.py'}:{function}")
    if path.is_file():
        return Target(text, where, function, path)
    if where.endswith(".py") or "/" in where or os.sep in where:
        near = difflib.get_close_matches(path.name, (p.name for p in path.parent.glob("*.py")), 1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "give the path of the file that has the function"
        raise Misuse(f"there is no file {where} in {Path.cwd()}: {hint}")
    return Target(text, where, function, None)


def load(target: Target) -> Given:
    """Call the function. Raises ``Misuse`` for whatever goes wrong in it, and for what it should not return."""
    module = _module(target) if target.path is None else _module_of_file(target.path)
    function = _function(module, target)
    with _user_code(target, f"{target.function}()"):
        result = function()
    return _given(target, result)


# ---------------------------------------------------------------------------------------------- modules


def _module_of_file(path: Path) -> ModuleType:
    """The file as a module; what lies beside it can be imported, as in ``python FILE``."""
    path = path.resolve()
    name = path.stem if path.stem not in sys.modules else f"{path.stem} of {path}"
    spec = importlib.util.spec_from_file_location(name, path, loader=SourceFileLoader(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where pickle and inspect look for it
    sys.path.insert(0, str(path.parent))
    with _importing(path.name), _arguments(str(path)):
        spec.loader.exec_module(module)
    return module


def _module(target: Target) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        with _importing(target.where), _arguments(target.where):
            return importlib.import_module(target.where)
    except Misuse as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if missing and f"{target.where}.".startswith(f"{missing}."):
            raise Misuse(
                f"there is neither a file nor a module {target.where}: a file is given by its path "
                f"(path/to/model.py:{target.function}), and a module must be importable from {Path.cwd()} or be "
                f"installed for {sys.executable}"
            ) from cause
        raise


def _arguments(path: str) -> contextlib.AbstractContextManager[Any]:
    """Scripts that read their arguments when they are imported find none, and not those of this command."""
    return patch.object(sys, "argv", [path])


@contextlib.contextmanager
def _importing(name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None:  # of a library that imports others late
            raise Misuse(f"{name} cannot be imported: {_said(error)}") from error
        raise Misuse(
            f"{_place(error) or name} imports {error.name!r}, which is not installed for {sys.executable}: install it "
            "there, or run rockmate in the environment of your scripts (python -m rockmate)"
        ) from error
    except SyntaxError as error:
        raise Misuse(f"{error.filename}:{error.lineno} is no valid Python: {error.msg}") from error
    except SystemExit as error:
        raise Misuse(
            f"{name} ended when it was imported ({_place(error)}): put what the script does under "
            'if __name__ == "__main__":, and leave the function outside'
        ) from error
    except Exception as error:
        inside = isinstance(error, ImportError) and "relative import" in str(error)
        hint = ": give the file as a module of its package (package.module:FUNCTION)" if inside else ""
        raise Misuse(f"{name} cannot be imported: {_said(error)}{hint}") from error


@contextlib.contextmanager
def _user_code(target: Target, what: str) -> Iterator[None]:
    try:
        yield
    except SystemExit as error:
        raise Misuse(f"{what} of {target.where} ended the program: {_said(error)}") from error
    except Exception as error:
        raise Misuse(
            f"{what} of {target.where} raised {_said(error)}. --traceback shows where it was called from"
        ) from error


def _said(error: BaseException) -> str:
    """The error with its place, and with what caused it: "ValueError: too small, at model.py:12"."""
    place, first = _place(error), error
    while first.__cause__ is not None:
        first = first.__cause__
    cause = f" (caused by {type(first).__name__}: {first})" if first is not error else ""
    return f"{type(error).__name__}: {error}{f', at {place}' if place else ''}{cause}"


def _place(error: BaseException) -> str:
    """The innermost line of the user's code: "model.py:12"; empty if there is none."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if is_the_users(f.filename)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


# -------------------------------------------------------------------------------------------- functions


def _function(module: ModuleType, target: Target) -> Callable[[], Any]:
    found: Any = module
    for name in target.function.split("."):
        if not hasattr(found, name):
            listed = f". {_listed(target.path)}" if target.path else ""
            raise Misuse(f"{target.where} has no function {target.function!r}{listed}")
        found = getattr(found, name)
    if not callable(found) or isinstance(found, torch.nn.Module):
        raise Misuse(
            f"{target.function} of {target.where} is {_a(found)}, and no function: write a function "
            f"without arguments, and let it {RETURNS}"
        )
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        needs = inspect.signature(found)
        raise Misuse(
            f"{target.function}{needs} of {target.where} needs arguments, and is called without any: write a function "
            f"that calls it, such as def make(): return {target.function}(…)"
        ) from error
    except ValueError:  # functions in C may have no signature
        pass
    function: Callable[[], Any] = found
    return function


def _listed(path: Path) -> str:
    """Which functions of a file could be meant."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return ""
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not _needs(node.args)]
    if not names:
        return f"{path.name} has no function without arguments: write one, and let it {RETURNS}"
    return f"Its functions without arguments are {', '.join(names)}"


def _needs(arguments: ast.arguments) -> bool:
    """Whether a function cannot be called without arguments."""
    positional = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    return positional > 0 or None in arguments.kw_defaults


# ---------------------------------------------------------------------------------------------- results


def _given(target: Target, result: Any) -> Given:
    def refuse(what: str) -> NoReturn:
        raise Misuse(f"{target.function}() of {target.where} {what}. Let it {RETURNS}")

    if isinstance(result, torch.nn.Module):
        refuse(f"returns a model ({type(result).__name__}), and no sample")
    if not isinstance(result, (tuple, list)):
        refuse(f"returns {_a(result)}")
    if len(result) not in (2, 3):
        refuse(f"returns {len(result)} values ({', '.join(type(x).__name__ for x in result)})")
    model, sample, more = (*result, None)[:3]
    if not isinstance(model, torch.nn.Module):
        swapped = isinstance(sample, torch.nn.Module)
        refuse("returns the model as the second value" if swapped else f"returns {_a(model)} as the model")
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise Misuse(
            f"the model of {target.function}() is on the meta device, where nothing can be run: move it to a device "
            '(model.to_empty(device="cpu")), give it its weights, and make the sample there'
        )
    if not isinstance(sample, (torch.Tensor, tuple, list, Mapping)):
        refuse(f"returns {_a(sample)} as the sample")
    if more is not None and not isinstance(more, Mapping):
        hint = "; several positional arguments are one tuple: model, (x, y)" if isinstance(more, torch.Tensor) else ""
        refuse(f"returns {_a(more)} as the third value, which is for keyword arguments{hint}")
    sample = dict(sample) if isinstance(sample, Mapping) else sample  # what tokenizers return is no dict
    return Given(target.text, model, sample, None if more is None else dict(more))


def _a(x: object) -> str:
    name = type(x).__name__
    return "nothing" if x is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
