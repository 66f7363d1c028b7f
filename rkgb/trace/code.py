"""The Python functions that a module's forward runs, and the names that they may read beside tensors."""

from __future__ import annotations

import contextlib
import dis
import gc
import os
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, TypeVar

import torch

_OURS = frozenset({"rkgb", "rockmate", "solvers", "torch", "numpy"}) | sys.stdlib_module_names
_DRAW = frozenset({"random", "getrandbits", "seed", "setstate"})
_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Code:
    """The functions that ran. Left out are those of Python, of this project, and of torch except its layers.

    ``names``: of the attributes that they may read, by name in the code or as text. For functions outside of installed
    packages there are their variables, too. ``scopes``: dictionaries of global variables, with the names that are read.
    ``cells``: variables of enclosing functions, as (function, name, cell).
    """

    names: frozenset[str] = frozenset()
    scopes: tuple[tuple[dict[str, Any], frozenset[str]], ...] = ()
    cells: tuple[tuple[str, str, CellType], ...] = ()


def not_compiled(function: _Function) -> _Function:
    """``function``, which TorchDynamo leaves alone, with all that it calls, where a compiled function comes to it."""
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


class Draws(Exception):
    """Raised before a number is drawn from Python's generator."""


@dataclass
class Watch:
    """What ``watched`` has seen: functions with their global variables.

    ``drawn``: one of them has drawn from Python's generator of random numbers. ``refuses``: raise ``Draws`` before such
    a draw.
    """

    functions: dict[CodeType, dict[str, Any]] = field(default_factory=dict)
    drawn: bool = False
    refuses: bool = False

    def code(self) -> Code:
        """The functions seen, as ``Code``."""
        names: set[str] = set()
        scopes: dict[int, tuple[dict[str, Any], set[str]]] = {}
        closures: set[CodeType] = set()
        for code, variables in self.functions.items():
            module = str(variables.get("__name__", ""))
            if module.partition(".")[0] in _OURS and not module.startswith("torch.nn.modules."):
                continue
            texts = (c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
            names.update(code.co_names, texts)
            if module.startswith("torch.") or is_installed(code.co_filename):
                continue
            read = (i.argval for i in dis.get_instructions(code) if i.opname in _GLOBAL)
            scopes.setdefault(id(variables), (variables, set()))[1].update(read)
            if set(code.co_freevars) - {"__class__"}:
                closures.add(code)
        cells = [*_cells(closures)]  # no tuple: one that grows must not be among the objects that are looked at
        return Code(
            frozenset(names),
            tuple((variables, frozenset(read)) for variables, read in scopes.values()),
            tuple(cells),
        )


def is_installed(path: str) -> bool:
    """Whether a file belongs to an installed package."""
    return "site-packages" in path or "dist-packages" in path


def is_the_users(path: str) -> bool:
    """Whether a file, or what was typed into an interpreter, is not installed, and neither Python's nor ours."""
    return not (is_installed(path) or path.startswith((PYTHON, "<frozen", *_OUR_FOLDERS)))


_OUR_FOLDERS = [str(Path(__file__).parents[2] / name) + os.sep for name in ("rkgb", "rockmate", "solvers")]

PYTHON = sysconfig.get_paths()["stdlib"]
"""The folder of Python's own modules."""


def _cells(closures: set[CodeType]) -> Iterator[tuple[str, str, CellType]]:
    """The cells of all functions that have one of these code objects: a frame does not refer to its function."""
    for function in gc.get_objects() if closures else ():
        if type(function) is FunctionType and function.__code__ in closures:
            free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            yield from ((function.__qualname__, k, cell) for k, cell in free if k != "__class__")


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """A context that records the functions that this thread calls. A Python profiler sees nothing meanwhile.

    Garbage collection is off, since it would call finalizers and callbacks that are no part of the forward.
    """
    watch = Watch()
    functions, generator = watch.functions, random.random.__self__  # type: ignore[attr-defined]

    @not_compiled
    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            functions[frame.f_code] = frame.f_globals
        elif event == "c_call" and getattr(argument, "__self__", None) is generator:
            watch.drawn = watch.drawn or argument.__name__ in _DRAW
            if watch.drawn and watch.refuses:
                raise Draws

    before: Any = sys.getprofile()
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        yield watch
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
        if callable(before):
            sys.setprofile(before)
        elif before is not None:
            before.enable()  # cProfile's
