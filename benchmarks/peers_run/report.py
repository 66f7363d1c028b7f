"""The pages of the results: a table and a plot for each model, and the summary in ``docs/``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers_run.plot import plot

Row = dict[str, Any]
MIB = 2**20
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
        reasons = []
        if compiled:
            reasons.append("its kernels are fused, ours are eager mode's")
        if self.ours.middle - 1 - ours["predicted"] > 0.03:
            reasons.append(f"our plan predicted {1 + ours['predicted']:.2f}, and takes {self.ours.middle:.2f}")
        if self.verdict == EVEN:
            reasons.append("the difference is within the spread")
        if not reasons:
            reasons.append("the plan, as predicted, runs more again than the peer does")
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


def write(results: Mapping[str, Any], folder: Path, page: Path) -> None:
    """``peers.md`` and the plots in ``folder``, the summary as ``page``."""
    plots = folder / "peers"
    plots.mkdir(parents=True, exist_ok=True)
    lines = ["# Rockmate beside what people use today", "", *ABOUT_TABLES, ""]
    for name, found in results["models"].items():
        lines += [f"## {name}", ""]
        if "error" in found:
            lines += [f"Failed: {found['error']}", ""]
            continue
        points = points_of(name, found)
        file = plots / f"{name.lower().replace(' ', '-').replace('.', '-')}.svg"
        plot(found, points, all_ours(found), file)
        lines += [*about(found), "", *table(points), "", f"![time against memory](peers/{file.name})", ""]
        lines += [*left_out(found), ""]
    (folder / "peers.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf8")
    page.write_text("\n".join(summary(results)).rstrip() + "\n", encoding="utf8")


ABOUT_TABLES = (
    "Written by `benchmarks/peers.py`; the summary is [docs/peers.md](../../docs/peers.md).",
    "",
    "- *Peak*: exact bytes of one step above the level before it, gradients of parameters included, of eager mode's.",
    "- *FLOPs*: of matrix products, convolutions and fused attention in a whole step, of eager mode's.",
    "- *Time*: of the processor, on one thread, as a multiple of the eager step just before: the median (quartiles).",
    "  *Wall*: of the clock. *Ours to the peer*: the same ratio of neighbouring steps.",
    "- *At no more memory*: Rockmate's budget is the peer's peak. *At no more time*: the least peak of all plans of",
    "  ours that were timed and take no more time than the peer.",
    "- *Set-up*: seconds of the clock that the first step takes more than a later one.",
    "- *Equal*: the peer's gradients and running statistics are eager mode's, bit for bit; else what differs.",
)


def about(found: Row) -> Iterator[str]:
    """Eager mode's figures and our set-up."""
    eager = found["times"]["eager"]
    taken = spread([t[0] for t in eager])
    yield (
        f"{found['parameters']:,} parameters. Eager mode: {found['eager']['peak'] / MIB:.1f} MiB, "
        f"{found['eager']['flops'] / 1e9:.1f} GFLOP, {taken.middle:.2f} s of the processor "
        f"({taken.low:.2f}–{taken.high:.2f}), {statistics.median(t[1] for t in eager):.2f} s of the clock."
    )
    if found.get("frontier"):
        rows = [*(p["ours"] for p in found["points"][1:]), *found["ours_in_time"]]
        again = statistics.median([r["plan_seconds"] for r in rows if "peak" in r] or [0.0])
        least = found["frontier"]["least"] / found["eager"]["peak"]
        yield (
            f"Rockmate: set-up {found['our_set_up_seconds']:.1f} s, for another budget {again:.1f} s; plans from "
            f"{least:.0%} of that memory on."
        )


def table(points: Sequence[Point]) -> Iterator[str]:
    """One row a peer."""
    yield (
        "| peer | peak | FLOPs | time | wall | ours, at no more memory: peak | FLOPs | time | wall | ours to the peer |"
        " ours, at no more time: peak | set-up | equal |"
    )
    yield "|" + "---|" * 13
    for p in points:
        row, ours, eager = p.row, p.row["ours"], p.eager
        own = "out of reach | | | | | "
        if p.ours is not None:
            own = f"{ours['peak'] / eager['peak']:.3f} | {ours['flops'] / eager['flops']:.3f} | {p.ours} | "
            own += f"{p.our_wall.middle:.2f} | {p.beside} | " if p.our_wall else ""
        least = f"{p.in_time['peak'] / eager['peak']:.3f}" if p.in_time else "none"
        yield (
            f"| {row['peer']} | {p.share:.3f} | {row['flops'] / eager['flops']:.3f} | {p.processor} | "
            f"{p.wall.middle:.2f} | {own}{least} | {row['set_up_seconds']:.1f} s | {equality(row)} |"
        )


def equality(row: Row) -> str:
    if row["equal"]:
        return "yes" if row["buffers_equal"] else "but for running statistics"
    worst = row["largest_difference"]
    return "a gradient is missing" if worst == float("inf") else f"within {worst:.0e}"


