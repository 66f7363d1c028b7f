"""Amounts of memory as text."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor


def show_bytes(size: float) -> str:
    """ "12.3 MiB"."""
    size, unit = _scaled(size)
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"


def show_at_least(size: int) -> str:
    """As ``show_bytes``, but rounded up: as a budget, it has ``size`` bytes or more, by a hundredth at most."""
    return _rounded(size, ceil)


def show_at_most(size: int) -> str:
    """As ``show_bytes``, but rounded down."""
    return _rounded(size, floor)


def _rounded(size: int, to_whole: Callable[[float], int]) -> str:
    scaled, unit = _scaled(size)
    if unit == "bytes":
        return f"{size} bytes"
    digits = 1 if scaled >= 10 else 2
    return f"{to_whole(scaled * 10**digits) / 10**digits:.{digits}f} {unit}"


def _scaled(size: float) -> tuple[float, str]:
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return size, unit
        size /= 1024
    return size, "GiB"
