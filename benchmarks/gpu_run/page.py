"""The results as a Markdown page: a line for each part, and a table for each section."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_run.records import read

Row = dict[str, Any]

ABOUT = {
    "versions": "What runs, and the most that the device copies and multiplies (medians of ten).",
    "tests": "Those of `tests/` for a device; without one they skip themselves.",
    "zoo": "A step that saves three quarters of what recomputation can, against eager mode: the largest relative "
    "difference, beside that of eager mode's own second run (`of eager`); `random` are generators' states.",
    "bytes": "Peaks of a step above the level before it. *Requested* is what budgets are of; *allocated* and "
    "*reserved* depend on the allocator, and are predicted by simulating it.",
    "scripts": "Losses, the largest peak and seconds of training scripts, plainly and with a plan for a share of the "
    "plain peak; `gap` is the largest relative difference of the losses, `settled` the time of later steps as a "
    "multiple of the plain one. They run beside each other.",
    "time": "Peak and median time of a step by torch's own ways to save memory, and of a plan whose budget is that "
    "peak.",
    "launch": "Wall time of a step beside the time that the device is busy with it. Larger by a "
    "tenth: bound by launches.",
    "peers": "Peak and median time of what people use today, and of a plan whose budget is that peak.",
    "fits": "The largest batch that trains under a limit of the allocator.",
}


def page(path: Path) -> str:
    """The page of the results in ``path``; the last run's, if there are several."""
    records = read(path)
    dry = any(r.get("dry") for r in records)
    finished = "" if any("finished" in r for r in records) else " The run was cut short."
    lines = ["# On a GPU", ""]
    where = "a dry run at toy sizes on a CPU, whose figures mean nothing" if dry else "`python benchmarks/gpu.py`"
    lines += [f"From {where}.{finished}", "", *_parts(records)]
    for section in ABOUT:
        mine = [r for r in records if r.get("section") == section and "row" in r]
        rows = [r["row"] for r in sorted(mine, key=lambda r: r["part"])]
        if rows:
            lines += [f"## {section}", "", ABOUT[section], "", *_summary(section, rows), *_tables(rows)]
    return "\n".join(lines).rstrip() + "\n"


def _parts(records: Sequence[Row]) -> list[str]:
    lines = ["| part | ended | seconds | of | rows |", "|---|---|---|---|---|"]
    notes = []
    for r in records:
        if "ended" in r:
            same = [x for x in records if "row" in x and (x["section"], x["part"]) == (r["section"], r["part"])]
            name = f"{r['section']} {r['part']}".strip()
            lines.append(f"| {name} | {r['ended']} | {r['seconds']} | {r['limit']} | {len(same)} |")
            if r["why"].strip():
                notes += [f"{name}, the end of what it said:", "", "```text", r["why"].strip()[-1200:], "```", ""]
    return [*lines, "", *notes]


def _summary(section: str, rows: Sequence[Row]) -> list[str]:
    made = SUMMARIES.get(section)
    said = made([r for r in rows if "error" not in r]) if made else ""
    return [said, ""] if said else []


def _tests(rows: Sequence[Row]) -> str:
    counts = {outcome: sum(r["outcome"] == outcome for r in rows) for outcome in ("passed", "failed", "skipped")}
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + "."


def _zoo(rows: Sequence[Row]) -> str:
    rows = [r for r in rows if "equal" in r]
    equal, near = sum(r["equal"] for r in rows), sum(r["as_near_as_eager"] for r in rows)
    return f"{equal} of {len(rows)} equal bit for bit; {near} as near as twice eager mode's own difference."


def _bytes(rows: Sequence[Row]) -> str:
    pairs = [r for r in rows if "requested_bytes" in r]
    over = sum(r["requested_bytes"] > r["budget_bytes"] for r in pairs)
    worst = max((abs(r["requested_bytes"] - r["predicted_bytes"]) for r in pairs), default=0)
    said = f"{len(pairs)} pairs, {over} above the budget; requested and predicted differ by {worst:,} bytes at most."
    for what in ("allocated", "reserved"):
        known = [r for r in pairs if r.get(f"{what}_bytes") and f"predicted_{what}_bytes" in r]
        if known:
            ratios = [r[f"predicted_{what}_bytes"] / r[f"{what}_bytes"] for r in known]
            said += f" Predicted by measured {what} bytes: {min(ratios):.3f} to {max(ratios):.3f}."
    traces = [r for r in rows if "replayed" in r]
    return said + f" {sum(r['replayed'] for r in traces)} of {len(traces)} traces replayed exactly."


def _time(rows: Sequence[Row]) -> str:
    both = [r for r in rows if "our_time_ns" in r]
    ahead = sum(r["our_time_ns"] <= r["time_ns"] for r in both)
    within = sum(r["our_peak_bytes"] <= r["peak_bytes"] for r in both)
    beside = sum("our_least_bytes" in r for r in rows)
    return (
        f"Ours no slower at {ahead} of {len(both)} points, within the peer's peak at {within}; {beside} peaks are too "
        "small for any plan."
    )


SUMMARIES: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "tests": _tests,
    "zoo": _zoo,
    "bytes": _bytes,
    "time": _time,
}


def _tables(rows: Sequence[Row]) -> list[str]:
    """One for the rows of each form: pairs and traces, cases and errors."""
    forms: dict[str, list[Row]] = {}
    for row in rows:
        forms.setdefault("error" if "error" in row else "trace" if "replayed" in row else "", []).append(row)
    lines = []
    for same in forms.values():
        columns = list(dict.fromkeys(key for row in same for key in row))
        lines.append("| " + " | ".join(_title(c) for c in columns) + " |")
        lines.append("|" + "---|" * len(columns))
        lines += ["| " + " | ".join(_cell(c, row.get(c)) for c in columns) + " |" for row in same]
        lines.append("")
    return lines


def _title(column: str) -> str:
    for ending, unit in (("_bytes", ", MiB"), ("_ns", ", ms")):
        if column.endswith(ending):
            return column.removesuffix(ending).replace("_", " ") + unit
    return column.replace("_", " ")


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if column.endswith("_bytes"):
        return f"{value / 2**20:,.3f}"
    if column.endswith("_ns"):
        return f"{value / 1e6:,.3f}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(str(value).replace("|", "\\|").split())
