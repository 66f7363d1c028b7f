"""B, D and S as pictures of programs: operations in boxes, in the order of the program; data on the edges.

Data is an ellipse only where it enters or leaves. Parameters and buffers are cylinders; those that belong to one
operation share one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rkgb.blocks.classes import classes
from rkgb.graphs import B_graph, D_graph, Node, S_graph, Value
from rkgb.render import parts
from rkgb.render.columns import SIZES, crossing, new_column, pages
from rkgb.units import format_bytes

LEGEND = "box: operation · ellipse: data that enters or leaves · cylinder: parameters (yellow), buffers (violet)"
LEGEND_S = f"{LEGEND} · grey: no gradient, dashed: runs once · frame: block, colour: class"
_OWN = ("parameter", "buffer")
_COLOURS = (*_OWN, "constant", "input")
"""Kinds of sources; the first one decides the colour of several together."""


@dataclass(frozen=True, slots=True)
class Box:
    """One computation of a program: it reads and makes values."""

    text: str
    tooltip: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    fill: str = parts.FORWARD
    style: str = "filled,rounded"


@dataclass(frozen=True, slots=True)
class Section:
    """Boxes that stand together; in a frame if ``number``, the class of the block, is given."""

    boxes: tuple[Box, ...]
    title: str = ""
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Flowchart:
    """The flowchart of sections of a B, D or S graph; ``g`` has the values that they read and make.

    ``shown``: names of values in S, where these differ from those in D. Of values that were drawn: ``keys`` of their
    boxes or ellipses, ``home``, the sections that make them, and ``readers``, the boxes that read them.
    """

    g: B_graph | D_graph
    picture: Any
    prefix: str = ""
    shown: dict[int, str] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)
    home: dict[int, int] = field(default_factory=dict)
    readers: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def values(self) -> dict[int, Value]:
        """What is known of values: in B nothing."""
        return self.g.values if isinstance(self.g, D_graph) else {}

    def draw(self, sections: Sequence[Section], leaving: Sequence[int]) -> tuple[list[str], str]:
        """Draw ``sections`` one below the other, then the values ``leaving``. Returns keys of the top and the end."""
        frames = [
            self.picture
            if section.number is None
            else parts.new_block(f"{self.prefix}{k}", f"{section.title} · {len(section.boxes)} nodes", section.number)
            for k, section in enumerate(sections)
        ]
        for k, section in enumerate(sections):
            for j, box in enumerate(section.boxes):
                parts.add_box(frames[k], self._key(k, j), box.text, box.tooltip, box.fill, style=box.style)
                self.keys.update(dict.fromkeys(box.makes, self._key(k, j)))
                self.home.update(dict.fromkeys(box.makes, k))
                for v in box.reads:
                    self.readers.setdefault(v, []).append((k, j))
        self._enter(frames, leaving)
        self._edges(sections)
        tops = [self._tops(sections, k) for k in range(len(sections))]
        ends = [self._key(k, len(section.boxes) - 1) for k, section in enumerate(sections)]
        for above, below in zip(ends, tops[1:], strict=False):
            parts.put_below(self.picture, above, below)
        for v in dict.fromkeys(leaving):
            ends.append(f"{self.prefix}out{v}")
            self._leave(frames[self.home[v]] if v in self.home else self.picture, ends[-1], v)
            self.picture.edge(self.keys[v], ends[-1])
        for section, frame in zip(sections, frames, strict=True):
            if section.number is not None:
                self.picture.subgraph(frame)
        return tops[0], ends[-1]

    def _key(self, k: int, j: int) -> str:
        return f"{self.prefix}n{k}_{j}"

    def _enter(self, frames: Sequence[Any], leaving: Sequence[int]) -> None:
        """Add an ellipse for each value that no box makes; parameters and buffers of one box share a cylinder."""
        groups: dict[object, list[int]] = {}
        for v in [v for v in dict.fromkeys((*self.readers, *leaving)) if v not in self.keys]:
            boxes, source = self.readers.get(v, []), self.g.sources.get(v)
            own = len(boxes) == 1 and v not in leaving and source is not None and source.kind in _OWN
            groups.setdefault(boxes[0] if own else v, []).append(v)
        for members in groups.values():
            key = f"{self.prefix}v{members[0]}"
            self.keys.update(dict.fromkeys(members, key))
            where = {k for v in members for k, _ in self.readers.get(v, ())}
            self._source(frames[where.pop()] if len(where) == 1 else self.picture, key, members)

    def _edges(self, sections: Sequence[Section]) -> None:
        """Add an edge to each box from what it reads, with the value's name if its maker has several results."""
        several = {v for s in sections for box in s.boxes if len(box.makes) > 1 for v in box.makes}
        for k, section in enumerate(sections):
            for j, box in enumerate(section.boxes):
                seen: set[str] = set()
                for v in box.reads:
                    if self.keys[v] in seen and v not in several:
                        continue
                    seen.add(self.keys[v])
                    tip = parts.tip(self.describe(v))
                    more = {"label": parts.escaped(f" {self.name(v)}")} if v in several else {}
                    # Edges within a section are kept straight; those between sections do not move them.
                    more["weight"] = "1" if v not in self.home else "8" if self.home[v] == k else "0"
                    self.picture.edge(self.keys[v], self._key(k, j), tooltip=tip, labeltooltip=tip, **more)
                alone = not any(v in self.home for v in box.reads) and not any(v in self.readers for v in box.makes)
                if j and alone:  # nothing but its place in the program says where it belongs
                    parts.put_below(self.picture, self._key(k, j - 1), [self._key(k, j)])

    def _tops(self, sections: Sequence[Section], k: int) -> list[str]:
        """The keys at the top of section k to which no edge of the picture leads."""
        before = {v for section in sections[:k] for box in section.boxes for v in box.reads}
        tops = []
        for j, box in enumerate(sections[k].boxes[:3]):  # what is further down follows by itself
            if not any(v in self.keys and self.home.get(v, k) == k for v in box.reads):
                tops.append(self._key(k, j))
            tops += [self.keys[v] for v in box.reads if v not in self.home and v not in before]
        return list(dict.fromkeys(tops))

    def _source(self, where: Any, key: str, members: Sequence[int]) -> None:
        sources = [self.g.sources.get(v) for v in members]
        kind = min((s.kind for s in sources if s), key=_COLOURS.index, default="")
        fill = parts.SOURCES[kind] if kind else parts.DATA
        cylinder = {"shape": "cylinder", "margin": "0.08,0.07"} if kind in _OWN else {}
        more = cylinder if kind else {"style": "filled,dashed"}
        tooltip = "\n".join(self.describe(v) for v in members)
        parts.add_data(where, key, parts.data_label(*self._names(members)), tooltip, fill, **more)

    def _names(self, members: Sequence[int]) -> list[str]:
        """The lines of a label: name, form and size of one value; of several first the module they share."""
        if len(members) == 1:
            return [self.name(members[0]), self.size(members[0])]
        split = [self.name(v).rpartition(".") for v in members]
        if len({module for module, _, _ in split}) == 1 and split[0][0]:
            first, names = [split[0][0]], [name for _, _, name in split]
        else:
            first, names = [], [self.name(v) for v in members]
        known = [self.values[v] for v in members if v in self.values]
        if known:
            names = [f"{name} {list(value.shape)}" for name, value in zip(names, known, strict=True)]
        lines: list[str] = []
        for i in range(0, len(names), 2):
            pair = ", ".join(names[i : i + 2])
            lines += [pair] if len(pair) <= 40 else names[i : i + 2]
        return [*first, *lines, format_bytes(sum(value.bytes for value in known)) if known else ""]

    def _leave(self, where: Any, key: str, v: int) -> None:
        returned = v in self.g.outputs
        text = parts.data_label(self.name(v), self.size(v), "returned" if returned else "read later")
        more = {"peripheries": "2"} if returned else {"style": "filled,dashed"}
        parts.add_data(where, key, text, self.describe(v), parts.OUTPUT, **more)

    def name(self, v: int) -> str:
        """The display name of a value."""
        return self.shown.get(v, self.g.names[v])

    def size(self, v: int) -> str:
        """Form and size of a value, "[2, 16, 32] 4.0 KiB", if known."""
        known = self.values.get(v)
        return f"{list(known.shape)} {format_bytes(known.bytes)}" if known else ""

    def describe(self, v: int) -> str:
        """The tooltip of a value."""
        known, source = self.values.get(v), self.g.sources.get(v)
        kind = f"{source.kind} " if source else ""
        form = f": {str(known.dtype)[6:]}{list(known.shape)}, {format_bytes(known.bytes)}" if known else ""
        return f"{kind}{self.name(v)}{form}"


