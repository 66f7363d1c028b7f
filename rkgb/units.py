"""Bytes and times as text."""

from __future__ import annotations


def format_bytes(size: int) -> str:
    """``size`` in bytes as text: "512 B", "2.0 MiB"."""
    scaled, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(scaled) >= 1024 and len(units) > 1:
        scaled /= 1024
        del units[0]
    return f"{size} B" if units[0] == "B" else f"{scaled:.1f} {units[0]}"


def format_time(time: int) -> str:
    """``time`` in nanoseconds as text: "340 ns", "1.5 ms"."""
    scaled, units = float(time), ["ns", "us", "ms", "s"]
    while abs(scaled) >= 1000 and len(units) > 1:
        scaled /= 1000
        del units[0]
    return f"{time} ns" if units[0] == "ns" else f"{scaled:.1f} {units[0]}"
