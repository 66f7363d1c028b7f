"""A peer beside ours at one of its settings: what the times say, and why where ours is not ahead."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
MIB = 2**20
SHARES = {"half": 1 / 2, "a third": 1 / 3, "a fifth": 1 / 5}
"""Of the activation memory: eager mode's peak without the gradients of the parameters."""

BEHIND, EVEN, AHEAD, OUT_OF_REACH = "behind", "even", "ahead", "out of reach"


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f}–{self.high:.2f})"


def spread(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, middle, high)


@dataclass(frozen=True)
class Point:
    """A peer beside ours. Times as multiples of eager mode's; ``beside``: ours as a multiple of the peer's."""

    model: str
    row: Row
    eager: Row
    processor: Spread
    wall: Spread
    ours: Spread | None = None
    our_wall: Spread | None = None
    beside: Spread | None = None
    in_time: Row | None = None

    @property
    def verdict(self) -> str:
        """Ahead or behind only where three quarters of the interleaved steps are."""
        if self.beside is None:
            return OUT_OF_REACH
        return AHEAD if self.beside.high < 1 else BEHIND if self.beside.low > 1 else EVEN

    @property
    def share(self) -> float:
        """The peer's peak, of eager mode's."""
        return float(self.row["peak"] / self.eager["peak"])

    @property
    def why(self) -> str:
        """Why ours is not ahead, as far as the figures say."""
        ours, compiled = self.row["ours"], self.row["peer"].startswith("compile")
        if "least" in ours:
            more = ours["least"] / self.row["peak"] - 1
            return f"no plan of ours takes less than {ours['least'] / MIB:.1f} MiB, {more:.1%} more than this peak"
        assert self.ours is not None
        theirs, own = (row["flops"] / self.eager["flops"] for row in (self.row, ours))
        reasons = [f"FLOPs {theirs:.2f}, ours {own:.2f}"]
        if compiled:
            reasons.append("its kernels are fused, ours are eager mode's")
        if self.ours.middle - 1 - ours["predicted"] > 0.03:
            reasons.append(f"our plan predicted {1 + ours['predicted']:.2f}, and takes {self.ours.middle:.2f}")
        if self.verdict == EVEN:
            reasons.append("the difference is within the spread")
        return "; ".join(reasons)


def points_of(name: str, found: Row) -> list[Point]:
    """All that were measured, the least memory first."""
    if "error" in found:
        return []
    measured = all_ours(found)
    points = []
    for row in sorted(found["points"], key=lambda row: row["peak"]):
        theirs = found["times"][row["peer"]]
        processor, wall = (spread([t[k] for t in theirs]) for k in (0, 1))
        faster = [m for m in measured if m["processor"].middle <= processor.middle]
        in_time = min(faster, key=lambda m: m["peak"], default=None)
        ours = found["times"].get(f"ours: {row['peer']}")
        point = Point(name, row, found["eager"], processor, wall, in_time=in_time)
        if ours:
            both = [o[0] / t[0] for o, t in zip(ours, theirs, strict=True)]
            own, our_wall = (spread([t[k] for t in ours]) for k in (0, 1))
            point = Point(name, row, found["eager"], processor, wall, own, our_wall, spread(both), in_time)
        points.append(point)
    return points


def all_ours(found: Row) -> list[Row]:
    """Every budget of ours that was timed."""
    named = [(f"ours: {p['peer']}", p["ours"]) for p in found["points"]]
    named += [(f"ours: {row['budget']}", row) for row in found["ours_in_time"]]
    return [
        {**row, "processor": spread([t[0] for t in found["times"][key]])} for key, row in named if key in found["times"]
    ]


def broken(results: Mapping[str, Any]) -> list[str]:
    """What must not be: a peak above its budget, a result that is not eager mode's, a model that failed."""
    said = []
    for name, found in results["models"].items():
        if "error" in found:
            said.append(f"{name}: {found['error']}")
            continue
        for row in [*(p["ours"] for p in found["points"]), *found["ours_in_time"]]:
            if "peak" in row and not row["within"]:
                said.append(f"{name}: a peak of {row['peak']} bytes within a budget of {row['budget']}")
            if "peak" in row and not (row["equal"] and row["buffers_equal"]):
                said.append(f"{name}: results differ from eager mode's at a budget of {row['budget']} bytes")
    return said
