"""A table and a plot for each model, beside the results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peers_run.plot import plot
from peers_run.points import MIB, SIDES, Point, Row, all_ours, points_of, spread
from peers_run.summary import summary


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
        if not found["points"]:
            lines += ["No method runs:", "", *left_out(found), ""]
            continue
        points = points_of(name, found)
        file = plots / f"{name.lower().replace(' ', '-').replace('.', '-')}.svg"
        plot(found, points, {side: all_ours(found, side) for side in SIDES}, file)
        lines += [*about(found), "", *table(points), "", f"![time against memory](peers/{file.name})", ""]
        lines += [*compiled_table(points), *left_out(found), ""]
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
    "- *Set-up*: seconds of the clock that the first step takes more than a later one. What compiles finds the kernels",
    "  that it shares with the methods before it in Inductor's cache.",
    "- *Equal*: the peer's gradients and running statistics are eager mode's, bit for bit; else what differs, and how",
    "  much at most, of the largest gradient of a parameter, or of a thousandth of the largest of all if that is more.",
    "  Compiled dropout draws other random numbers.",
    "- *Ours compiled*: a plan with compiled pieces (`compile=True`), beside what compiles only.",
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


def compiled_table(points: Sequence[Point]) -> Iterator[str]:
    """What compiles beside ours compiled, one row a peer; nothing where there is none."""
    rows = [(p, p.row["ours compiled"]) for p in points if "ours compiled" in p.row]
    if not rows:
        return
    yield "| peer | peak | time | ours compiled: peak | time | ours compiled to the peer | differs from eager mode |"
    yield "|" + "---|" * 7
    for p, ours in rows:
        own = f"{ours.get('why', 'out of reach')} | | | "
        if p.compiled is not None:
            own = f"{ours['peak'] / p.eager['peak']:.3f} | {p.compiled[0]} | {p.compiled[1]} | {equality(ours)}"
        yield f"| {p.row['peer']} | {p.share:.3f} | {p.processor} | {own} |"
    if pieces := [ours["pieces"] for _, ours in rows if ours.get("pieces")]:
        yield from ("", f"Pieces: {pieces[0]}.")
    yield ""


def equality(row: Row) -> str:
    if row["equal"]:
        return "yes" if row["buffers_equal"] else "but for running statistics"
    worst = row["largest_difference"]
    return "a gradient is missing" if worst == float("inf") else f"differs by {worst:.0e}"


def left_out(found: Row) -> Iterator[str]:
    """Methods without a row, and why; the counted ones of ``checkpoint_sequential`` with their figures."""
    for row in found["left_out"]:
        figures = ""
        if "peak" in row:
            figures = (
                f" ({row['peak'] / found['eager']['peak']:.3f}, FLOPs {row['flops'] / found['eager']['flops']:.3f})"
            )
        yield f"- {row['peer']}{figures}: {row['why']}"