def left_out(found: Row) -> Iterator[str]:
    """Methods without a row, and why; the counted ones of ``checkpoint_sequential`` with their figures."""
    for row in found["left_out"]:
        figures = ""
        if "peak" in row:
            figures = (
                f" ({row['peak'] / found['eager']['peak']:.3f}, FLOPs {row['flops'] / found['eager']['flops']:.3f})"
            )
        yield f"- {row['peer']}{figures}: {row['why']}"


# --------------------------------------------------------------------------------------------------- the summary


def summary(results: Mapping[str, Any]) -> Iterator[str]:
    """What a reader wants to know first: where the other is better."""
    points = [p for name, found in results["models"].items() for p in points_of(name, found)]
    count = {v: sum(p.verdict == v for p in points) for v in (AHEAD, EVEN, BEHIND, OUT_OF_REACH)}
    yield from ("# At this memory, how much slower?", "")
    wrong = broken(results)
    if wrong:
        yield from ("**Not all checks passed:**", "", *(f"- {w}" for w in wrong), "")
    yield (
        f"{len(results['models'])} models with {len(points)} settings of what people use today, on a CPU with one "
        f"thread (torch {results['environment']['torch']}). Rockmate's budget is the peak that the other method was "
        f"measured to have. Its step then takes less time in **{count[AHEAD]}** of {len(points)} cases, as much within "
        f"the spread in **{count[EVEN]}** and more in **{count[BEHIND]}**; in **{count[OUT_OF_REACH]}** it has no plan "
        "for so little."
    )
    if not wrong:
        yield "Its gradients are eager mode's in every bit, and every peak is within the budget."
    yield from ("", "This page is written by the program, from [peers.json](../benchmarks/results/peers.json):", "")
    yield from ("```sh", "python benchmarks/peers.py", "```", "")
    yield from ("## Where the other is better", "", *worse(points), "")
    yield from ("## Models", "", *all_points(points), "")
    yield from ("## What is missing", "", *missing(results), "")
    yield from HOW


HOW = (
    "## How it is measured",
    "",
    "- **Peaks** are exact: every allocation of one step is replayed. Gradients are None before it.",
    "- **Times** are processor time on one thread, as multiples of the eager step just before. Eager mode, the peer",
    "  and Rockmate take turns in several processes. Ranges are quartiles. *Ahead* and *behind* mean that three",
    "  quarters of the neighbouring steps say so.",
    "- **Settings** are the same for all: glibc keeps the memory that it has (`MALLOC_TRIM_THRESHOLD_`,",
    "  `MALLOC_MMAP_MAX_`, `MALLOC_TOP_PAD_`), and every step gets a memory laid out anew.",
    "- **Compiled** methods use inductor. Their FLOPs are counted with the same partitioner on eager mode's kernels.",
    "",
    "All figures of all models, with plots: [peers.md](../benchmarks/results/peers.md).",
)


def worse(points: Sequence[Point]) -> Iterator[str]:
    """All cases in which ours is not ahead, the worst first."""
    mine = [p for p in points if p.verdict in (BEHIND, OUT_OF_REACH)]
    if not mine:
        yield "In none of these cases."
        return
    mine.sort(key=lambda p: -(p.beside.middle if p.beside else 99))
    yield "| model | method | peak | its time | Rockmate's | why |"
    yield "|---|---|---|---|---|---|"
    for p in mine:
        yield f"| {p.model} | {p.row['peer']} | {p.share:.2f} | {p.processor} | {p.ours or 'none'} | {p.why} |"


def all_points(points: Sequence[Point]) -> Iterator[str]:
    yield "Peak and time as multiples of eager mode's; the last column is the least peak of ours in no more time."
    yield ""
    yield "| model | method | peak | its time | Rockmate's time | | Rockmate's peak in no more time |"
    yield "|---|---|---|---|---|---|---|"
    for p in points:
        least = f"{p.in_time['peak'] / p.eager['peak']:.2f}" if p.in_time else "none"
        ours = f"{p.ours}" if p.ours else "none"
        yield f"| {p.model} | {p.row['peer']} | {p.share:.2f} | {p.processor} | {ours} | {p.verdict} | {least} |"


def missing(results: Mapping[str, Any]) -> Iterator[str]:
    """Methods that ran for no model, or not for some, by reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, found in results["models"].items():
        if "error" in found:
            yield f"- {name}: {found['error']}"
        for row in found.get("left_out", []):
            if "peak" not in row:
                reasons.setdefault((row["peer"], row["why"]), []).append(name)
    for (peer, why), names in reasons.items():
        yield f"- {peer}: {why} ({'all models' if len(names) == len(results['models']) else ', '.join(names)})"
    compiled = {name: f["budgets"] for name, f in results["models"].items() if f.get("budgets")}
    said = ", ".join(f"{name} {' '.join(f'{b:g}' for b in budgets)}" for name, budgets in compiled.items())
    yield f"- activation_memory_budget: compiled with these values only: {said or 'none'}"
    yield "- checkpoint_sequential: only the numbers of segments that no other beats in bytes and FLOPs are timed"
    if why := results.get("environment", {}).get("why"):
        yield f"- {why}"
