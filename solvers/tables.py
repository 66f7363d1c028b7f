"""Tables, as text and as HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence

Rows = Sequence[Sequence[str]]
"""Rows of cells; the first row has the titles of the columns."""


def text_table(rows: Rows, left: Sequence[int] = ()) -> str:
    """The table as lines of text, columns to the right; ``left``: numbers of the columns that begin at the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def cell(text: str, k: int) -> str:
        return text.ljust(widths[k]) if k in left else text.rjust(widths[k])

    return "\n".join("  ".join(cell(text, k) for k, text in enumerate(row)).rstrip() for row in rows)


def html_table(rows: Rows, left: Sequence[int] = ()) -> str:
    """The table as HTML. Names of the user's may contain anything: all cells are escaped."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in rows[0])
    body = "".join(f"<tr>{''.join(_cell(text, k in left) for k, text in enumerate(row))}</tr>" for row in rows[1:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_facts(facts: Sequence[tuple[str, str]]) -> str:
    """Names and what is said of each, as an HTML table without titles."""
    rows = "".join(f"<tr>{_title(name)}{_cell(text, True)}</tr>" for name, text in facts)
    return f"<table><tbody>{rows}</tbody></table>"


def _title(text: str) -> str:
    return f'<th style="text-align: left">{html.escape(text)}</th>'


def _cell(text: str, left: bool) -> str:
    return f'<td style="text-align: {"left" if left else "right"}">{html.escape(text)}</td>'
