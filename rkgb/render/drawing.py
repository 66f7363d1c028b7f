"""``draw``: the picture of any graph. The picture of a large graph shows each distinct part once.

It has the chain of blocks, and beside it the first block of each class. B has no blocks: a large B has one box for each
of the user's source lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rkgb.blocks.classes import classes
from rkgb.blocks.cut import cut
from rkgb.blocks.simplify import D_to_S
from rkgb.blocks.summary import interfaces
from rkgb.graphs import B_graph, D_graph, S_graph
from rkgb.Ktools import K_graph
from rkgb.render import parts
from rkgb.render.kgraph import LEGEND_K, K_block, K_overview, whole_K
from rkgb.render.program import LEGEND, LEGEND_S, Flowchart, S_box, Section, node_box, whole_program, whole_S
from rkgb.units import format_bytes

Graph = B_graph | D_graph | S_graph | K_graph

# Nobody reads a picture of more nodes; it then has the distinct blocks and an overview.
LIMIT = 80


def draw(g: Graph) -> Any:
    """The picture of ``g`` as a ``graphviz.Digraph``; above ``LIMIT`` nodes, of its distinct parts."""
    small = len(g.nodes) <= LIMIT
    if isinstance(g, K_graph):
        return whole_K(g) if small else _distinct(g.s, g)
    if isinstance(g, S_graph):
        return whole_S(g) if small else _distinct(g, g)
    if small:
        return whole_program(g)
    return _by_line(g) if isinstance(g, B_graph) else _distinct(cut(D_to_S(g)), g)


def draw_chain(k: K_graph) -> Any:
    """The chain of the blocks of ``k``: the time of each, and the bytes that it makes for backwards."""
    s = k.s if k.s.blocks else k.s.with_blocks(((0, len(k.nodes)),))
    picture = parts.new_picture(f"{len(s.nodes)} nodes, blocks: {len(s.blocks)}", "blue: forward · orange: backward")
    picture.subgraph(K_overview(k, s, classes(s)))
    return picture


def _distinct(s: S_graph, g: D_graph | S_graph | K_graph) -> Any:
    """The chain of blocks, and beside it the first block of each class, as it looks in ``g``, a stage of ``s``."""
    if len(s.blocks) < 2:
        s = cut(s)
    numbers = classes(s)
    stage = "K" if isinstance(g, K_graph) else "S" if isinstance(g, S_graph) else "D"
    title = f"{stage} graph: {len(g.nodes)} nodes, blocks: {len(s.blocks)}, of them distinct: {len(set(numbers))}"
    legend = {"K": LEGEND_K, "S": LEGEND_S, "D": LEGEND}[stage]
    picture = parts.new_picture(title, f"the chain, and the first block of each class · {legend}")
    # Lines a little less straight, for seconds instead of half a minute with some hundred nodes.
    picture.attr("graph", nslimit="4", mclimit="0.5")
    picture.subgraph(K_overview(g, s, numbers) if isinstance(g, K_graph) else _overview(s, numbers))
    firsts = [numbers.index(number) for number in dict.fromkeys(numbers)]
    sizes = [stop - start for start, stop in (s.blocks[b] for b in firsts)]
    column, above, longest = 0, "", max(*sizes, sum(sizes) // 4)
    for b, size in zip(firsts, sizes, strict=True):
        title = f"class {numbers[b]}: block {b}" + _others(numbers.count(numbers[b]) - 1)
        if isinstance(g, K_graph):
            tops, end = K_block(picture, g, s, b, title, numbers[b])
        else:
            tops, end = _block(picture, g, s, b, title, numbers[b])
        if above and column + size <= longest:
            parts.put_below(picture, above, tops)
        else:
            column = 0
        column, above = column + size, end
    return picture


def _others(count: int) -> str:
    return f" and {count} more like it" if count else ""


def _block(picture: Any, g: D_graph | S_graph, s: S_graph, b: int, title: str, number: int) -> tuple[list[str], str]:
    """Add block ``b`` of class ``number`` as it looks in ``g``; returns the keys at its top and at its end."""
    start, stop = s.blocks[b]
    shown = s.shown if isinstance(g, S_graph) else {}
    chart = Flowchart(s.d, picture, prefix=f"block{b}_", values=s.d.values, shown=shown)
    if isinstance(g, S_graph):
        boxes = [S_box(s, i, chart) for i in range(start, stop)]
    else:
        ops = sorted(op for node in s.nodes[start:stop] for op in node.ops)
        boxes = [node_box(g.nodes[op], chart, op) for op in ops]
    after = {v for node in s.nodes[stop:] for v in node.reads} | set(s.d.outputs)
    leaving = [v for node in s.nodes[start:stop] for v in node.makes if v in after]
    return chart.draw([Section(tuple(boxes), title, number)], leaving)


def _overview(s: S_graph, numbers: Sequence[int]) -> Any:
    """One box for each block: its class and size, and the bytes that it and those before pass on."""
    chain = parts.new_block("chain", "the chain of blocks", len(parts.CLASSES) - 1)
    for b, ((start, stop), number, passed) in enumerate(zip(s.blocks, numbers, interfaces(s), strict=True)):
        frame, background = parts.CLASSES[number % len(parts.CLASSES)]
        size = f"{format_bytes(sum(s.d.storages[x].bytes for x in passed))} to later blocks" if passed else ""
        text = parts.label(f"block {b}, class {number}", f"{stop - start} nodes", size)
        tooltip = ", ".join(node.label for node in s.nodes[start:stop])
        parts.add_box(chain, f"chain{b}", text, tooltip, background, color=frame, penwidth="1.5")
        if b:
            chain.edge(f"chain{b - 1}", f"chain{b}")
    return chain


def _by_line(g: B_graph) -> Any:
    """A large B graph, with one box for each of the user's source lines."""
    lines = dict.fromkeys(n.line for n in g.nodes)
    key = {line: f"line{k}" for k, line in enumerate(lines)}
    picture = parts.new_picture(f"B graph: {len(g.nodes)} operations, by source line", "edges: number of values")
    maker: dict[int, str] = {v: f"v{v}" for v, source in g.sources.items() if source.kind == "input"}
    for v in maker:
        parts.add_data(picture, f"v{v}", parts.data_label(g.names[v]), f"input {g.names[v]}", parts.OUTPUT)
    for line in lines:
        ops = [k for k, n in enumerate(g.nodes) if n.line == line]
        maker.update((v, key[line]) for k in ops for v in g.nodes[k].outputs)
        names = parts.counted((g.nodes[k].name for k in ops), limit=6)
        parts.add_box(
            picture, key[line], parts.label(line or "no source line", names), parts.program_text(g, ops), parts.FORWARD
        )
    flow: dict[tuple[str, str], int] = {}
    for node in g.nodes:
        for v in node.reads():
            if v in maker and maker[v] != key[node.line]:
                flow[maker[v], key[node.line]] = flow.get((maker[v], key[node.line]), 0) + 1
    for (a, b), count in flow.items():
        picture.edge(a, b, label=f" {count}" if count > 1 else "")
    for v in dict.fromkeys(g.outputs):
        parts.add_data(
            picture, f"out{v}", parts.data_label(g.names[v], "returned"), g.names[v], parts.OUTPUT, peripheries="2"
        )
        if v in maker:
            picture.edge(maker[v], f"out{v}")
    return picture
