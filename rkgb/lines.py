"""Source lines of the user's: outside this package's front end and torch."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from types import FrameType

import torch

_INSIDE = (os.path.dirname(__file__) + os.sep, contextlib.__file__, str(torch.__path__[0]) + os.sep)

_TRACER = os.path.join(os.path.dirname(__file__), "Btools.py")  # what is called from there is the module
_MODULES = os.path.join(str(torch.__path__[0]), "nn", "modules") + os.sep


def user_line() -> str:
    """The innermost source line outside this package and torch, as "file.py:12", or "cell:12" in a notebook.

    Where torch's own modules are all that is traced (a ``Sequential`` of layers), their innermost line.
    """
    frame: FrameType | None = sys._getframe()
    of_torch: FrameType | None = None
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        file = frame.f_code.co_filename
        if file == _TRACER and of_torch is not None:
            frame = of_torch
            break
        if of_torch is None and file.startswith(_MODULES):
            of_torch = frame
        frame = frame.f_back
    if frame is None:
        return ""
    return _named(frame.f_code.co_filename, frame.f_lineno)


def _named(file: str, line: int) -> str:
    folder, name = os.path.split(file)
    return f"{'cell' if 'ipykernel_' in folder else name}:{line}"  # a notebook's files are numbers


def place(error: BaseException) -> str:
    """Where in the user's code an error arose, as " at file.py:12"; nothing where it did not."""
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__) if not f.f_code.co_filename.startswith(_INSIDE)]
    return f" at {_named(frames[-1].f_code.co_filename, frames[-1].f_lineno)}" if frames else ""