def whole_program(g: B_graph | D_graph) -> Any:
    """All operations of a B or D graph, in columns."""
    stage = "B" if isinstance(g, B_graph) else "D"
    picture = parts.new_picture(f"{stage} graph: {len(g.nodes)} operations", LEGEND)
    names = g.names if isinstance(g, B_graph) else [n.label for n in g.nodes]
    reads, makes = [n.reads() for n in g.nodes], [n.outputs for n in g.nodes]
    spans = pages(len(g.nodes), SIZES[stage].columns(len(g.nodes), names), crossing(reads, makes))
    for k, (start, stop) in enumerate(spans):
        with new_column(picture, k, len(spans)) as column:
            chart = Flowchart(g, column, f"column{k}_" if k else "")
            boxes = tuple(node_box(g.nodes[op], chart, op) for op in range(start, stop))
            chart.draw([Section(boxes)], _leaving(reads, makes, start, stop, g.outputs))
    return picture


def _leaving(
    reads: Sequence[Sequence[int]], makes: Sequence[Sequence[int]], start: int, stop: int, outputs: Sequence[int]
) -> list[int]:
    """The values that computations ``start`` to ``stop`` make and later ones read; outputs, behind the last one all."""
    after = {v for values in reads[stop:] for v in values} | set(outputs)
    leaving = [v for values in makes[start:stop] for v in values if v in after]
    made = {v for values in makes for v in values}
    return leaving if stop < len(makes) else [*leaving, *(v for v in outputs if v not in made)]


