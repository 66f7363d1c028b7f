"""The pictures of small graphs: B, D and S as programs, K as three columns.

The columns of K: forwards on the left, going down; the data they make; backwards on the right, going up.
Times and bytes are those of the graph's costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rkgb.Atools import classes
from rkgb.graphs import B_graph, D_graph, S_graph
from rkgb.Ktools import K_graph
from rkgb.render_parts import (
    BACKWARD,
    CALM,
    DATA,
    FORWARD,
    OUTPUT,
    Box,
    Program,
    Section,
    add_box,
    add_data,
    counted,
    data_label,
    label,
    new_block,
    new_picture,
    node_box,
    program_text,
)
from rkgb.units import format_bytes, format_time

LEGEND = "box: operation · ellipse: input (green), parameter (yellow), buffer or constant (violet)"
LEGEND_S = f"{LEGEND} · grey: no gradient, dashed: runs once · frame: block, colour: class"
LEGEND_K = "blue: forward, downwards (grey: runs once) · white: data · orange: backward, upwards; dashed: gradients"


def whole_program(g: B_graph | D_graph) -> Any:
    """All operations of a B or D graph."""
    stage = "B" if isinstance(g, B_graph) else "D"
    picture = new_picture(f"{stage} graph: {len(g.nodes)} operations", LEGEND)
    program = Program(g, picture, values={} if isinstance(g, B_graph) else g.values)
    program.draw([Section(tuple(node_box(n, program, k) for k, n in enumerate(g.nodes)))], g.outputs)
    return picture


def whole_S(s: S_graph) -> Any:
    """All nodes of an S graph, block below block."""
    blocks = s.blocks or ((0, len(s.nodes)),)
    picture = new_picture(f"S graph: {len(s.nodes)} nodes, blocks: {len(blocks)}", LEGEND_S)
    program = Program(s.d, picture, values=s.d.values)
    sections = [
        Section(tuple(S_box(s, i, program) for i in range(*block)), f"block {b}, class {number}", number)
        for b, (block, number) in enumerate(zip(blocks, classes(s.with_blocks(blocks)), strict=True))
    ]
    program.draw(sections, s.d.outputs)
    return picture


def S_box(s: S_graph, i: int, program: Program) -> Box:
    """The box of S node ``i``."""
    node = s.nodes[i]
    body = [s.d.nodes[op].name for op in node.ops]
    if node.name in body:
        body.remove(node.name)
    own = [s.d.storages[x].bytes for x in node.storages]
    saved = sum(s.d.storages[x].bytes for x in node.saved.storages if s.d.storages[x].owner is not None)
    saved += sum(node.saved.private)
    text = label(
        node.name,
        f"+ {counted(body)}" if body else "",
        f"makes {format_bytes(sum(own))}" if own else "",
        f"saves {format_bytes(saved)}" if saved else "",
        "random" if node.random else "",
    )
    fill = FORWARD if node.requires_grad else CALM
    style = "filled,rounded,dashed" if node.fixed else "filled,rounded"
    return Box(text, program_text(s.d, node.ops), node.reads, node.makes, fill, style)


# ------------------------------------------------------------------------------------------------ K


def whole_K(k: K_graph) -> Any:
    """All forwards, data and backwards of a K graph, and the loss at the turn."""
    forward, backward = times_of(k, 0, len(k.nodes))
    backwards = sum(n.backward is not None for n in k.nodes)
    title = f"K graph: {len(k.nodes)} forwards, {format_time(forward)}; {backwards} backwards, {format_time(backward)}"
    picture = new_picture(title, LEGEND_K)
    blocks = k.s.blocks or ((0, len(k.nodes)),)
    for b, ((start, stop), number) in enumerate(zip(blocks, classes(k.s.with_blocks(blocks)), strict=True)):
        times = times_of(k, start, stop)
        title = f"block {b}, class {number} · forward {format_time(times[0])}, backward {format_time(times[1])}"
        block = new_block(str(b), title, number)
        add_rows(block, k, start, stop, "")
        picture.subgraph(block)
    add_edges(picture, k, 0, len(k.nodes), "")
    keep_columns(picture, range(len(k.nodes)), "")
    add_box(picture, "loss", label("loss"), "the gradients of the outputs arrive", "#f6c6c6")
    for d in k.outputs:
        picture.edge(f"d{d}", "loss")
    for i, node in enumerate(k.nodes):
        if node.backward and set(k.s.nodes[i].makes) & set(k.s.d.outputs):
            picture.edge(f"b{i}", "loss", dir="back", style="dashed", color="#c06a2b")
    return picture


def add_rows(block: Any, k: K_graph, start: int, stop: int, prefix: str) -> None:
    """One row for each node: its forward, what it makes, its backward."""
    for i in range(start, stop):
        node, source = k.nodes[i], k.s.nodes[i]
        program = program_text(k.s.d, source.ops)
        with block.subgraph() as row:
            row.attr(rank="same")
            text = label(source.name, f"{format_time(node.time)} · peak {format_bytes(node.peak)}")
            fill = FORWARD if node.rerun else CALM
            add_box(row, f"{prefix}f{i}", text, f"forward\n{program}", fill, group=f"{prefix}forward")
            for d in node.makes:
                add_K_data(row, k, d, prefix, start, stop)
            _add_backward(row, k, i, prefix, program)
            order = [f"{prefix}f{i}", *(f"{prefix}d{d}" for d in node.makes), f"{prefix}b{i}"]
            for a, b in itertools.pairwise(order):
                row.edge(a, b, style="invis")


def _add_backward(row: Any, k: K_graph, i: int, prefix: str, program: str) -> None:
    found, key, group = k.nodes[i].backward, f"{prefix}b{i}", f"{prefix}backward"
    if found is None:  # holds the column
        row.node(key, "", style="invis", group=group, width="0.1", height="0.1")
        return
    gradients = (
        f"{format_bytes(found.before)} before, {format_bytes(found.peak)} at most, {format_bytes(found.after)} after"
    )
    text = label(f"{k.s.nodes[i].name} backward", f"{format_time(found.time)} · peak {format_bytes(found.peak)}")
    add_box(row, key, text, f"backward; gradients take {gradients}\n{program}", BACKWARD, group=group)


def add_K_data(where: Any, k: K_graph, d: int, prefix: str, start: int, stop: int) -> None:
    """One datum: a dashed line if made before ``start``, thick if read at ``stop`` or later, double if returned."""
    data = k.data[d]
    kind = "saved for the backward only" if data.storage is None else "result"
    text = data_label(data.name, format_bytes(data.bytes))
    more = {"peripheries": "2"} if d in k.outputs else {}
    if any(d in n.reads for n in k.nodes[stop:]):
        more["penwidth"] = "2"
    if data.owner < start:
        more["style"] = "filled,dashed"
    fill = OUTPUT if d in k.outputs else DATA
    add_data(where, f"{prefix}d{d}", text, f"{data.name}: {kind}, {format_bytes(data.bytes)}", fill, **more)


def add_edges(picture: Any, k: K_graph, start: int, stop: int, prefix: str) -> None:
    """Reads, makes and the flow of gradients of nodes ``start`` to ``stop``; what they read must be drawn."""
    maker = {v: i for i in range(start, stop) for v in k.s.nodes[i].makes}
    for i in range(start, stop):
        node = k.nodes[i]
        for d in node.makes:
            picture.edge(f"{prefix}f{i}", f"{prefix}d{d}", color="#4878a8")
        for d in node.reads:
            picture.edge(f"{prefix}d{d}", f"{prefix}f{i}", color="#4878a8")
        if node.backward is None:
            continue
        for d in node.backward.reads:
            picture.edge(f"{prefix}d{d}", f"{prefix}b{i}", color="#c06a2b")
        values = [v for v in k.s.nodes[i].reads if v in maker and k.s.d.values[v].requires_grad]
        for j in dict.fromkeys(maker[v] for v in values if k.nodes[maker[v]].backward):
            # Drawn against its direction, so that a backward stands beside its forward.
            picture.edge(f"{prefix}b{j}", f"{prefix}b{i}", dir="back", style="dashed", color="#c06a2b")


def keep_columns(picture: Any, nodes: Sequence[int], prefix: str) -> None:
    """Keep forwards, and backwards, straight below each other and in their order."""
    for i, j in itertools.pairwise(nodes):
        picture.edge(f"{prefix}f{i}", f"{prefix}f{j}", style="invis", weight="20")
        picture.edge(f"{prefix}b{i}", f"{prefix}b{j}", style="invis", weight="20")


def times_of(k: K_graph, start: int, stop: int) -> tuple[int, int]:
    """Forward and backward time in ns of nodes ``start`` to ``stop``."""
    nodes = k.nodes[start:stop]
    return sum(n.time for n in nodes), sum(n.backward.time for n in nodes if n.backward)
