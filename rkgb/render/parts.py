"""What every picture of a graph is made of: colours, labels, sizes and times, boxes and ellipses.

A box is a computation, an ellipse is data; a block is a frame, in the colour of its class. Graphviz's package is
imported when the first picture is made.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rkgb.graphs import B_graph, D_graph
from rkgb.listing import format_program

FORWARD, BACKWARD, CALM, DATA = "#d6e6f7", "#fbdcc4", "#e9e9e9", "#ffffff"
SOURCES = {"input": "#bfe6c2", "parameter": "#fff2b8", "buffer": "#ece0f5", "constant": "#ece0f5"}
OUTPUT, LOSS = "#bfe6c2", "#f6c6c6"
# Of the blocks of a class; further classes start again.
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


def colours_of(number: int) -> tuple[str, str]:
    return CLASSES[number % len(CLASSES)]


def counted(names: Iterable[str], limit: int = 4) -> str:
    """Names with their number: "view ×3, transpose", at most ``limit`` of them."""
    several = [f"{name} ×{n}" if n > 1 else name for name, n in Counter(names).items()]
    return ", ".join(several[:limit] + (["…"] if len(several) > limit else []))


def label(title: str, *lines: str) -> str:
    """A label: a bold title over small lines; empty lines are left out."""
    small = "".join(f'<BR/><FONT POINT-SIZE="9">{html.escape(line)}</FONT>' for line in lines if line)
    return f"<<B>{html.escape(title)}</B>{small}>"


def data_label(name: str, *lines: str) -> str:
    text = "<BR/>".join(html.escape(line) for line in (name, *lines) if line)
    return f'<<FONT POINT-SIZE="9">{text}</FONT>>'


def program_text(g: B_graph | D_graph, ops: Iterable[int]) -> str:
    """The assignments ``ops`` of the program, each with the user's source line, for a tooltip."""
    values = g.values if isinstance(g, D_graph) else None
    return format_program(g.names, tuple(g.nodes[k] for k in ops), (), values).rpartition("\n")[0]


def tip(text: str) -> str:
    """``text`` as a tooltip of at most 25 lines, each of at most 200 characters. Graphviz refuses long ones."""
    lines = [line if len(line) <= 200 else f"{line[:200]} …" for line in text.splitlines()]
    more = [f"… and {len(lines) - 25} more"] if len(lines) > 25 else []
    return escaped("\n".join(lines[:25] + more))


def escaped(text: str) -> str:
    """``text`` as a label that shows it as it is."""
    from graphviz import escape

    return str(escape(text))


def _wrapped(legend: str, width: int = 72) -> list[str]:
    """The parts of a legend, separated by " · ", in lines: a legend must not widen a small picture."""
    lines: list[str] = []
    for part in legend.split(" · "):
        if lines and len(lines[-1]) + len(part) < width:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return lines


def new_picture(title: str, legend: str, colours: Sequence[tuple[str, str]] = ()) -> Any:
    """An empty picture with a title and an explanation at its top; ``colours``: what each one means."""
    from graphviz import Digraph

    picture = Digraph()
    text = f'<FONT POINT-SIZE="16"><B>{html.escape(title)}</B></FONT>'
    explained = "<BR/>".join(html.escape(line) for line in _wrapped(legend))
    cells = "".join(f'<TD BORDER="1" BGCOLOR="{colour}">{html.escape(means)}</TD>' for colour, means in colours)
    rows = f'<TR><TD COLSPAN="{len(colours)}">{text}<BR/>{explained}</TD></TR><TR>{cells}</TR>'
    table = f'<TABLE BORDER="0" CELLSPACING="4" CELLPADDING="4">{rows}</TABLE>'
    picture.attr(
        "graph",
        label=f"<{table}>" if colours else f"<{text}<BR/>{explained}<BR/> >",
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


def new_block(name: str, title: str, number: int, *lines: str) -> Any:
    """The frame of a block of class ``number``; to be filled, then given to ``picture.subgraph``.

    ``lines`` stand below its title, where they are not empty.
    """
    from graphviz import Digraph

    frame, background = colours_of(number)
    small = "".join(f'<FONT POINT-SIZE="9">{html.escape(line)}</FONT><BR ALIGN="LEFT"/>' for line in lines if line)
    text = f"<B>{html.escape(title)}</B>" + (f'<BR ALIGN="LEFT"/>{small}' if small else "")
    block = Digraph(f"cluster_{name}")
    block.attr("graph", label=f"<{text}>", labeljust="l", style="rounded,filled", penwidth="1.5")
    block.attr("graph", color=frame, fontcolor=frame, fillcolor=background, margin="12", peripheries="1")
    block.attr("graph", tooltip=escaped(title))
    return block


def chain_frame(span: tuple[int, int], blocks: int, title: str = "the chain of blocks") -> Any:
    """The frame of a part of the chain: ``span`` of ``blocks`` blocks."""
    start, stop = span
    which = "" if stop - start == blocks else f": {start} to {stop - 1} of 0 to {blocks - 1}"
    return new_block(f"chain{start}", title + which, len(CLASSES) - 1)


def add_box(picture: Any, key: str, text: str, tooltip: str, fill: str, **more: str) -> None:
    """Add the box of a computation."""
    picture.node(key, text, fillcolor=fill, tooltip=tip(tooltip), **more)


def add_data(picture: Any, key: str, text: str, tooltip: str, fill: str, **more: str) -> None:
    """Add the ellipse of a datum."""
    form = {"shape": "ellipse", "style": "filled", "margin": "0.02"} | more
    picture.node(key, text, fillcolor=fill, tooltip=tip(tooltip), **form)


def put_below(picture: Any, above: str, tops: Iterable[str], weight: int = 1) -> None:
    """Place the boxes ``tops``, with all that follows them, below the box ``above``; straight, unless of no weight."""
    for key in tops:
        picture.edge(above, key, style="invis", weight=str(weight))
