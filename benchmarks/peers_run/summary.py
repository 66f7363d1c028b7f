"""The summary in ``docs/``: first where Rockmate is not ahead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from peers_run.points import AHEAD, BEHIND, EVEN, OUT_OF_REACH, SHARES, Point, broken, points_of


def summary(results: Mapping[str, Any]) -> Iterator[str]:
    """What a reader wants to know first: where the others are better."""
    points = [p for name, found in results["models"].items() for p in points_of(name, found)]
    beside = [p for p in points if "ours compiled" in p.row]
    count, also = Counter(p.verdict for p in points), Counter(p.verdict_compiled for p in beside)
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
        yield "With eager kernels its gradients are eager mode's in every bit. Every peak is within the budget."
    if beside:
        yield (
            f"{len(beside)} of the settings compile the model. With `compile=True`, Rockmate takes less time in "
            f"**{also[AHEAD]}** of them, as much in **{also[EVEN]}** and more in **{also[BEHIND]}**; in "
            f"**{also[OUT_OF_REACH]}** it has no such plan."
        )
    yield from ("", "This page is written by the program, from [peers.json](../benchmarks/results/peers.json):", "")
    yield from ("```sh", "python benchmarks/peers.py", "```", "")
    yield from ("## Where Rockmate is not ahead", "", *not_ahead(points), "")
    yield from ("## Beside compiled models", "", *all_compiled(beside), "")
    yield from ("## Models", "", *all_points(points), "")
    yield from ("## How little memory", "", *how_little(results), "")
    yield from ("## What is missing", "", *missing(results), "")
    yield from HOW
    where = results["environment"]
    yield from (
        f"- **Noise**: {where['processes']} processes of {where['rounds']} steps each, beside other work on the cores.",
        "  A difference of less than 5 % means little.",
        *(
            f"- **{of}**: measured on another day than the rest, in {how['processes']} × {how['rounds']} steps. "
            "There a difference of less than 10 % means little."
            for of, how in results.get("added", {}).items()
        ),
        "",
        "All figures of all models, with plots: [peers.md](../benchmarks/results/peers.md).",
    )


HOW = (
    "## How it is measured",
    "",
    "- **Methods**: `torch.utils.checkpoint` around all blocks, around every second one, or around segments of them;",
    "  *keeping matrix products* is selective checkpointing. *compile, whole model* is `torch.compile(model)`;",
    "  *each block on its own* is `torch.compile` of every block's forward (regional compilation);",
    "  *every block checkpointed* is the model with checkpoints, compiled; *activation_memory_budget* is torch's.",
    "- **Peaks** are exact: every allocation of one step is replayed. Gradients are None before it.",
    "- **Times** are processor time on one thread, as multiples of the eager step just before. Eager mode, the peer",
    "  and Rockmate take turns in several processes. Ranges are quartiles. *Ahead* and *behind* mean that three",
    "  quarters of the neighbouring steps say so.",
    "- **Settings** are the same for all: glibc keeps the memory that it has (`MALLOC_TRIM_THRESHOLD_`,",
    "  `MALLOC_MMAP_MAX_`, `MALLOC_TOP_PAD_`), and every step gets a memory laid out anew.",
    "- **Compiled** methods use inductor. Their FLOPs are counted with the same partitioner on eager mode's kernels.",
    "  Of a model with many convolutions Inductor changes the memory format to channels-last. On a CPU that is most of",
    "  what it gains there, and there [for every plan](compile.md#convolutional-networks), if the script asks for it.",
)


def not_ahead(points: Sequence[Point]) -> Iterator[str]:
    """Behind, then out of reach, then even; the worst first."""
    order = (BEHIND, OUT_OF_REACH, EVEN)
    mine = [p for p in points if p.verdict in order]
    if not mine:
        yield "In none of these cases."
        return
    yield "With eager kernels, as by default; compiled settings are [below](#beside-compiled-models) beside both."
    yield ""
    mine.sort(key=lambda p: (order.index(p.verdict), -(p.beside.middle if p.beside else 0)))
    yield "| model | method | peak | its time | Rockmate's | Rockmate's to its | | why |"
    yield "|---|---|---|---|---|---|---|---|"
    for p in mine:
        start = f"| {p.model} | {p.row['peer']} | {p.share:.2f} | {p.processor} | {p.ours or 'none'} | "
        yield f"{start}{p.beside or 'none'} | {p.verdict} | {p.why} |"


def how_little(results: Mapping[str, Any]) -> Iterator[str]:
    """What shares of the activation memory cost, as planned and at least, and the smallest peaks."""
    yield "Activation memory is eager mode's peak without the gradients of the parameters. The percentages are the"
    yield "time that a plan within such a share of it takes more, as predicted; predicted and measured times of nine"
    yield "models are [compared](benchmarks.md#time-predicted-and-measured). In brackets:"
    yield "what any schedule of the model's operations takes more at least, by a proven bound. A dash: no plan is so"
    yield "small."
    yield ""
    yield f"| model | {' | '.join(SHARES)} | smallest share | our smallest peak | of the others |"
    yield "|---|" + "---|" * (len(SHARES) + 3)
    for name, found in results["models"].items():
        if not found.get("shares"):
            continue
        peak, least, gradients = found["eager"]["peak"], found["frontier"]["least"], 4 * found["parameters"]
        costs = " | ".join(_cost(found["shares"][share]) for share in SHARES)
        smallest = (least - gradients) / (peak - gradients)
        others = min((row["peak"] for row in found["points"]), default=peak) / peak
        yield f"| {name} | {costs} | {smallest:.2f} | {least / peak:.2f} | {others:.2f} |"


def _cost(plan: Mapping[str, Any] | None) -> str:
    if plan is None:
        return "–"
    bound = "" if plan["bound"] is None else f" (≥ {100 * plan['bound']:.1f})"
    return f"{100 * plan['overhead']:.1f} %{bound}"


def all_points(points: Sequence[Point]) -> Iterator[str]:
    yield "Peak and time as multiples of eager mode's; the last column is the least peak of ours in no more time."
    yield ""
    yield "| model | method | peak | its time | Rockmate's time | | Rockmate's peak in no more time |"
    yield "|---|---|---|---|---|---|---|"
    for p in points:
        least = f"{p.in_time['peak'] / p.eager['peak']:.2f}" if p.in_time else "none"
        ours = f"{p.ours}" if p.ours else "none"
        yield f"| {p.model} | {p.row['peer']} | {p.share:.2f} | {p.processor} | {ours} | {p.verdict} | {least} |"


def all_compiled(points: Sequence[Point]) -> Iterator[str]:
    """What compiles beside both of ours, at the same memory."""
    yield "Peak and time as multiples of eager mode's. Rockmate's budget is the peak, with eager kernels and with"
    yield "`compile=True`; *compiled to its* is the time of the latter as a multiple of the method's."
    if rises := risen(points):
        yield "`activation_memory_budget` is a share, and no bound. A lower value took more memory than a higher one in"
        yield f"{', '.join(rises)}."
    if wrong := astray(points):
        yield "With dropout, it may draw other masks in the backward than in the forward"
        yield "([pytorch#190758](https://github.com/pytorch/pytorch/issues/190758)), and gradients are wrong:"
        yield f"{', '.join(wrong)}."
    yield ""
    yield "| model | method | peak | its time | eager kernels | compiled | compiled to its | |"
    yield "|---|---|---|---|---|---|---|---|"
    for p in points:
        own = " | ".join(map(str, p.compiled)) if p.compiled else "none | none"
        start = f"| {p.model} | {p.row['peer']} | {p.share:.2f} | {p.processor} | {p.ours or 'none'} | "
        yield f"{start}{own} | {p.verdict_compiled} |"


BUDGETED, WHOLE = "compile, activation_memory_budget", "compile, whole model"


def risen(points: Sequence[Point]) -> list[str]:
    """Models in which a lower ``activation_memory_budget`` has a higher peak, with the pair that differs most."""
    said = []
    for model in dict.fromkeys(p.model for p in points):
        mine = [p for p in points if p.model == model and p.row["family"] == BUDGETED]
        found = [(float(p.row["peer"].split()[-1]), p.share) for p in mine]
        pairs = [(a, b) for a in found for b in found if a[0] < b[0] and a[1] > b[1] + 0.01]
        if pairs:
            (low, more), (high, less) = max(pairs, key=lambda pair: pair[0][1] - pair[1][1])
            said.append(f"{model} ({low:g}: {more:.2f}, {high:g}: {less:.2f})")
    return said


def astray(points: Sequence[Point]) -> list[str]:
    """Where gradients are much further from eager mode's than those of the whole model compiled."""
    alone = {p.model: p.row["largest_difference"] for p in points if p.row["peer"] == WHOLE}
    far = [p for p in points if p.row["largest_difference"] > 20 * alone.get(p.model, float("inf"))]
    return [
        f"{p.model} at {p.row['peer'].split()[-1]} (off by {p.row['largest_difference']:.2g} times a parameter's "
        f"largest, without the setting by {alone[p.model]:.2g})"
        for p in far
    ]


def missing(results: Mapping[str, Any]) -> Iterator[str]:
    """Methods that ran for no model, or not for some, by reason."""
    if names := results.get("not_run"):
        yield f"- not run: {', '.join(names)}"
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, found in results["models"].items():
        if "error" in found:
            yield f"- {name}: {found['error']}"
        for row in found.get("left_out", []):
            if "peak" not in row:
                reasons.setdefault((row["peer"], row["why"]), []).append(name)
    for (peer, why), names in reasons.items():
        yield f"- {peer}: {why} ({'all models' if len(names) == len(results['models']) else ', '.join(names)})"
    compiled: dict[str, list[str]] = {}
    for name, found in results["models"].items():
        compiled.setdefault(" ".join(f"{b:g}" for b in found.get("budgets", ())) or "none", []).append(name)
    said = "; ".join(f"{values} ({', '.join(names)})" for values, names in compiled.items())
    yield f"- activation_memory_budget: compiled with these values only: {said}"
    yield "- checkpoint_sequential: only the numbers of segments that no other beats in bytes and FLOPs are timed"
    if why := results.get("environment", {}).get("why"):
        yield f"- {why}"
