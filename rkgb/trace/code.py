"""Whose code a file is, and functions that TorchDynamo leaves alone."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """``function``, which TorchDynamo leaves alone, with all that it calls, where a compiled function comes to it."""
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def is_installed(path: str) -> bool:
    """Whether a file belongs to an installed package."""
    return "site-packages" in path or "dist-packages" in path


def is_the_users(path: str) -> bool:
    """Whether a file, or what was typed into an interpreter, is not installed, and neither Python's nor ours."""
    return not (is_installed(path) or path.startswith((PYTHON, "<frozen", *_OUR_FOLDERS)))


_OUR_FOLDERS = [str(Path(__file__).parents[2] / name) + os.sep for name in ("rkgb", "rockmate", "solvers")]

PYTHON = sysconfig.get_paths()["stdlib"]
"""The folder of Python's own modules."""
