"""``draw``: the picture of any graph. Large graphs are drawn by what is distinct in them.

That is the chain of blocks, and beside it the first block of each class. B knows no blocks: it is drawn by the
user's source lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rkgb.Atools import classes
from rkgb.graphs import B_graph, D_graph, S_graph
from rkgb.Ktools import K_graph
from rkgb.render_parts import (
    CLASSES,
    FORWARD,
    OUTPUT,
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
    put_below,
)
from rkgb.render_stages import (
    LEGEND,
    LEGEND_K,
    LEGEND_S,
    S_box,
    add_edges,
    add_K_data,
    add_rows,
    keep_columns,
    times_of,
    whole_K,
    whole_program,
    whole_S,
)
from rkgb.Stools import D_to_S, cut
from rkgb.summary import interfaces
from rkgb.units import format_bytes, format_time

Graph = B_graph | D_graph | S_graph | K_graph

# Above so many boxes and ellipses a picture is no longer read; only distinct blocks and an overview are drawn.
LIMIT = 300


def draw(g: Graph) -> Any:
    """The picture of ``g`` as a ``graphviz.Digraph``; over ``LIMIT`` boxes and ellipses, that of its distinct parts."""
    if isinstance(g, K_graph):
        count = len(g.nodes) + sum(n.backward is not None for n in g.nodes) + len(g.data)
        return whole_K(g) if count <= LIMIT else _distinct(g.s, g)
    small = len(g.nodes) <= LIMIT
    if isinstance(g, S_graph):
        return whole_S(g) if small else _distinct(g, g)
    if small:
        return whole_program(g)
    return _by_line(g) if isinstance(g, B_graph) else _distinct(cut(D_to_S(g)), g)


def _distinct(s: S_graph, g: D_graph | S_graph | K_graph) -> Any:
    """The chain of blocks, and beside it the first block of each class, as it looks in ``g``, a stage of ``s``."""
    if len(s.blocks) < 2:
        s = cut(s)
    numbers = classes(s)
    stage = "K" if isinstance(g, K_graph) else "S" if isinstance(g, S_graph) else "D"
    title = f"{stage} graph: {len(g.nodes)} nodes, blocks: {len(s.blocks)}, of them distinct: {len(set(numbers))}"
    legend = {"K": LEGEND_K, "S": LEGEND_S, "D": LEGEND}[stage]
    picture = new_picture(title, f"the chain, and the first block of each class · {legend}")
    picture.subgraph(_overview(s, numbers, g if isinstance(g, K_graph) else None))
    firsts = [numbers.index(number) for number in dict.fromkeys(numbers)]
    sizes = [stop - start for start, stop in (s.blocks[b] for b in firsts)]
    column, above, longest = 0, "", max(*sizes, sum(sizes) // 4)
    for b, size in zip(firsts, sizes, strict=True):
        title = f"class {numbers[b]}: block {b}" + _others(numbers.count(numbers[b]) - 1)
        tops, end = _K_block(picture, g, s, b, title) if isinstance(g, K_graph) else _block(picture, g, s, b, title)
        if above and column + size <= longest:
            put_below(picture, above, tops)
        else:
            column = 0
        column, above = column + size, end
    return picture


def _others(count: int) -> str:
    return f" and {count} more like it" if count else ""


def _block(picture: Any, g: D_graph | S_graph, s: S_graph, b: int, title: str) -> tuple[list[str], str]:
    """Block ``b`` as it looks in ``g``; returns what is at its top and at its end."""
    start, stop = s.blocks[b]
    program = Program(s.d, picture, prefix=f"block{b}_", values=s.d.values)
    if isinstance(g, S_graph):
        boxes = [S_box(s, i, program) for i in range(start, stop)]
    else:
        ops = sorted(op for node in s.nodes[start:stop] for op in node.ops)
        boxes = [node_box(g.nodes[op], program, op) for op in ops]
    after = {v for node in s.nodes[stop:] for v in node.reads} | set(s.d.outputs)
    leaving = [v for node in s.nodes[start:stop] for v in node.makes if v in after]
    return program.draw([Section(tuple(boxes), title, classes(s)[b])], leaving)


def _overview(s: S_graph, numbers: Sequence[int], k: K_graph | None) -> Any:
    """One box for each block: its class, size and times, and the bytes that it and those before pass on."""
    chain = new_block("chain", "the chain of blocks", len(CLASSES) - 1)
    for b, ((start, stop), number, passed_on) in enumerate(zip(s.blocks, numbers, interfaces(s), strict=True)):
        frame, background = CLASSES[number % len(CLASSES)]
        times = "forward {}, backward {}".format(*map(format_time, times_of(k, start, stop))) if k else ""
        passed = (
            f"{format_bytes(sum(s.d.storages[x].bytes for x in passed_on))} to later blocks"
            if stop < len(s.nodes)
            else ""
        )
        text = label(f"block {b}, class {number}", f"{stop - start} nodes", times, passed)
        tooltip = ", ".join(node.name for node in s.nodes[start:stop])
        add_box(chain, f"chain{b}", text, tooltip, background, color=frame, penwidth="1.5")
        if b:
            chain.edge(f"chain{b - 1}", f"chain{b}")
    return chain


def _K_block(picture: Any, k: K_graph, s: S_graph, b: int, title: str) -> tuple[list[str], str]:
    """The rows of block ``b``, under the data that enter it; returns what is at its top and at its end."""
    prefix, (start, stop) = f"block{b}_", s.blocks[b]
    block = new_block(prefix, f"{title} · {stop - start} nodes", classes(s)[b])
    nodes = k.nodes[start:stop]
    read = {d for n in nodes for d in (*n.reads, *(n.backward.reads if n.backward else ()))}
    entering = sorted(d for d in read if not start <= k.data[d].owner < stop)
    with block.subgraph() as row:
        row.attr(rank="same")
        for d in entering:
            add_K_data(row, k, d, prefix, start, stop)
    add_rows(block, k, start, stop, prefix)
    tops = [f"{prefix}d{d}" for d in entering]
    for top in tops:
        put_below(block, top, [f"{prefix}f{start}"])
    add_edges(block, k, start, stop, prefix)
    keep_columns(block, range(start, stop), prefix)
    picture.subgraph(block)
    return tops or [f"{prefix}f{start}"], f"{prefix}f{stop - 1}"


def _by_line(g: B_graph) -> Any:
    """A large program by the user's source lines, one box each: blocks are known from S on only."""
    lines = dict.fromkeys(n.line for n in g.nodes)
    key = {line: f"line{k}" for k, line in enumerate(lines)}
    picture = new_picture(f"B graph: {len(g.nodes)} operations, by source line", "edges: number of values")
    maker: dict[int, str] = {v: f"v{v}" for v, source in g.sources.items() if source.kind == "input"}
    for v in maker:
        add_data(picture, f"v{v}", data_label(g.names[v]), f"input {g.names[v]}", OUTPUT)
    for line in lines:
        ops = [k for k, n in enumerate(g.nodes) if n.line == line]
        maker.update((v, key[line]) for k in ops for v in g.nodes[k].outputs)
        names = counted((g.nodes[k].name for k in ops), limit=6)
        add_box(picture, key[line], label(line or "no source line", names), program_text(g, ops), FORWARD)
    flow: dict[tuple[str, str], int] = {}
    for node in g.nodes:
        for v in node.reads():
            if v in maker and maker[v] != key[node.line]:
                flow[maker[v], key[node.line]] = flow.get((maker[v], key[node.line]), 0) + 1
    for (a, b), count in flow.items():
        picture.edge(a, b, label=f" {count}" if count > 1 else "")
    for v in dict.fromkeys(g.outputs):
        add_data(picture, f"out{v}", data_label(g.names[v], "returned"), g.names[v], OUTPUT, peripheries="2")
        if v in maker:
            picture.edge(maker[v], f"out{v}")
    return picture
