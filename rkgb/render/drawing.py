"""``draw``: the picture of any graph. The picture of a large graph shows each distinct part once.

It has the chain of blocks, and beside it the first block of each class. With forwards, data and backwards a large K
would be a poster: it has the chain alone, and ``draw_block`` draws the blocks that are asked for. B has no blocks: a
large B has one box for each of the user's source lines.
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
from rkgb.pipeline import Graph
from rkgb.render import parts
from rkgb.render.kgraph import LEGEND_K, K_overview, add_frames, whole_K
from rkgb.render.program import LEGEND, LEGEND_S, Flowchart, S_box, Section, node_box, whole_program, whole_S
from rkgb.units import format_bytes

# Nobody reads a picture of more nodes; it then has the distinct blocks and an overview.
LIMIT = 80


def draw(g: Graph) -> Any:
    """The picture of ``g`` as a ``graphviz.Digraph``; above ``LIMIT`` nodes, of its distinct parts."""
    small = len(g.nodes) <= LIMIT
    if isinstance(g, K_graph):
        return whole_K(g) if small else draw_chain(g)
    if isinstance(g, S_graph):
        return whole_S(g) if small else _distinct(g, g)
    if small:
        return whole_program(g)
    return _by_line(g) if isinstance(g, B_graph) else _distinct(cut(D_to_S(g)), g)


def draw_chain(k: K_graph) -> Any:
    """The chain of the blocks of ``k``: the time of each, and the bytes that it makes for backwards."""
    s = _in_blocks(k.s)
    legend = "blue: forward · orange: backward · a block on its own: rkgb.print_graph(…, block=0)"
    picture = parts.new_picture(f"K graph: {len(s.nodes)} nodes, blocks: {len(s.blocks)}", legend)
    K_overview(picture, k, s, classes(s))
    return picture


def draw_block(g: S_graph | K_graph, b: int) -> Any:
    """Block ``b`` of ``g`` on its own, as it is numbered in the chain. Raises ``ValueError`` if there is none."""
    whole = g.s if isinstance(g, K_graph) else g
    s = _in_blocks(whole)
    if isinstance(b, bool) or not isinstance(b, int) or not 0 <= b < len(s.blocks):
        raise ValueError(f"block={b!r}: give a number from 0 to {len(s.blocks) - 1}, as in the chain of blocks")
    stage, legend = ("K", LEGEND_K) if isinstance(g, K_graph) else ("S", LEGEND_S)
    picture = parts.new_picture(f"{stage} graph: block {b} of 0 to {len(s.blocks) - 1}", legend)
    _add_block(picture, g, s, b, classes(s))
    return picture


def _in_blocks(s: S_graph) -> S_graph:
    """``s`` with blocks; a large graph that is one block is cut."""
    if len(s.blocks) < 2 and len(s.nodes) > LIMIT:
        return cut(s)
    return s if s.blocks else s.with_blocks(((0, len(s.nodes)),))


def _distinct(s: S_graph, g: D_graph | S_graph) -> Any:
    """The chain of blocks, and beside it the first block of each class, as it looks in ``g``, a stage of ``s``."""
    s = _in_blocks(s)
    numbers = classes(s)
    stage, legend = ("S", LEGEND_S) if isinstance(g, S_graph) else ("D", LEGEND)
    title = f"{stage} graph: {len(g.nodes)} nodes, blocks: {len(s.blocks)}, of them distinct: {len(set(numbers))}"
    picture = parts.new_picture(title, f"the chain, and the first block of each class · {legend}")
    # Lines a little less straight, for seconds instead of half a minute with some hundred nodes.
    picture.attr("graph", nslimit="4", mclimit="0.5")
    _add_overview(picture, s, numbers)
    for number in dict.fromkeys(numbers):
        _add_block(picture, g, s, numbers.index(number), numbers)
    return picture


def _add_block(picture: Any, g: D_graph | S_graph | K_graph, s: S_graph, b: int, numbers: Sequence[int]) -> None:
    """Add block ``b`` of ``s`` as it looks in ``g``; ``numbers``: the class of each block."""
    prefix, (start, stop), number = f"block{b}_", s.blocks[b], numbers[b]
    more = numbers.count(number) - 1
    title = f"class {number}: block {b}" + (f" and {more} more like it" if more else "")
    if isinstance(g, K_graph):
        add_frames(picture, g, [(start, stop, f"{title} · {stop - start} nodes", number)], prefix)
        return
    chart = Flowchart(s.d, picture, prefix, s.shown if isinstance(g, S_graph) else {})
    if isinstance(g, S_graph):
        boxes = [S_box(s, i, chart) for i in range(start, stop)]
    else:
        ops = sorted(op for node in s.nodes[start:stop] for op in node.ops)
        boxes = [node_box(g.nodes[op], chart, op) for op in ops]
    after = {v for node in s.nodes[stop:] for v in node.reads} | set(s.d.outputs)
    leaving = [v for node in s.nodes[start:stop] for v in node.makes if v in after]
    chart.draw([Section(tuple(boxes), title, number)], leaving)


def _add_overview(picture: Any, s: S_graph, numbers: Sequence[int]) -> None:
    """Add one box for each block: its class and size, and the bytes that it and those before pass on."""
    chain = parts.chain_frame()
    for b, ((start, stop), number, passed) in enumerate(zip(s.blocks, numbers, interfaces(s), strict=True)):
        frame, background = parts.colours_of(number)
        size = f"{format_bytes(sum(s.d.storages[x].bytes for x in passed))} to later blocks" if passed else ""
        text = parts.label(f"block {b}, class {number}", f"{stop - start} nodes", size)
        tooltip = ", ".join(node.label for node in s.nodes[start:stop])
        parts.add_box(chain, f"chain{b}", text, tooltip, background, color=frame, penwidth="1.5")
        if b:
            chain.edge(f"chain{b - 1}", f"chain{b}")
    picture.subgraph(chain)


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
