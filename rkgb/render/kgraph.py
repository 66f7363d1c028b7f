"""K in rows: forwards on the left, going down; the data they make; backwards on the right, going up.

Times and bytes are those of the graph's costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rkgb.blocks.summary import interfaces
from rkgb.graphs import S_graph
from rkgb.Ktools import K_graph
from rkgb.render import parts
from rkgb.render.columns import SIZES, crossing, new_column, pages
from rkgb.render.program import titled
from rkgb.units import format_bytes, format_time

LEGEND_K = (
    "blue: forward, downwards (grey: runs once) · white: data · orange: backward, upwards, "
    "with the most that gradients take meanwhile · dashed: gradients"
)
_READ, _SAVED = "#4878a8", "#c06a2b"


def whole_K(k: K_graph) -> Any:
    """All forwards, data and backwards of a K graph, and the loss at the turn, in columns."""
    forward, backward = times_of(k, 0, len(k.nodes))
    backwards = sum(n.backward is not None for n in k.nodes)
    title = f"K graph: {len(k.nodes)} forwards, {format_time(forward)}; {backwards} backwards, {format_time(backward)}"
    picture = parts.new_picture(title, LEGEND_K)
    blocks = k.s.blocks or ((0, len(k.nodes)),)
    reads = [(*n.reads, *(n.backward.reads if n.backward else ())) for n in k.nodes]
    passes = crossing(reads, [n.makes for n in k.nodes], blocks)
    spans = pages(len(k.nodes), SIZES["K"].columns(len(k.nodes), (n.name for n in k.nodes)), passes)
    for j, (start, stop) in enumerate(spans):
        frames = []
        for a, b, name, number in titled(k.s, blocks, start, stop):
            times = times_of(k, a, b)
            title = f"{name} · forward {format_time(times[0])}, backward {format_time(times[1])}"
            frames.append((a, b, title, number))
        prefix, wanted = f"column{j}_" if j else "", k.outputs if stop == len(k.nodes) else ()
        with new_column(picture, j, len(spans)) as column:
            add_page(column, k, frames, prefix, wanted)
            if stop == len(k.nodes):
                roots = set(k.usage.root_values(k.s.d))
                ends = [i for i in range(start, stop) if k.nodes[i].backward and roots.intersection(k.s.nodes[i].makes)]
                returned = [f"{prefix}d{d}" for d in k.outputs]
                _add_loss(column, f"{prefix}loss", returned, [f"{prefix}b{i}" for i in ends])
    return picture


def add_page(
    where: Any, k: K_graph, frames: Sequence[tuple[int, int, str, int]], prefix: str, wanted: Sequence[int] = ()
) -> list[str]:
    """Add consecutive nodes in ``frames`` (first node, the one behind the last, title, class), below what they read.

    ``wanted``: data that must be there, too. Returns the keys at the top.
    """
    start, stop = frames[0][0], frames[-1][1]
    read = {d for n in k.nodes[start:stop] for d in (*n.reads, *(n.backward.reads if n.backward else ()))}
    entering = sorted(d for d in read.union(wanted) if not start <= k.data[d].owner < stop)
    for first, end, title, number in frames:
        block = parts.new_block(f"{prefix}{first}", title, number)
        if first == start:
            with block.subgraph() as row:
                row.attr(rank="same")
                for d in entering:
                    _add_data(row, k, d, prefix, start, stop)
            for d in entering:
                parts.put_below(block, f"{prefix}d{d}", [f"{prefix}f{start}"])
        _add_rows(block, k, first, end, prefix, (start, stop))
        where.subgraph(block)
    _add_edges(where, k, start, stop, prefix)
    for i, j in itertools.pairwise(range(start, stop)):  # forwards, and backwards, straight below each other, in order
        where.edge(f"{prefix}f{i}", f"{prefix}f{j}", style="invis", weight="20")
        where.edge(f"{prefix}b{i}", f"{prefix}b{j}", style="invis", weight="20")
    return [f"{prefix}d{d}" for d in entering] or [f"{prefix}f{start}"]


def _add_loss(picture: Any, key: str, outputs: Sequence[str], backwards: Sequence[str]) -> None:
    """The loss, between forward and backward: it reads the outputs and makes the gradients of the roots."""
    parts.add_box(picture, key, parts.label("loss"), "the gradients of the outputs arrive", parts.LOSS)
    for each in outputs:
        picture.edge(each, key, color=_READ)
    for each in backwards:
        picture.edge(each, key, dir="back", style="dashed", color=_SAVED)


def _add_rows(block: Any, k: K_graph, start: int, stop: int, prefix: str, page: tuple[int, int]) -> None:
    """One row for each node: its forward, what it makes, its backward; ``page``: the nodes that are drawn together."""
    for i in range(start, stop):
        node, source = k.nodes[i], k.s.nodes[i]
        program = parts.program_text(k.s.d, source.ops)
        with block.subgraph() as row:
            row.attr(rank="same")
            text = parts.label(
                node.name, *_operation(k, i), f"{format_time(node.time)} · peak {format_bytes(node.peak)}"
            )
            fill = parts.FORWARD if node.rerun else parts.CALM
            parts.add_box(row, f"{prefix}f{i}", text, f"forward\n{program}", fill, group=f"{prefix}forward")
            for d in node.makes:
                _add_data(row, k, d, prefix, *page)
            _add_backward(row, k, i, prefix, program)
            order = [f"{prefix}f{i}", *(f"{prefix}d{d}" for d in node.makes), f"{prefix}b{i}"]
            for a, b in itertools.pairwise(order):
                row.edge(a, b, style="invis")


def _operation(k: K_graph, i: int) -> list[str]:
    """The operation of a node whose name does not say it."""
    return [name] if (name := k.s.nodes[i].name) != k.nodes[i].name else []


def _add_backward(row: Any, k: K_graph, i: int, prefix: str, program: str) -> None:
    backward, key, group = k.nodes[i].backward, f"{prefix}b{i}", f"{prefix}backward"
    if backward is None:  # holds the column
        row.node(key, "", style="invis", group=group, width="0.1", height="0.1")
        return
    before, most, after = map(format_bytes, (backward.before, backward.peak, backward.after))
    gradients = f"{before} before, {most} at most, {after} after"
    text = parts.label(
        f"{k.nodes[i].name} backward",
        *_operation(k, i),
        f"{format_time(backward.time)} · gradients {format_bytes(backward.peak)}",
    )
    tooltip = f"backward; gradients and its own temporary memory take {gradients}\n{program}"
    parts.add_box(row, key, text, tooltip, parts.BACKWARD, group=group)


def _add_data(where: Any, k: K_graph, d: int, prefix: str, start: int, stop: int) -> None:
    """One datum: dashed if made before node ``start``, thick if read by node ``stop`` or later, double if returned."""
    data = k.data[d]
    kind = "saved for the backward only" if data.storage is None else "result"
    text = parts.data_label(data.name, format_bytes(data.bytes))
    more = {"peripheries": "2"} if d in k.outputs else {}
    if any(d in n.reads for n in k.nodes[stop:]):
        more["penwidth"] = "2"
    if data.owner < start:
        more["style"] = "filled,dashed"
    fill = parts.OUTPUT if d in k.outputs else parts.DATA
    parts.add_data(where, f"{prefix}d{d}", text, f"{data.name}: {kind}, {format_bytes(data.bytes)}", fill, **more)


def _add_edges(picture: Any, k: K_graph, start: int, stop: int, prefix: str) -> None:
    """Reads, makes and the flow of gradients of nodes ``start`` to ``stop``; what they read must be drawn."""
    maker = {v: i for i in range(start, stop) for v in k.s.nodes[i].makes}
    for i in range(start, stop):
        node = k.nodes[i]
        for d in node.makes:
            picture.edge(f"{prefix}f{i}", f"{prefix}d{d}", color=_READ)
        for d in node.reads:
            picture.edge(f"{prefix}d{d}", f"{prefix}f{i}", color=_READ)
        if node.backward is None:
            continue
        for d in node.backward.reads:
            picture.edge(f"{prefix}d{d}", f"{prefix}b{i}", color=_SAVED)
        values = [v for v in k.s.nodes[i].reads if v in maker and k.s.d.values[v].requires_grad]
        for j in dict.fromkeys(maker[v] for v in values if k.nodes[maker[v]].backward):
            # The edge points backwards, so that a backward stands beside its forward.
            picture.edge(f"{prefix}b{j}", f"{prefix}b{i}", dir="back", style="dashed", color=_SAVED)


def times_of(k: K_graph, start: int, stop: int) -> tuple[int, int]:
    """Forward and backward time in ns of nodes ``start`` to ``stop``."""
    nodes = k.nodes[start:stop]
    return sum(n.time for n in nodes), sum(n.backward.time for n in nodes if n.backward)


def K_overview(
    picture: Any, k: K_graph, s: S_graph, numbers: Sequence[int], span: tuple[int, int]
) -> tuple[list[str], str]:
    """Add blocks as one row each: forward, what it makes that backwards read, backward; the loss below the last one.

    ``span``: the first block and the one behind the last. Returns the keys at the top and the end.
    """
    title = "the chain of blocks" + ("" if span[0] else ", and what backwards read")
    chain, last = parts.chain_frame(span, len(s.blocks), title), span[1] - 1
    saved = {d for n in k.nodes if n.backward for d in n.backward.reads}
    passed = interfaces(s)
    for b in range(*span):
        (start, stop), number = s.blocks[b], numbers[b]
        frame, background = parts.colours_of(number)
        kept = sum(k.data[d].bytes for n in k.nodes[start:stop] for d in n.makes if d in saved)
        forward, backward = map(format_time, times_of(k, start, stop))
        tooltip = ", ".join(node.label for node in s.nodes[start:stop])
        look = {"color": frame, "penwidth": "1.5"}
        with chain.subgraph() as row:
            row.attr(rank="same")
            text = parts.label(f"block {b}, class {number}", f"{stop - start} nodes · forward {forward}")
            parts.add_box(row, f"f_chain{b}", text, tooltip, background, group="chain_forward", **look)
            text = parts.data_label(format_bytes(kept))
            parts.add_data(row, f"d_chain{b}", text, "kept if nothing is run again", parts.DATA)
            any_backward = any(n.backward for n in k.nodes[start:stop])
            text = parts.label(f"block {b} backward", backward if any_backward else "none")
            fill = parts.BACKWARD if any_backward else parts.CALM
            parts.add_box(row, f"b_chain{b}", text, f"the backward of block {b}", fill, group="chain_backward", **look)
            row.edge(f"f_chain{b}", f"d_chain{b}", color=_READ)
            row.edge(f"d_chain{b}", f"b_chain{b}", color=_SAVED)
        if b > span[0]:
            before = passed[b - 1]
            size = format_bytes(sum(s.d.storages[x].bytes for x in before))
            text = f" {size}" + (f" in {len(before)} tensors" if len(before) > 1 else "")
            chain.edge(f"f_chain{b - 1}", f"f_chain{b}", color=_READ, weight="20", label=text)
            chain.edge(f"b_chain{b - 1}", f"b_chain{b}", dir="back", style="dashed", color=_SAVED, weight="20")
    if last == len(s.blocks) - 1:
        _add_loss(chain, "loss_chain", [f"f_chain{last}"], [f"b_chain{last}"])
    picture.subgraph(chain)
    return [f"f_chain{span[0]}"], f"f_chain{last}"