def node_box(node: Node, chart: Flowchart, index: int) -> Box:
    g = chart.g
    title = node.label or node.name
    results = ", ".join(g.names[v] for v in node.outputs if g.names[v] != title)
    sizes = [chart.size(v) for v in node.outputs[:1]]
    style = "filled,rounded" if node.mode.grad else "filled,rounded,dashed"
    more = f"{len(node.outputs)} × " if len(node.outputs) > 1 and any(sizes) else ""
    some = results if len(results) < 40 else f"{len(node.outputs)} results"
    text = parts.label(title, node.name if node.name != title else "", some, *(more + s for s in sizes))
    return Box(text, parts.program_text(g, [index]), node.reads(), node.outputs, parts.FORWARD, style)


def whole_S(s: S_graph) -> Any:
    """All nodes of an S graph, block below block, in columns."""
    blocks = s.blocks or ((0, len(s.nodes)),)
    picture = parts.new_picture(f"S graph: {len(s.nodes)} nodes, blocks: {len(blocks)}", LEGEND_S)
    reads, makes = [n.reads for n in s.nodes], [n.makes for n in s.nodes]
    count = SIZES["S"].columns(len(s.nodes), (n.label for n in s.nodes))
    spans = pages(len(s.nodes), count, crossing(reads, makes, blocks))
    for k, span in enumerate(spans):
        with new_column(picture, k, len(spans)) as column:
            chart = Flowchart(s.d, column, f"column{k}_" if k else "", s.shown)
            sections = [
                Section(tuple(S_box(s, i, chart) for i in range(start, stop)), title, number)
                for start, stop, title, number in titled(s, blocks, *span)
            ]
            chart.draw(sections, _leaving(reads, makes, *span, s.d.outputs))
    return picture


def titled(s: S_graph, blocks: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int, str, int]]:
    """The parts of ``blocks`` between two nodes: their nodes, titles and classes."""
    numbers = classes(s.with_blocks(tuple(blocks)))
    for b, ((first, end), number) in enumerate(zip(blocks, numbers, strict=True)):
        if max(first, start) < min(end, stop):
            more = " (continued)" if first < start else ""
            yield max(first, start), min(end, stop), f"block {b}, class {number}{more}", number


def S_box(s: S_graph, i: int, chart: Flowchart) -> Box:
    node = s.nodes[i]
    body = [s.d.nodes[op].name for op in node.ops]
    if node.name in body:
        body.remove(node.name)
    own = [s.d.storages[x].bytes for x in node.storages]
    saved = sum(s.d.storages[x].bytes for x in node.saved.storages if s.d.storages[x].owner is not None)
    saved += sum(node.saved.private)
    text = parts.label(
        node.label,
        node.name if node.name != node.label else "",
        f"+ {parts.counted(body)}" if body else "",
        f"makes {format_bytes(sum(own))}" if own else "",
        f"saves {format_bytes(saved)}" if saved else "",
        "random" if node.random else "",
    )
    fill = parts.FORWARD if node.requires_grad else parts.CALM
    style = "filled,rounded,dashed" if node.fixed else "filled,rounded"
    return Box(text, parts.program_text(s.d, node.ops), node.reads, node.makes, fill, style)
