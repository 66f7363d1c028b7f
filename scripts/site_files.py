"""MkDocs hook: files of the repository that pages of ``docs/`` link to become files of the site.

A link such as ``../ARCHITECTURE.md`` leads somewhere on a code host, but not in the site, which is built from ``docs/``
alone. So each such file is copied: Markdown and notebooks as pages, all else as it is. A link to a file that does not
exist is left as it is, and the strict build fails at it. The site has the version of ``pyproject.toml``, and its
repository where that names one.
"""

from __future__ import annotations

import posixpath
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, str(Path(__file__).parent))  # hooks are loaded by path
from site_notebooks import files_of

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
HOME = {"README.md": "index.md"}
"""What has another page in the site."""


def on_config(config: Any) -> Any:
    """The version and the repository, which ``pyproject.toml`` has."""
    project = tomllib.loads(_text("pyproject.toml"))["project"]
    config.site_name = f"{config.site_name} {project['version']}"
    config.repo_url = project.get("urls", {}).get("Repository")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to, and what the pages added thereby link to."""
    pages = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    pages += [(name, _text(name)) for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    added = {name: None for name, _ in pages if not name.startswith("docs/")}
    for page, text in pages:
        for _, link, _ in LINK.findall(text):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
            known = path in added or path in HOME or path.startswith(("docs/", ".."))
            if not known and (ROOT / path).is_file():
                added[path] = None
                if path.endswith(".md"):
                    pages.append((path, _text(path)))
    listed = {"ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"}
    for path in added:
        if path.endswith(".ipynb"):
            for file in files_of(ROOT / path, config):
                files.append(file)
            continue
        level = InclusionLevel.INCLUDED if path in listed else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as they are in the site: ``docs/`` and the repository's root are one folder there."""
    own = page.file.src_uri
    source = f"docs/{own}" if (ROOT / "docs" / own).is_file() else own
    here = posixpath.dirname(own)

    def there(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        path = HOME.get(path, path.removeprefix("docs/"))
        if not _exists(path):
            return match[0]
        page = re.sub(r"\.ipynb$", ".md", path)
        return f"{match[1]}{posixpath.relpath(page, here or '.')}{match[3]}"

    return LINK.sub(there, markdown)


def _exists(path: str) -> bool:
    return (ROOT / "docs" / path).is_file() or (ROOT / path).is_file()


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
