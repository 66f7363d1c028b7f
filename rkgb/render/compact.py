"""An SVG of Graphviz' in fewer letters: notebooks keep pictures in their files."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_EDGE = re.compile(
    r'<g id="edge\d+" class="edge"><path fill="none" (stroke="[^"]*"[^>]*?) d="([^"]*)"/>'
    r'(?:<polygon (fill="[^"]*" stroke="[^"]*"[^>]*?) points="([^"]*)"/>)?((?:<text [^>]*>[^<]*</text>)*)</g>'
)
_ROUNDED = 25
"""Points of Graphviz' path around a rounded box: four sides and four corners as curves, and where they begin."""


def compact(svg: str) -> str:
    """The same picture: its texts, tooltips, boxes and lines; places are rounded to a tenth of a point.

    Names of nodes go, which only Graphviz' own scripts read. Rounded boxes become rectangles. Edges without a tooltip
    become one path for each look, and lie above the boxes. What most texts have is said once.
    """
    svg = re.sub(r"<!--.*?-->\n?|<title>.*?</title>\n?", "", svg, flags=re.DOTALL)
    svg = re.sub(r">\n+<", "><", svg)
    svg = _edges_together(svg)
    svg = re.sub(r'<path ([^>]*?) d="([^"]*)"/>', _rectangle, svg)
    svg = re.sub(
        r' (?:points|d|x|y|c[xy]|r[xy]|width|height)="[^"]*"', lambda found: _NUMBER.sub(_tenths, found[0]), svg
    )
    svg = re.sub(r'<g id="(?!graph)[^"]*"(?: class="[^"]*")?>', "<g>", svg)
    svg = re.sub(r"<g><a [^>]*></a></g>", "", svg)  # frames that only say where their contents stand
    svg = re.sub(r"<g><g>(<a (?:(?!</a>).)*</a>)</g></g>", r"\1", svg)
    svg = svg.replace("<g></g>", "").replace(' text-anchor="start"', "")
    for name in ("font-family", "font-size"):
        for most, _ in Counter(re.findall(f' {name}="[^"]*"', svg)).most_common(1):
            svg = svg.replace(most, "").replace("<svg", f"<svg{most}", 1)
    return svg


def _edges_together(svg: str) -> str:
    """Edges without a tooltip as one path for those of one look, behind all else; their labels stay where they are."""
    lines: dict[str, list[str]] = defaultdict(list)
    for stroke, line, fill, head, _ in _EDGE.findall(svg):
        lines[f'fill="none" {stroke}'].append(_relative(line, "c"))
        if head:
            lines[fill].append(_relative(head, "l") + "z")
    paths = "".join(f'<path {look} d="{"".join(drawn)}"/>' for look, drawn in lines.items())
    return _EDGE.sub(r"\5", svg).replace("</g></svg>", f"{paths}</g></svg>")


def _relative(line: str, command: str) -> str:
    """The points of a line as differences: ``command`` is "c" of curves, each relative to where it begins, or "l"."""
    numbers = [round(10 * float(n)) for n in _NUMBER.findall(line)]
    points = list(zip(numbers[::2], numbers[1::2], strict=True))
    each = 3 if command == "c" else 1
    starts = (points[k // each * each] for k in range(len(points) - 1))
    steps = (f"{(x - a) / 10:g},{(y - b) / 10:g}" for (x, y), (a, b) in zip(points[1:], starts, strict=True))
    x, y = points[0]
    return f"M{x / 10:g},{y / 10:g}{command}{' '.join(steps)}"


def _rectangle(path: re.Match[str]) -> str:
    """A path around a rounded box as a rectangle; any other as it is."""
    numbers = [float(n) for n in _NUMBER.findall(path[2])]
    xs, ys = numbers[::2], numbers[1::2]
    if len(xs) != _ROUNDED or (xs[0], ys[0]) != (xs[-1], ys[-1]):
        return path[0]
    left, top = min(xs), min(ys)
    size = f'width="{max(xs) - left}" height="{max(ys) - top}" rx="{abs(xs[6] - xs[3])}"'  # a side, then a corner
    return f'<rect {path[1]} x="{left}" y="{top}" {size}/>'


def _tenths(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), 1):g}"
