"""``draw``: the picture of any graph. The picture of a large graph shows each distinct part once.

It has the chain of blocks, and beside it the first block of each class. With forwards, data and backwards a large K
would be a poster: it has the chain alone, and ``draw_block`` draws the blocks that are asked for. B has no blocks: a
large B has one box for each of the user's source lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rkgb.blocks.classes import classes
from rkgb.blocks.cut import cut
from rkgb.blocks.simplify import D_to_S
from rkgb.blocks.summary import interfaces
from rkgb.graphs import B_graph, D_graph, S_graph
from rkgb.Ktools import K_graph
from rkgb.pipeline import Graph
from rkgb.render import parts
from rkgb.render.columns import SIZES, Panel, Size, chain_pages, stand
from rkgb.render.kgraph import LEGEND_K, K_overview, add_page, whole_K
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
    stand(picture, _chain(k, s, classes(s), 0))
    return picture


def draw_block(g: S_graph | K_graph, b: int) -> Any:
    """Block ``b`` of ``g`` on its own, as it is numbered in the chain. Raises ``ValueError`` if there is none."""
    whole = g.s if isinstance(g, K_graph) else g
    s = _in_blocks(whole)
    if isinstance(b, bool) or not isinstance(b, int) or not 0 <= b < len(s.blocks):
        raise ValueError(f"block={b!r}: give a number from 0 to {len(s.blocks) - 1}, as in the chain of blocks")
    stage, legend = ("K", LEGEND_K) if isinstance(g, K_graph) else ("S", LEGEND_S)
    picture = parts.new_picture(f"{stage} graph: block {b} of 0 to {len(s.blocks) - 1}", legend)
    stand(picture, [_panel(g, s, b, classes(s))])
    return picture


def _in_blocks(s: S_graph) -> S_graph:
    """``s`` with blocks; a large graph that is one block is cut."""
    if len(s.blocks) < 2 and len(s.nodes) > LIMIT:
        return cut(s)
    return s if s.blocks else s.with_blocks(((0, len(s.nodes)),))


def _chain(g: D_graph | S_graph | K_graph, s: S_graph, numbers: Sequence[int], others: float) -> list[Panel]:
    """The chain of blocks, in several panels if it is long; ``others``: square points of what stands beside it."""
    draw: Callable[..., tuple[list[str], str]]
    if isinstance(g, K_graph):
        size, draw = Size(70, 62, 440, 0), partial(K_overview, k=g, s=s, numbers=numbers)
    else:
        size, draw = Size(60, 62, 180, 0), partial(_overview, s=s, numbers=numbers)
    spans = chain_pages(len(s.blocks), size, others)
    return [Panel(size.base, size.height(stop - start), partial(draw, span=(start, stop))) for start, stop in spans]


def _distinct(s: S_graph, g: D_graph | S_graph) -> Any:
    """The chain of blocks, and beside it the first block of each class, as it looks in ``g``, a stage of ``s``."""
    s = _in_blocks(s)
    numbers = classes(s)
    stage, legend = ("S", LEGEND_S) if isinstance(g, S_graph) else ("D", LEGEND)
    title = f"{stage} graph: {len(g.nodes)} nodes, blocks: {len(s.blocks)}, of them distinct: {len(set(numbers))}"
    picture = parts.new_picture(title, f"the chain, and the first block of each class · {legend}")
    # Lines a little less straight, for seconds instead of half a minute with some hundred nodes.
    picture.attr("graph", nslimit="4", mclimit="0.5")
    panels = [_panel(g, s, numbers.index(number), numbers) for number in dict.fromkeys(numbers)]
    stand(picture, [*_chain(g, s, numbers, sum(p.width * p.height for p in panels)), *panels])
    return picture


def _panel(g: D_graph | S_graph | K_graph, s: S_graph, b: int, numbers: Sequence[int]) -> Panel:
    """Block ``b`` of ``s`` as it looks in ``g``; ``numbers``: the class of each block."""
    more = numbers.count(numbers[b]) - 1
    title = f"class {numbers[b]}: block {b}" + (f" and {more} more like it" if more else "")
    nodes = s.nodes[slice(*s.blocks[b])]
    stage = "K" if isinstance(g, K_graph) else "S" if isinstance(g, S_graph) else "D"
    rows, size = sum(len(n.ops) for n in nodes) if stage == "D" else len(nodes), SIZES[stage]
    draw = partial(_block, g=g, s=s, b=b, title=title, number=numbers[b])
    return Panel(size.width(n.label for n in nodes), size.height(rows), draw)


def _block(
    picture: Any, g: D_graph | S_graph | K_graph, s: S_graph, b: int, title: str, number: int
) -> tuple[list[str], str]:
    """Add block ``b`` of class ``number`` as it looks in ``g``; returns the keys at its top and at its end."""
    prefix, (start, stop) = f"block{b}_", s.blocks[b]
    if isinstance(g, K_graph):
        tops = add_page(picture, g, [(start, stop, f"{title} · {stop - start} nodes", number)], prefix)
        return tops, f"{prefix}f{stop - 1}"
    chart = Flowchart(s.d, picture, prefix, s.shown if isinstance(g, S_graph) else {})
    if isinstance(g, S_graph):
        boxes = [S_box(s, i, chart) for i in range(start, stop)]
    else:
        ops = sorted(op for node in s.nodes[start:stop] for op in node.ops)
        boxes = [node_box(g.nodes[op], chart, op) for op in ops]
    after = {v for node in s.nodes[stop:] for v in node.reads} | set(s.d.outputs)
    leaving = [v for node in s.nodes[start:stop] for v in node.makes if v in after]
    return chart.draw([Section(tuple(boxes), title, number)], leaving)


def _overview(picture: Any, s: S_graph, numbers: Sequence[int], span: tuple[int, int]) -> tuple[list[str], str]:
    """Add one box for each block of ``span``: its class and size, and the bytes that it and those before pass on."""
    chain = parts.chain_frame(span, len(s.blocks))
    every = interfaces(s)
    for b in range(*span):
        (start, stop), number, passed = s.blocks[b], numbers[b], every[b]
        frame, background = parts.colours_of(number)
        size = f"{format_bytes(sum(s.d.storages[x].bytes for x in passed))} to later blocks" if passed else ""
        text = parts.label(f"block {b}, class {number}", f"{stop - start} nodes", size)
        tooltip = ", ".join(node.label for node in s.nodes[start:stop])
        parts.add_box(chain, f"chain{b}", text, tooltip, background, color=frame, penwidth="1.5")
        if b > span[0]:
            chain.edge(f"chain{b - 1}", f"chain{b}")
    picture.subgraph(chain)
    return [f"chain{span[0]}"], f"chain{span[1] - 1}"


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
