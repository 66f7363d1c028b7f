"""A plan as a picture: the chain of its blocks, and the operations of each block that is treated in its own way.

Colours say what is kept and what runs again. ``rkgb.print_graph(plan)`` writes the picture to a file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from rkgb.graphs import S_graph
from rkgb.render import parts
from rkgb.render.columns import Panel, Size, chain_pages, stand
from rkgb.units import format_time
from rockmate.budget import show_bytes
from rockmate.planning.report import BlockChoice, Fate, block_choices, fates
from solvers import Bwd, Problem, Run, Schedule, step_name, walk

COLOURS = {"kept": "#bcd6f2", "again": "#cfe8ae", "often": "#8fc05a", "free": "#ececec"}
"""By ``Fate.kind``; "run again" is green in the plot of memory, too."""

LEGEND = (
    (COLOURS["kept"], "kept for the backward"),
    (COLOURS["again"], "dropped, runs again once"),
    (COLOURS["often"], "runs again several times"),
    (COLOURS["free"], "not needed by the backward"),
    (parts.LOSS, "the loss"),
)

CHAIN, BLOCK = Size(70, 78, 260, 0), Size(90, 58, 200, 8)


@dataclass(frozen=True)
class Drawn:
    """A schedule to be drawn; the nodes of ``s`` are those of the problem."""

    s: S_graph
    problem: Problem
    schedule: Schedule
    overhead: float

    @cached_property
    def makers(self) -> dict[int, int]:
        return {v: i for i, node in enumerate(self.s.nodes) for v in node.makes}

    @cached_property
    def fates(self) -> tuple[Fate, ...]:
        return fates(self.problem, self.schedule)

    @cached_property
    def choices(self) -> tuple[BlockChoice, ...]:
        return block_choices(self.problem, self.schedule, self.overhead)

    @cached_property
    def peak(self) -> tuple[int, str]:
        """The block in which the peak is, behind the last one for the loss, and the step."""
        step = self.schedule[walk(self.problem, self.schedule).peak_step]
        inside = step.node if isinstance(step, Run | Bwd) else len(self.problem.nodes)
        return sum(block.stop <= inside for block in self.problem.blocks), step_name(self.problem, step)

    def title(self, b: int) -> str:
        block = self.problem.blocks[b]
        return f"block {b} · {modules(self.s, block.start, block.stop)}"

    def keeps(self, b: int) -> str:
        """What block b keeps, in words."""
        return f"keeps {show_bytes(self.choices[b].kept)} of {show_bytes(self.choices[b].all)}"


def draw_plan(drawn: Drawn, title: str, facts: str) -> Any:
    """As a ``graphviz.Digraph``: the chain of blocks, and of those that are alike, and treated alike, the first one."""
    picture = parts.new_picture(title, facts, LEGEND)
    distinct: dict[Any, list[int]] = {}
    for b, block in enumerate(drawn.problem.blocks):
        treated = tuple((f.kept, len(f.again)) for f in drawn.fates[block.start : block.stop])
        distinct.setdefault((block.kind, treated), []).append(b)
    panels = []
    for alike in distinct.values():
        block = drawn.problem.blocks[alike[0]]
        names = [node.name for node in drawn.problem.nodes[block.start : block.stop]]
        add = partial(_add_block, drawn=drawn, b=alike[0], alike=alike)
        panels.append(Panel(BLOCK.width(names), BLOCK.height(len(names)), add))
    spans = chain_pages(len(drawn.problem.blocks), CHAIN, sum(p.width * p.height for p in panels))
    chain = [Panel(CHAIN.base, CHAIN.height(b - a), partial(_add_chain, drawn=drawn, span=(a, b))) for a, b in spans]
    stand(picture, [*chain, *panels])
    return picture


def _add_chain(picture: Any, drawn: Drawn, span: tuple[int, int]) -> tuple[list[str], str]:
    """Add the blocks of ``span``, and the loss behind the last one; the keys at the top and the end."""
    blocks, (start, stop) = drawn.problem.blocks, span
    chain = parts.chain_frame(span, len(blocks))
    keys = [f"chain{b}" for b in range(start, stop)]
    for b, key in zip(range(start, stop), keys, strict=True):
        _add_block_box(chain, drawn, b, key)
    if stop == len(blocks):
        keys.append("loss")
        peak = f"the peak: {drawn.peak[1]}" if drawn.peak[0] == len(blocks) else ""
        parts.add_box(chain, keys[-1], parts.label("loss", peak), "the gradients of the outputs arrive", parts.LOSS)
    for above, below in itertools.pairwise(keys):
        chain.edge(above, below, weight="20")
    picture.subgraph(chain)
    return keys[:1], keys[-1]


def _add_block_box(chain: Any, drawn: Drawn, b: int, key: str) -> None:
    """The box of block b: what of it is kept and runs again, with stripes as wide as the bytes in question."""
    block, choice, at_peak = drawn.problem.blocks[b], drawn.choices[b], drawn.peak[0] == b
    nodes = drawn.problem.nodes[block.start : block.stop]
    inside = drawn.fates[block.start : block.stop]
    forward, backward = sum(n.time for n in nodes), sum(n.backward.time for n in nodes if n.backward)
    most = max((len(f.again) for f in inside), default=0)
    count = sum(bool(f.again) for f in inside)
    again = f"runs again: {count} of {len(nodes)}" if count else "nothing runs again"
    text = parts.label(
        drawn.title(b),
        drawn.keeps(b),
        again + (f", up to {most} times" if most > 1 else "") + (f", {_share(drawn, choice)}" if count else ""),
        f"forward {format_time(forward)}, backward {format_time(backward)}",
        f"the peak: {drawn.peak[1]}" if at_peak else "",
    )
    look = {"penwidth": "2.5", "color": "#b04a4a"} if at_peak else {}
    fill, style = _stripes(inside)
    tooltip = "\n".join(f"{n.name}: {_said(drawn, i)}" for i, n in enumerate(nodes, block.start))
    parts.add_box(chain, key, text, tooltip, fill, style=style, **look)


def _stripes(inside: Sequence[Fate]) -> tuple[str, str]:
    """The colours of a box for nodes, in proportion to the bytes that they make, and the style that shows them."""
    sizes = {kind: sum(f.made for f in inside if f.kind == kind) for kind in COLOURS}
    total = max(1, sum(sizes.values()))
    shown = [(COLOURS[kind], size / total) for kind, size in sizes.items() if size / total >= 0.01]
    if len(shown) < 2:
        return shown[0][0] if shown else COLOURS["free"], "filled"
    *first, (last, _) = shown
    return "".join(f"{colour};{share:.3f}:" for colour, share in first) + last, "striped"


def _share(drawn: Drawn, choice: BlockChoice) -> str:
    """The time of what runs again, as a share of the step."""
    eager = drawn.problem.eager_time
    return f"{100 * choice.time / eager:+.1f} %" if eager else format_time(choice.time)


def _add_block(picture: Any, drawn: Drawn, b: int, alike: Sequence[int]) -> tuple[list[str], str]:
    """Add the operations of block b, with what they read of other blocks; the keys at the top and the end.

    ``alike``: it, and others like it.
    """
    block, choice = drawn.problem.blocks[b], drawn.choices[b]
    said = drawn.keeps(b)
    said += f" · runs again: {choice.reruns}, {_share(drawn, choice)}" if choice.reruns else " · nothing runs again"
    others = f"the same: {'block' if len(alike) == 2 else 'blocks'} {_ranges(alike[1:])}" if len(alike) > 1 else ""
    frame = parts.new_block(f"block{b}", drawn.title(b), block.kind, said, others)
    tops: dict[str, None] = {}
    for i in range(block.start, block.stop):
        _add_operation(frame, drawn, i)
        before = _add_reads(frame, drawn, i, b)
        tops.update(dict.fromkeys(key for key in before if f"b{b}_" in key))
        if not before and i == block.start:
            tops[f"n{i}"] = None
        elif not before:  # nothing but its place in the program says where it belongs
            parts.put_below(frame, f"n{i - 1}", [f"n{i}"])
    picture.subgraph(frame)
    return list(tops), f"n{block.stop - 1}"


def _add_reads(frame: Any, drawn: Drawn, i: int, b: int) -> list[str]:
    """Add edges to node i of block b from what it reads, with ellipses for what enters the block; keys of all."""
    s, start = drawn.s, drawn.problem.blocks[b].start
    keys: dict[str, None] = {}
    for v in s.nodes[i].reads:
        j = drawn.makers.get(v)
        if j is not None and j >= start:
            keys[f"n{j}"] = None
        elif j is not None:
            keys[f"b{b}_n{j}"] = None
            _add_entering(frame, drawn, j, f"b{b}_n{j}")
        elif s.d.sources[v].kind == "input":
            keys[f"b{b}_v{v}"] = None
            text = parts.data_label(s.shown[v], "input")
            parts.add_data(frame, f"b{b}_v{v}", text, f"input {s.shown[v]}", parts.OUTPUT)
    for key in keys:
        frame.edge(key, f"n{i}")
    return list(keys)


def _add_operation(frame: Any, drawn: Drawn, i: int) -> None:
    """The box of node i; under the mouse, its program with the user's source lines."""
    s, fate = drawn.s, drawn.fates[i]
    node = s.nodes[i]
    name = node.name if node.name != node.label else ""
    returned = "returned" if set(node.makes) & set(s.d.outputs) else ""
    text = parts.label(node.label, name, _said(drawn, i), returned)
    tooltip = "\n".join(filter(None, (_when(drawn, i), parts.program_text(s.d, node.ops))))
    style = "filled,rounded" if drawn.problem.nodes[i].rerun else "filled,rounded,dashed"
    parts.add_box(frame, f"n{i}", text, tooltip, COLOURS[fate.kind], style=style)


