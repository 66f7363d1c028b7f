"""Warnings that name the user's own line."""

from __future__ import annotations

import sys
import warnings

_INNER = ("rkgb", "rockmate", "torch", "contextlib")
"""Packages that stand between the user's line and what is said: torch calls us in many ways."""

_said: set[str] = set()


def warn(message: str, category: type[Warning]) -> None:
    """Warn, at the first line outside of torch and of this project that led here.

    ``warnings.warn`` counts frames instead, and so would name a line of torch's, whose warnings may be ignored.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _INNER:
        frame = frame.f_back
    seen = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__") or "<unknown>"
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, seen)


def warn_once(message: str, category: type[Warning]) -> None:
    """Warn, unless this was said in this process."""
    if message not in _said:
        _said.add(message)
        warn(message, category)
