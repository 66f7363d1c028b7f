"""What a plan does with each node (keeps what it makes, runs it again, or neither), and with each block, as a table;
and for which call it is, in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rockmate.budget import show_bytes
from solvers import Bwd, Del, Loss, Problem, Run, Schedule, keep_everything, walk
from solvers.tables import text_table


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one node's results.

    ``made``: bytes of all that it makes. ``kept``: of these, bytes that are there when the forward phase is over.
    ``again``: for each second run, the node before whose backward it takes place.
    """

    made: int
    kept: int
    again: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """ "kept", "again" (dropped, and run again once), "often" (more than once), or "free": not needed later."""
        if self.again:
            return "again" if len(self.again) == 1 else "often"
        return "kept" if self.kept else "free"


def fates(problem: Problem, schedule: Schedule) -> tuple[Fate, ...]:
    """One fate a node, in order."""
    turn = schedule.index(Loss())
    live: set[int] = set()
    for step in schedule[:turn]:
        if isinstance(step, Run):
            live.update(problem.nodes[step.node].makes)
        elif isinstance(step, Del):
            live.discard(step.data)
    again: dict[int, list[int]] = {}
    pending: list[int] = []
    for step in schedule[turn:]:
        if isinstance(step, Run):
            pending.append(step.node)
        elif isinstance(step, Bwd):
            for i in pending:
                again.setdefault(i, []).append(step.node)
            pending.clear()
    return tuple(
        Fate(_bytes(problem, node.makes), _bytes(problem, live.intersection(node.makes)), tuple(again.get(i, ())))
        for i, node in enumerate(problem.nodes)
    )


def _bytes(problem: Problem, data: Sequence[int] | set[int]) -> int:
    return sum(problem.data[d].size for d in set(data))


MOST_INPUTS = 8
"""A call with more inputs is shown with the first ones."""

MOST_IN_LINE = 4
"""Of more things than this a line names the first ones."""

MOST_LINES = 20
"""Longer tables end with the number of lines left out, and with what has them all."""


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """What a schedule does with one block.

    ``kept``: bytes of its data that are there when the forward phase is over; ``all``: the same if nothing is run
    again, which is less where small data are kept that would be freed, to compute large ones from. ``reruns``: how many
    nodes run again, each time counted; ``time``: the nanoseconds that the step takes more for them. ``first`` and
    ``last``: the names of its outermost nodes.
    """

    kind: int
    nodes: int
    kept: int
    all: int
    reruns: int
    time: int
    first: str = field(default="", compare=False)
    last: str = field(default="", compare=False)


def block_choices(problem: Problem, schedule: Schedule, overhead: float | None = None) -> tuple[BlockChoice, ...]:
    """One choice a block, in order. ``overhead``: of the step, which the blocks share; None for what ``walk`` finds.
    A node that runs again may take less than its ``time``: its inputs are in the caches, or the device waits anyway.
    """
    ours, eager = fates(problem, schedule), fates(problem, keep_everything(problem))
    more = (walk(problem, schedule).overhead if overhead is None else overhead) * problem.eager_time
    times = [node.time * len(fate.again) for node, fate in zip(problem.nodes, ours, strict=True)]
    part = more / (sum(times) or 1)
    return tuple(
        BlockChoice(
            block.kind,
            block.stop - block.start,
            sum(fate.kept for fate in ours[block.start : block.stop]),
            sum(fate.kept for fate in eager[block.start : block.stop]),
            sum(len(fate.again) for fate in ours[block.start : block.stop]),
            round(part * sum(times[block.start : block.stop])),
            problem.nodes[block.start].name,
            problem.nodes[block.stop - 1].name,
        )
        for block in problem.blocks
    )


def block_rows(
    problem: Problem, schedule: Schedule, overhead: float | None = None
) -> tuple[list[tuple[str, ...]], str]:
    """The choices as rows of a table, titles first, and what is to be said behind them of lines that were left out.

    Neighbours that are treated alike share a line.
    """
    rows: list[tuple[str, ...]] = [
        ("blocks", "class", "nodes", "keeps", "instead of", "runs again", "time", "from … to")
    ]
    choices = block_choices(problem, schedule, overhead)
    for choice, group in groupby(enumerate(choices), key=lambda pair: pair[1]):
        blocks = [b for b, _ in group]
        name = f"{blocks[0]}" if len(blocks) == 1 else f"{blocks[0]}–{blocks[-1]}"
        share = choice.time / problem.eager_time if problem.eager_time else 0.0
        time = f"{100 * share:+.1f} %" if choice.reruns else ""
        if choice.reruns and len(blocks) > 1:
            time += " each"
        sizes = (show_bytes(choice.kept), show_bytes(choice.all))
        span = " … ".join(dict.fromkeys((choices[blocks[0]].first, choices[blocks[-1]].last)))
        rows.append((name, str(choice.kind), str(choice.nodes), *sizes, str(choice.reruns), time, span))
    left_out = len(rows) - 1 - MOST_LINES
    more = f"… and {left_out} lines more: print(plan.program()), or rockmate plan … --program, has every step"
    return rows[: MOST_LINES + 1], more if left_out > 0 else ""


def block_table(problem: Problem, schedule: Schedule, overhead: float | None = None) -> str:
    rows, left_out = block_rows(problem, schedule, overhead)
    return text_table(rows, left=[len(rows[0]) - 1]) + (f"\n{left_out}" if left_out else "")


def facts_of_call(call: tuple[str, ...]) -> list[tuple[str, str]]:
    """For which inputs a plan is, one line each, and in which mode and precision, as far as ``call`` says it."""
    inputs, mode = _parts(call)
    shown = some_of(inputs, MOST_INPUTS, ", which plan.call has")
    lines = [("" if k else "inputs", text) for k, text in enumerate(shown or ["none"])]
    if mode and not any(word.startswith("autocast ") for word in mode):
        mode.append("no autocast")
    return lines + ([("mode", ", ".join(mode))] if mode else [])


def line_of_call(call: tuple[str, ...]) -> str:
    """The same in one line."""
    inputs, mode = _parts(call)
    return ", ".join([*some_of(inputs), *mode])


def some_of(words: list[str], most: int = MOST_IN_LINE, where: str = "") -> list[str]:
    """At ``most`` so many of ``words``, and how many more there are."""
    left = len(words) - most
    return [*words[:most], f"… and {left} more{where}"] if left > 0 else words


def _parts(call: tuple[str, ...]) -> tuple[list[str], list[str]]:
    mode = [word for word in call if word in ("train", "eval") or word.startswith("autocast ")]
    return [word for word in call if word not in mode], mode


def text_of_facts(facts: list[tuple[str, str]]) -> str:
    """One line each: the name, and what is said."""
    return "\n".join(f"{name:<20}{text}" for name, text in facts)