def _add_entering(frame: Any, drawn: Drawn, j: int, key: str) -> None:
    fate, name = drawn.fates[j], drawn.problem.nodes[j].name
    text = parts.data_label(name, _said(drawn, j))
    tooltip = "\n".join(filter(None, (f"made by an earlier block: {name}", _when(drawn, j))))
    parts.add_data(frame, key, text, tooltip, COLOURS[fate.kind], style="filled,dashed")


def _said(drawn: Drawn, i: int) -> str:
    fate = drawn.fates[i]
    kept = f"keeps {show_bytes(fate.kept)}" + (f" of {show_bytes(fate.made)}" if fate.kept < fate.made else "")
    if not fate.again:
        return kept if fate.kept else f"drops {show_bytes(fate.made)}" if fate.made else "makes nothing new"
    count = "runs again" if len(fate.again) == 1 else f"runs again {len(fate.again)} times"
    time = format_time(drawn.problem.nodes[i].time * len(fate.again))
    return f"{kept if fate.kept else f'drops {show_bytes(fate.made)}'}, {count}: {time}"


def _when(drawn: Drawn, i: int) -> str:
    """Before which backwards node i runs again."""
    names = ", ".join(f"bwd.{drawn.problem.nodes[j].name}" for j in drawn.fates[i].again)
    return f"runs again before {names}" if names else ""


def _ranges(numbers: Sequence[int]) -> str:
    """ "1, 3–5" of rising numbers."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def modules(s: S_graph, start: int, stop: int) -> str:
    """The submodules that run nodes ``start`` to ``stop``: their paths, as far as two of them say it."""
    paths = [s.d.nodes[op].path.split(".") for node in s.nodes[start:stop] for op in node.ops]
    paths = [path for path in paths if path != [""]]
    if not paths:
        return "no submodule"
    best = _heads(paths, 1)
    for depth in range(2, max(map(len, paths)) + 1):
        if len(heads := _heads(paths, depth)) > 2:
            break
        best = heads
    return ", ".join(best) if len(best) <= 2 else f"{best[0]} … {best[-1]}"


def _heads(paths: Iterable[Sequence[str]], depth: int) -> list[str]:
    """The distinct first parts of paths, but for those that are the beginning of another."""
    heads = dict.fromkeys(".".join(path[:depth]) for path in paths)
    return [a for a in heads if not any(b.startswith(f"{a}.") for b in heads)]
