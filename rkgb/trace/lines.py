"""The user's source lines: those outside of this package and of torch."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

import torch

_RKGB = os.path.dirname(os.path.dirname(__file__))
_ROCKMATE = os.path.join(os.path.dirname(_RKGB), "rockmate")
_INSIDE = (
    _RKGB + os.sep,
    *(os.path.join(_ROCKMATE, *part.split("/")) for part in ("calls/", "follow/", "planning/", "run/", "module.py")),
    contextlib.__file__,
    str(torch.__path__[0]) + os.sep,
)
"""What is no user's. The models of the demo and of rotor are as a user's."""

_told = threading.local()


@contextlib.contextmanager
def told(line: str) -> Iterator[None]:
    """A context in which ``user_line`` is ``line``: for code that was generated from that line."""
    before = getattr(_told, "line", None)
    _told.line = line
    try:
        yield
    finally:
        _told.line = before


def user_line() -> str:
    """The innermost source line outside of this package and torch: "file.py:12", or "cell:12" in a notebook."""
    line: str | None = getattr(_told, "line", None)
    if line is not None:
        return line
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    if frame is None:
        return ""
    return named_line(frame.f_code.co_filename, frame.f_lineno)


@functools.lru_cache(4096)  # a captured program is traced at each size
def line_of_trace(text: str, beside: str) -> str:
    """The innermost source line of a printed traceback outside of this package, torch and the file ``beside``."""
    frames = re.findall(r'File "(.*?)", line (\d+)', text)
    outside = [(file, int(line)) for file, line in frames if not file.startswith((*_INSIDE, beside))]
    return named_line(*outside[-1]) if outside else ""


def named_line(file: str, line: int) -> str:
    """A source line as it is said: "file.py:12", or "cell:12" in a notebook."""
    folder, name = os.path.split(file)
    return f"{'cell' if 'ipykernel_' in folder else name}:{line}"  # a notebook's files are numbers


def place(error: BaseException) -> str:
    """Where in the user's code an error arose: " at file.py:12"; empty if it arose elsewhere."""
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__) if not f.f_code.co_filename.startswith(_INSIDE)]
    return f" at {named_line(frames[-1].f_code.co_filename, frames[-1].f_lineno)}" if frames else ""
