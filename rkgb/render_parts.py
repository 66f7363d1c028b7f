"""What every picture of a graph is made of: colours, labels, sizes and times, boxes and ellipses.

A box is a computation, an ellipse is data; a block is a frame, in the colour of its class.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import graphviz

from rkgb.graphs import B_graph, D_graph, Node, Value, format_program
from rkgb.units import format_bytes

FORWARD, BACKWARD, CALM, DATA = "#d6e6f7", "#fbdcc4", "#e9e9e9", "#ffffff"
SOURCES = {"input": "#bfe6c2", "parameter": "#fff2b8", "buffer": "#ece0f5", "constant": "#ece0f5"}
OUTPUT = "#bfe6c2"
# (frame, background) of the blocks of a class; further classes start again.
CLASSES = (
    ("#4878a8", "#f3f8fd"),
    ("#c06a2b", "#fef6ef"),
    ("#3f8f4f", "#f2faf3"),
    ("#9a5aa6", "#faf4fb"),
    ("#b04a4a", "#fdf3f3"),
    ("#2f8f8f", "#f0fafa"),
    ("#8a7a2a", "#fbf9ec"),
    ("#666666", "#f6f6f6"),
)


def counted(names: Iterable[str], limit: int = 4) -> str:
    """Names with their number: "view ×3, transpose", at most ``limit`` of them."""
    several = [f"{name} ×{n}" if n > 1 else name for name, n in Counter(names).items()]
    return ", ".join(several[:limit] + (["…"] if len(several) > limit else []))


def label(title: str, *lines: str) -> str:
    """A label: a bold title over small lines; empty lines are left out."""
    small = "".join(f'<BR/><FONT POINT-SIZE="9">{html.escape(line)}</FONT>' for line in lines if line)
    return f"<<B>{html.escape(title)}</B>{small}>"


def data_label(name: str, *lines: str) -> str:
    """The label of data: all small."""
    text = "<BR/>".join(html.escape(line) for line in (name, *lines) if line)
    return f'<<FONT POINT-SIZE="9">{text}</FONT>>'


def program_text(g: B_graph | D_graph, ops: Iterable[int]) -> str:
    """The assignments ``ops`` of the program, each with the user's source line: what a tooltip shows."""
    values = g.values if isinstance(g, D_graph) else None
    return format_program(g.names, tuple(g.nodes[k] for k in ops), (), values).rpartition("\n")[0]


def new_picture(title: str, legend: str) -> Any:
    """An empty picture with a title and an explanation at its top."""
    picture = graphviz.Digraph()
    picture.attr(
        "graph",
        label=f'<<FONT POINT-SIZE="16"><B>{html.escape(title)}</B></FONT><BR/>{html.escape(legend)}<BR/> >',
        labelloc="t",
        fontname="Helvetica",
        fontsize="10",
        nodesep="0.2",
        ranksep="0.3",
        tooltip=title,
    )
    picture.attr("node", fontname="Helvetica", fontsize="11", shape="box", style="filled,rounded", color="#555555")
    picture.attr("node", height="0.3", margin="0.1,0.05")
    picture.attr("edge", fontname="Helvetica", fontsize="9", color="#777777", arrowsize="0.6")
    return picture


def new_block(name: str, title: str, number: int) -> Any:
    """The frame of a block of class ``number``; to be filled, then given to ``picture.subgraph``."""
    frame, background = CLASSES[number % len(CLASSES)]
    block = graphviz.Digraph(f"cluster_{name}")
    block.attr("graph", label=f"<<B>{html.escape(title)}</B>>", labeljust="l", style="rounded,filled", penwidth="1.5")
    block.attr("graph", color=frame, fontcolor=frame, fillcolor=background, margin="12", tooltip=title)
    return block


def add_box(picture: Any, key: str, text: str, tooltip: str, fill: str, **more: str) -> None:
    """A computation."""
    picture.node(key, text, fillcolor=fill, tooltip=graphviz.escape(tooltip), **more)


def add_data(picture: Any, key: str, text: str, tooltip: str, fill: str, **more: str) -> None:
    """Data: an ellipse."""
    form = {"shape": "ellipse", "style": "filled", "margin": "0.02"} | more
    picture.node(key, text, fillcolor=fill, tooltip=graphviz.escape(tooltip), **form)


def put_below(picture: Any, above: str, tops: Iterable[str]) -> None:
    """Place ``tops``, and with them what hangs on them, below ``above``."""
    for key in tops:
        picture.edge(above, key, style="invis")


@dataclass(frozen=True, slots=True)
class Box:
    """One computation of a program: it reads and makes values."""

    text: str
    tooltip: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    fill: str = FORWARD
    style: str = "filled,rounded"


