"""Notebooks as pages of the site, by nbconvert: what is committed, with the outputs that it has. Nothing runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File
from nbconvert import MarkdownExporter

PICTURE = re.compile(r"^!\[\w+\]\((\S+)\)$", re.MULTILINE)
PRINTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
WIDEST = 124
"""Letters of a line of a printed table, with its indent; what is wider is a sentence."""

CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)

DOWNLOAD = '\n<a href="{0}" download>{0}</a>, the notebook itself\n'


def files_of(path: Path, config: Any) -> list[File]:
    """The page of the notebook ``path``, its pictures, and the notebook itself."""
    folder, name = path.parent.name, path.stem
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "image/svg+xml" in output.get("data", {}):  # a page shows them as files
                output.data.pop("text/plain", None)
    text, found = MarkdownExporter().from_notebook_node(notebook, {"output_files_dir": f"{name}_files"})
    text = PICTURE.sub(r"[![](\1)](\1)", "".join(_shown(part) for part in CODE.split(text)))
    made = [File.generated(config, f"{folder}/{name}.md", content=text + DOWNLOAD.format(path.name))]
    made += [File.generated(config, f"{folder}/{k}", content=v) for k, v in found.get("outputs", {}).items()]
    return [*made, File.generated(config, f"{folder}/{path.name}", abs_src_path=str(path))]


def _shown(part: str) -> str:
    """Text that a cell prints, which nbconvert indents, in a fence; ``part`` is such, or a fence of code."""
    return part if part.startswith("```") else PRINTED.sub(_fenced, part)


def _fenced(match: re.Match[str]) -> str:
    lines = match[0].rstrip().split("\n")
    if lines == [""]:
        return ""
    kind = ".text .printed .wrap" if max(map(len, lines)) > WIDEST else ".text .printed"
    return "\n".join([f"```{{{kind}}}", *(line.removeprefix("    ") for line in lines), "```", ""])
