"""A peer beside ours at one of its settings: what the times say, and why where ours is not ahead."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Row = dict[str, Any]
MIB = 2**20
SHARES = {"half": 1 / 2, "a third": 1 / 3, "a fifth": 1 / 5}
"""Of the activation memory: eager mode's peak without the gradients of the parameters."""

SIDES = {"ours": False, "ours compiled": True}
"""Ours with eager kernels and with compiled pieces; the latter beside what compiles only."""

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
    """A peer beside ours. Times as multiples of eager mode's; ``beside``: ours as a multiple of the peer's.

    ``compiled``: of ours compiled, the same two.
    """

    model: str
    row: Row
    eager: Row
    processor: Spread
    wall: Spread
    ours: Spread | None = None
    our_wall: Spread | None = None
    beside: Spread | None = None
    in_time: Row | None = None
    compiled: tuple[Spread, Spread] | None = None

    @property
    def verdict(self) -> str:
        return verdict(self.beside)

    @property
    def verdict_compiled(self) -> str:
        return verdict(self.compiled and self.compiled[1])

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
            also = f"; compiled, ours takes {self.compiled[1]} of its time" if self.compiled else ""
            reasons.append(f"its kernels are fused{also}")
        if self.ours.middle - 1 - ours["predicted"] > 0.03:
            reasons.append(f"our plan predicted {1 + ours['predicted']:.2f}, and takes {self.ours.middle:.2f}")
        if self.verdict == EVEN:
            reasons.append("the difference is within the spread")
        return "; ".join(reasons)


def verdict(beside: Spread | None) -> str:
    """Ahead or behind only where three quarters of the interleaved steps are."""
    if beside is None:
        return OUT_OF_REACH
    return AHEAD if beside.high < 1 else BEHIND if beside.low > 1 else EVEN


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
        ours, compiled = (found["times"].get(f"{side}: {row['peer']}") for side in SIDES)
        point = Point(name, row, found["eager"], processor, wall, in_time=in_time)
        if ours:
            own, our_wall = (spread([t[k] for t in ours]) for k in (0, 1))
            point = replace(point, ours=own, our_wall=our_wall, beside=ratio(ours, theirs))
        if compiled:
            point = replace(point, compiled=(spread([t[0] for t in compiled]), ratio(compiled, theirs)))
        points.append(point)
    return points


def budgets_beside(points: Sequence[Row]) -> dict[str, dict[str, int]]:
    """For each peer those of ours that a plan fits, by ``SIDES``."""
    return {p["peer"]: {side: p[side]["budget"] for side in SIDES if "peak" in p.get(side, ())} for p in points}


def ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Spread:
    """Of the processor's times of neighbouring steps."""
    return spread([o[0] / t[0] for o, t in zip(ours, theirs, strict=True)])


def all_ours(found: Row, side: str = "ours") -> list[Row]:
    """Every budget of ours that was timed."""
    named = [(f"{side}: {p['peer']}", p[side]) for p in found["points"] if side in p]
    named += [(f"{side}: {row['budget']}", row) for row in found["ours_in_time"]]
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
        for row in [*(p[side] for p in found["points"] for side in SIDES if side in p), *found["ours_in_time"]]:
            if "peak" in row and not row["within"]:
                said.append(f"{name}: a peak of {row['peak']} bytes within a budget of {row['budget']}")
            if "peak" in row and "pieces" not in row and not (row["equal"] and row["buffers_equal"]):
                said.append(f"{name}: results differ from eager mode's at a budget of {row['budget']} bytes")
    return said


def merged(known: Row, found: Row, families: Sequence[str]) -> Row:
    """``found`` of methods whose names begin like ``families``, in place of what is ``known`` of them."""
    mine = tuple(families)
    both: Row = {
        key: [*(row for row in known[key] if not row["peer"].startswith(mine)), *found[key]]
        for key in ("points", "left_out")
    }
    others = {key: taken for key, taken in known["times"].items() if not key.rpartition(": ")[2].startswith(mine)}
    return known | both | {"times": found["times"] | others, "budgets": found["budgets"], "seconds": found["seconds"]}
