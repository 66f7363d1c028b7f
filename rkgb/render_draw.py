"""Pictures of the graphs. ``draw`` shows small graphs whole, and large ones by what is distinct in them.

B, D and S are drawn as programs, K as three columns: forwards on the left, going down; the data they
make; backwards on the right, going up. Times are those of the graph's costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rkgb.Atools import classes
from rkgb.graphs import B_graph, D_graph, S_graph
from rkgb.Ktools import K_graph
from rkgb.render_parts import (
    BACKWARD,
    CALM,
    CLASSES,
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
    format_bytes,
    format_time,
    label,
    new_block,
    new_picture,
    node_box,
    program_text,
    put_below,
)
from rkgb.Stools import D_to_S, cut

Graph = B_graph | D_graph | S_graph | K_graph

# Above so many boxes and ellipses a picture is no longer read; only distinct blocks and an overview are drawn.
LIMIT = 300

_LEGEND = "box: operation · ellipse: input (green), parameter (yellow), buffer or constant (violet)"
_LEGEND_S = f"{_LEGEND} · grey: no gradient, dashed: runs once · frame: block, colour: class"
_LEGEND_K = "blue: forward, downwards (grey: runs once) · white: data · orange: backward, upwards; dashed: gradients"


def draw(g: Graph) -> Any:
    """The picture of ``g`` as a ``graphviz.Digraph``; over ``LIMIT`` boxes and ellipses, that of its distinct parts."""
    if isinstance(g, K_graph):
        count = len(g.nodes) + sum(n.backward is not None for n in g.nodes) + len(g.data)
        return _whole_K(g) if count <= LIMIT else _distinct(g.s, g)
    if len(g.nodes) > LIMIT:
        if isinstance(g, B_graph):
            return _by_line(g)
        return _distinct(g, g) if isinstance(g, S_graph) else _distinct(cut(D_to_S(g)), g)
    if isinstance(g, S_graph):
        picture = new_picture(f"S graph: {len(g.nodes)} nodes in {max(1, len(g.blocks))} blocks", _LEGEND_S)
        program = Program(g.d, picture, values=g.d.values)
        numbers = classes(g)
        whole = [Section(tuple(_S_box(g, i, program) for i in range(len(g.nodes))))]
        cuts = [
            Section(tuple(_S_box(g, i, program) for i in range(*block)), f"block {k}, class {number}", number)
            for k, (block, number) in enumerate(zip(g.blocks, numbers, strict=True))
        ]
        program.draw(cuts or whole, g.d.outputs)
        return picture
    stage = "B" if isinstance(g, B_graph) else "D"
    picture = new_picture(f"{stage} graph: {len(g.nodes)} operations", _LEGEND)
    program = Program(g, picture, values={} if isinstance(g, B_graph) else g.values)
    program.draw([Section(tuple(node_box(n, program, k) for k, n in enumerate(g.nodes)))], g.outputs)
    return picture


def _S_box(s: S_graph, i: int, program: Program) -> Box:
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


def _whole_K(k: K_graph) -> Any:
    forward, backward = _times(k, 0, len(k.nodes))
    backwards = sum(n.backward is not None for n in k.nodes)
    title = f"K graph: {len(k.nodes)} forwards, {format_time(forward)}; {backwards} backwards, {format_time(backward)}"
    picture = new_picture(title, _LEGEND_K)
    blocks = k.s.blocks or ((0, len(k.nodes)),)
    for b, ((start, stop), number) in enumerate(zip(blocks, classes(k.s.with_blocks(blocks)), strict=True)):
        times = _times(k, start, stop)
        title = f"block {b}, class {number} · forward {format_time(times[0])}, backward {format_time(times[1])}"
        block = new_block(str(b), title, number)
        _rows(block, k, start, stop, "")
        picture.subgraph(block)
    _edges(picture, k, 0, len(k.nodes), "")
    _columns(picture, range(len(k.nodes)), "")
    add_box(picture, "loss", label("loss"), "the gradients of the outputs arrive", "#f6c6c6")
    for d in k.outputs:
        picture.edge(f"d{d}", "loss")
    for i, node in enumerate(k.nodes):
        if node.backward and set(k.s.nodes[i].makes) & set(k.s.d.outputs):
            picture.edge(f"b{i}", "loss", dir="back", style="dashed", color="#c06a2b")
    return picture


def _rows(block: Any, k: K_graph, start: int, stop: int, prefix: str) -> None:
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
                _add_K_data(row, k, d, prefix, stop)
            _add_backward(row, k, i, prefix, program)
            order = [f"{prefix}f{i}", *(f"{prefix}d{d}" for d in node.makes), f"{prefix}b{i}"]
            for a, b in zip(order, order[1:], strict=False):
                row.edge(a, b, style="invis")


def _add_backward(row: Any, k: K_graph, i: int, prefix: str, program: str) -> None:
    found, key, group = k.nodes[i].backward, f"{prefix}b{i}", f"{prefix}backward"
    if found is None:  # holds the column
        row.node(key, "", style="invis", group=group, width="0.1", height="0.1")
        return
    gradients = f"{format_bytes(found.before)} before, {format_bytes(found.peak)} at most, {format_bytes(found.after)} after"
    text = label(f"{k.s.nodes[i].name} backward", f"{format_time(found.time)} · peak {format_bytes(found.peak)}")
    add_box(row, key, text, f"backward; gradients take {gradients}\n{program}", BACKWARD, group=group)


def _add_K_data(where: Any, k: K_graph, d: int, prefix: str, stop: int) -> None:
    """One datum; a thick line if blocks that start at ``stop`` or behind it read it, a double line if returned."""
    data = k.data[d]
    kind = "saved for the backward only" if data.storage is None else "result"
    text = data_label(data.name, format_bytes(data.bytes))
    more = {"peripheries": "2"} if d in k.outputs else {}
    if any(d in n.reads for n in k.nodes[stop:]):
        more["penwidth"] = "2"
    fill = OUTPUT if d in k.outputs else DATA
    add_data(where, f"{prefix}d{d}", text, f"{data.name}: {kind}, {format_bytes(data.bytes)}", fill, **more)


def _edges(picture: Any, k: K_graph, start: int, stop: int, prefix: str) -> None:
    """Reads, makes and the flow of gradients between nodes ``start`` to ``stop``; what is not drawn must not be read."""
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


def _columns(picture: Any, nodes: Sequence[int], prefix: str) -> None:
    for i, j in zip(nodes, nodes[1:], strict=False):
        picture.edge(f"{prefix}f{i}", f"{prefix}f{j}", style="invis", weight="20")
        picture.edge(f"{prefix}b{i}", f"{prefix}b{j}", style="invis", weight="20")


def _times(k: K_graph, start: int, stop: int) -> tuple[int, int]:
    """Forward and backward time in ns of nodes ``start`` to ``stop``."""
    nodes = k.nodes[start:stop]
    return sum(n.time for n in nodes), sum(n.backward.time for n in nodes if n.backward)


# ------------------------------------------------------------------------------------------------ large graphs


def _distinct(s: S_graph, g: D_graph | S_graph | K_graph) -> Any:
    """The chain of blocks, and beside it the first block of each class, as it looks in ``g``, a stage of ``s``."""
    if len(s.blocks) < 2:
        s = cut(s)
    numbers = classes(s)
    stage = "K" if isinstance(g, K_graph) else "S" if isinstance(g, S_graph) else "D"
    title = f"{stage} graph: {len(g.nodes)} nodes in {len(s.blocks)} blocks, {len(set(numbers))} of them distinct"
    legend = {"K": _LEGEND_K, "S": _LEGEND_S, "D": _LEGEND}[stage]
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
        boxes = [_S_box(s, i, program) for i in range(start, stop)]
    else:
        ops = sorted(op for node in s.nodes[start:stop] for op in node.ops)
        boxes = [node_box(g.nodes[op], program, op) for op in ops]
    after = {v for node in s.nodes[stop:] for v in node.reads} | set(s.d.outputs)
    leaving = [v for node in s.nodes[start:stop] for v in node.makes if v in after]
    return program.draw([Section(tuple(boxes), title, classes(s)[b])], leaving)


def _overview(s: S_graph, numbers: Sequence[int], k: K_graph | None) -> Any:
    """One box for each block; the edges say what crosses."""
    chain = new_block("chain", "the chain of blocks; on the edges: bytes that later blocks read", len(CLASSES) - 1)
    for b, ((start, stop), number) in enumerate(zip(s.blocks, numbers, strict=True)):
        frame, background = CLASSES[number % len(CLASSES)]
        times = "forward {}, backward {}".format(*map(format_time, _times(k, start, stop))) if k else ""
        text = label(f"block {b}, class {number}", f"{stop - start} nodes", times)
        tooltip = ", ".join(node.name for node in s.nodes[start:stop])
        add_box(chain, f"chain{b}", text, tooltip, background, color=frame, penwidth="1.5")
        if b + 1 < len(s.blocks):
            chain.edge(f"chain{b}", f"chain{b + 1}", label=f" {format_bytes(_crossing(s, stop))}")
    return chain


def _crossing(s: S_graph, position: int) -> int:
    """Bytes made before node ``position`` and read at or after it."""
    read = {s.d.values[v].storage for node in s.nodes[position:] for v in node.reads}
    return sum(s.d.storages[x].bytes for node in s.nodes[:position] for x in node.storages if x in read)


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
            _add_K_data(row, k, d, prefix, stop)
    _rows(block, k, start, stop, prefix)
    tops = [f"{prefix}d{d}" for d in entering]
    for top in tops:
        put_below(block, top, [f"{prefix}f{start}"])
    _edges(block, k, start, stop, prefix)
    _columns(block, range(start, stop), prefix)
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
