"""Why a call is not captured as one graph: what TorchDynamo says, the user's line, and what to write instead."""

from __future__ import annotations

import re

from rkgb.trace.code import is_the_users
from rkgb.trace.lines import named_line

_BY_VALUES = "Python decides, or counts, by values in a tensor"

_INSTEAD = (
    ("SymNodeVariable() is not a constant", "decide with a number that changes by an if, and give a constant there"),
    ("Data-dependent branching", "compute both ways and choose with torch.where, or decide outside of forward"),
    ("Skip inlining `torch.compiler.disable()`d", "remove torch.compiler.disable"),
    ("catches the error for a key or an attribute", "ask first (in, hasattr, getattr with a default)"),
    (
        "is a number that Python reads from a tensor",
        "compute with the tensor, or return it and read it behind the step",
    ),
    ("depend on values", "keep all rows and mask them, so that sizes are the same"),
    (_BY_VALUES, "compute with the tensor (torch.where, a mask in the place of chosen rows)"),
    ("opaque object was created", "make it once, in __init__"),
    ("a hook is registered on a tensor", "register it on the output of a submodule, or compute what it does"),
    ("would be computed by torch", "compute it with torch, or outside of forward"),
)
"""Parts of what is said, and what to write instead."""

_MOVE = "move it out of forward, in front of the layers or behind them"
_CALLED = re.compile(
    r"(?:trace builtin operator|trace the builtin|not trace function|that the function) `([\w.]+?)\.?`"
)
_SKIPPED = "Attempted to call function marked as skipped"
_CAUSE = re.compile(r"Caused by: .*# (\S+:\d+) in")


def reason_of(error: Exception) -> str:
    """In one line: what ``error`` says, where in the user's code, and what to write instead."""
    error = getattr(error, "inner_exception", error)  # what the backend raised
    text = str(error)
    what = next((line.strip().rstrip(".") for line in text.splitlines() if line.strip()), type(error).__name__)
    called = _CALLED.search(text)
    if called is not None and called[1] not in what:
        what = f"TorchDynamo does not trace {called[1]}" if what == _SKIPPED else f"{what} ({called[1]})"
    at = _line_in(text.partition("from user code:")[2])
    if "data-dependent expression" in what:  # which names no variable of the user's
        cause = _CAUSE.search(text)
        what = _BY_VALUES + (f", in torch's {cause[1]}" if cause and cause[1].startswith("nn/") else "")
    if at and " at " not in what:
        what = f"{what} at {at}"
    instead = next((advice for part, advice in _INSTEAD if part in what), _MOVE if at else "")
    return f"{what}: {instead}" if instead else what


def _line_in(trace: str) -> str:
    """The innermost line of the user's in a printed traceback, as "file.py:12"; empty if there is none."""
    frames = re.findall(r'File "(.*?)", line (\d+)', trace)
    users = [named_line(file, int(line)) for file, line in frames if is_the_users(file)]
    return users[-1] if users else ""