@dataclass(frozen=True, slots=True)
class Section:
    """Boxes that are drawn together; in a frame if ``number``, the class of the block, is given."""

    boxes: tuple[Box, ...]
    title: str = ""
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """Draws sections of a B, D or S graph; ``g`` is the program whose values they read and make.

    Data is drawn only where it enters (inputs, parameters, buffers, constants, values made elsewhere) and
    where it leaves; between two boxes it is the edge, whose tooltip says what it is.
    """

    g: B_graph | D_graph
    picture: Any
    prefix: str = ""
    values: dict[int, Value] = field(default_factory=dict)

    def draw(self, sections: Sequence[Section], leaving: Sequence[int]) -> tuple[list[str], str]:
        """Draw ``sections`` below each other; ``leaving``: values that leave. Returns the top and the end."""
        frames = [
            self.picture
            if section.number is None
            else new_block(f"{self.prefix}{k}", f"{section.title} · {len(section.boxes)} nodes", section.number)
            for k, section in enumerate(sections)
        ]
        keys: dict[int, str] = {}  # value -> its box or ellipse
        home: dict[int, int] = {}  # value made -> section
        readers: dict[int, set[int]] = {}  # value -> sections
        for k, section in enumerate(sections):
            for j, box in enumerate(section.boxes):
                add_box(frames[k], self._key(k, j), box.text, box.tooltip, box.fill, style=box.style)
                keys.update(dict.fromkeys(box.makes, self._key(k, j)))
                home.update(dict.fromkeys(box.makes, k))
                for v in box.reads:
                    readers.setdefault(v, set()).add(k)
        for v in [v for v in (*readers, *leaving) if v not in keys]:
            where = [frames[k] for k in readers.get(v, ())]
            self._source(where[0] if len(where) == 1 else self.picture, keys.setdefault(v, f"{self.prefix}v{v}"), v)
        self._edges(sections, keys, home)
        tops = [self._tops(sections, k, keys, home) for k in range(len(sections))]
        ends = [self._key(k, len(section.boxes) - 1) for k, section in enumerate(sections)]
        for above, below in zip(ends, tops[1:], strict=False):
            put_below(self.picture, above, below)
        for v in dict.fromkeys(leaving):
            ends.append(f"{self.prefix}out{v}")
            self._leave(frames[home[v]] if v in home else self.picture, ends[-1], v)
            self.picture.edge(keys[v], ends[-1])
        for section, frame in zip(sections, frames, strict=True):
            if section.number is not None:
                self.picture.subgraph(frame)
        return tops[0], ends[-1]

    def _key(self, k: int, j: int) -> str:
        return f"{self.prefix}n{k}_{j}"

    def _edges(self, sections: Sequence[Section], keys: dict[int, str], home: dict[int, int]) -> None:
        """Edges to each box from what it reads, named where the maker has several results."""
        several = {v for s in sections for box in s.boxes if len(box.makes) > 1 for v in box.makes}
        for k, section in enumerate(sections):
            for j, box in enumerate(section.boxes):
                for v in box.reads:
                    tip = graphviz.escape(self.describe(v))
                    more = {"label": graphviz.escape(f" {self.g.names[v]}")} if v in several else {}
                    if home.get(v, k) != k:
                        more["weight"] = "0"  # else the blocks move aside for it
                    self.picture.edge(keys[v], self._key(k, j), tooltip=tip, labeltooltip=tip, **more)

    def _tops(self, sections: Sequence[Section], k: int, keys: dict[int, str], home: dict[int, int]) -> list[str]:
        """What stands at the top of section k, as far as nothing in the picture points to it."""
        before = {v for section in sections[:k] for box in section.boxes for v in box.reads}
        tops = []
        for j, box in enumerate(sections[k].boxes[:3]):  # what is further down follows by itself
            if not any(v in keys and home.get(v, k) == k for v in box.reads):
                tops.append(self._key(k, j))
            tops += [keys[v] for v in box.reads if v not in home and v not in before]
        return list(dict.fromkeys(tops))

    def _source(self, where: Any, key: str, v: int) -> None:
        source = self.g.sources.get(v)
        fill = SOURCES[source.kind] if source else DATA
        more = {} if source else {"style": "filled,dashed"}
        add_data(where, key, data_label(self.g.names[v], self.size(v)), self.describe(v), fill, **more)

    def _leave(self, where: Any, key: str, v: int) -> None:
        returned = v in self.g.outputs
        text = data_label(self.g.names[v], self.size(v), "returned" if returned else "read later")
        more = {"peripheries": "2"} if returned else {"style": "filled,dashed"}
        add_data(where, key, text, self.describe(v), OUTPUT, **more)

    def size(self, v: int) -> str:
        """Form and size of a value, "[2, 16, 32] 4.0 KiB", if known."""
        known = self.values.get(v)
        return f"{list(known.shape)} {format_bytes(known.bytes)}" if known else ""

    def describe(self, v: int) -> str:
        """The tooltip of a value."""
        known, source = self.values.get(v), self.g.sources.get(v)
        kind = f"{source.kind} " if source else ""
        form = f": {str(known.dtype)[6:]}{list(known.shape)}, {format_bytes(known.bytes)}" if known else ""
        return f"{kind}{self.g.names[v]}{form}"


def node_box(node: Node, program: Program, index: int) -> Box:
    """The box of one B or D node."""
    g = program.g
    results = ", ".join(g.names[v] for v in node.outputs if g.names[v] != node.name)
    sizes = [program.size(v) for v in node.outputs[:1]]
    style = "filled,rounded" if node.mode.grad else "filled,rounded,dashed"
    more = f"{len(node.outputs)} × " if len(node.outputs) > 1 and any(sizes) else ""
    return Box(
        label(node.name, results if len(results) < 40 else f"{len(node.outputs)} results", *(more + s for s in sizes)),
        program_text(g, [index]),
        node.reads(),
        node.outputs,
        FORWARD,
        style,
    )
