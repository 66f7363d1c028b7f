"""The documents tell the truth: examples run, generated parts are up to date, names and links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import tomllib
from decimal import ROUND_HALF_UP, Decimal
from types import ModuleType

import pytest
import yaml
from programs import ROOT, load

from solvers import Problem
from solvers.block import ilp_model
from solvers.block.block import block_view
from solvers.solve import KINDS
from solvers.whole import relaxation

PAGES = sorted(ROOT.glob("docs/**/*.md"))
ROOMS = ("rkgb/README.md", "solvers/README.md", "rockmate/README.md")
DOCUMENTS = [*(str(path.relative_to(ROOT)) for path in (*sorted(ROOT.glob("*.md")), *PAGES)), *ROOMS]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def section(document: str, title: str) -> str:
    """What stands between the heading ``title`` and the next one of its level."""
    return re.split(r"^## ", document.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def anchors(document: str) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


@pytest.fixture(scope="module")
def architecture() -> ModuleType:
    return load("scripts/architecture.py")


def test_architecture_shows_what_the_code_makes(architecture: ModuleType, request: pytest.FixtureRequest) -> None:
    document = read("ARCHITECTURE.md")
    made = architecture.fill(document)
    if os.environ.get("ROCKMATE_UPDATE") == "1" or request.config.getoption("--update-golden", default=False):
        architecture.DOCUMENT.write_text(made, encoding="utf-8")
    else:
        assert document == made, "run again with ROCKMATE_UPDATE=1 if the change is meant, and read the difference"


def test_equations_have_the_names_of_the_constraints(architecture: ModuleType) -> None:
    text = section(read("solvers/README.md"), "The integer program of a block")
    equations = re.findall(r"^    \((\d+)\)  (\w+)", text, re.MULTILINE)
    assert [int(number) for number, _ in equations] == list(range(1, len(equations) + 1))
    names = {name for _, name in equations}
    assert ilp_model.__doc__
    stated = ilp_model.__doc__.split("Constraints, by the names they have in the model::")[1].split("Source:")[0]
    assert names == set(re.findall(r"^    (\w+)(?:\[[\w,]+\])?  ", stated, re.MULTILINE))
    problem = architecture.make_plan().problem
    model = ilp_model.StagedModel(block_view(problem, problem.blocks[0]))
    assert {row.split("_")[0] for row in model.lp.rows} <= names


def test_equations_of_whole_graphs_are_those_of_their_module() -> None:
    text = section(read("solvers/README.md"), "The program of a whole graph")
    equations = re.findall(r"^    \((\d+)\)  (\w+)", text, re.MULTILINE)
    assert [int(number) for number, _ in equations] == list(range(1, len(equations) + 1))
    assert relaxation.__doc__
    stated = relaxation.__doc__.split("minimise")[1].split("Every schedule")[0]
    assert [name for _, name in equations] == re.findall(r"^    (\w+)  ", stated, re.MULTILINE)


def test_files_named_in_architecture_exist() -> None:
    pages = "".join(read(name) for name in ("ARCHITECTURE.md", *ROOMS))
    named = set(re.findall(r"`((?:rkgb|solvers|rockmate|scripts|tests)/[\w/]*(?:\.py)?)`", pages))
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_stages_name_every_file_between_module_and_schedule() -> None:
    table = section(read("ARCHITECTURE.md"), "Stages")
    assert re.search(r"^\| stage \| file \| input → output \| invariant \|$", table, re.MULTILINE)
    stages = re.findall(r"^\| \w+ \| `.*", table, re.MULTILINE)
    assert len(stages) == 16 and all("→" in stage for stage in stages)
    tools = {f"rkgb/{path.name}" for path in (ROOT / "rkgb").glob("*tools.py")}
    assert {path for path in tools if f"`{path}`" not in table} == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = re.sub(r"^ *```.*?```|^    .*?$|`[^`\n]*`", "", read(document), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)
    for link in (link for link in links if not re.match(r"\w+:", link)):
        path, _, anchor = link.partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), f"{document} links to {link}"
        made = "docs/api" in str(target.resolve())  # headings that mkdocstrings makes: `make docs` checks these
        assert not anchor or made or anchor in anchors(target.read_text(encoding="utf-8")), (
            f"{document} links to {link}"
        )


def test_example_of_readme() -> None:
    assert re.search(r"^predicted peak  ", run_examples("README.md"), re.MULTILINE)


@pytest.mark.parametrize(
    "document", [name for name in DOCUMENTS if name.startswith("docs/") and "```python\n" in read(name)]
)
def test_examples_of_the_documentation(document: str) -> None:
    known = dict(KINDS[Problem].solvers)
    try:
        assert run_examples(document)
    finally:
        KINDS[Problem].solvers.clear()
        KINDS[Problem].solvers.update(known)


@pytest.mark.parametrize("document", ["docs/plan.md", "docs/estimate.md", "docs/budget.md"])
def test_pages_show_what_their_example_prints(document: str) -> None:
    shown = re.search(r"```text\n(.*?)```", read(document), re.DOTALL)
    assert shown
    printed = run_examples(document)
    timed = re.compile(r"^set-up .*$", re.MULTILINE)
    words = timed.sub("", shown[1]).split()
    assert words == timed.sub("", printed).split()[: len(words)]


def run_examples(document: str) -> str:
    """What the blocks of a page print, one after the other. Those that need a library, a GPU or a file of the reader's
    are marked ``py`` instead of ``python``, and do not run.
    """
    names: dict[str, object] = {"__name__": "example"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for example in re.findall(r"```python\n(.*?)```", read(document), re.DOTALL):
            exec(compile(example, document, "exec"), names)
    return printed.getvalue()


def test_every_error_has_an_entry() -> None:
    documented = set(re.findall(r"^### (\w+)$", read("docs/errors.md"), re.MULTILINE))
    raised: set[str] = set()
    for package in ("rockmate", "rkgb", "solvers"):
        module = importlib.import_module(f"{package}.errors")
        classes = inspect.getmembers(module, inspect.isclass)
        raised |= {name for name, c in classes if issubclass(c, Exception) and c.__module__ == module.__name__}
    assert documented == raised


def test_messages_are_those_of_the_code() -> None:
    """Between words in italics, which stand for names and numbers, each is a part of a text in the sources."""
    texts: set[str] = set()
    for path in (p for package in ("rockmate", "rkgb", "solvers") for p in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
                texts.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
    page = read("docs/errors.md").split("\n## When there is no error\n")[0]
    rows = [row for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) if row != "message"]
    assert len(rows) > 40
    said = [(row, part.strip(' :,"')) for row in rows for part in re.split(r"\*[^*]*\*|…|/", row)]
    assert [row for row, part in said if len(part) > 7 and not any(part in text for text in texts)] == []


@pytest.mark.parametrize("package", ["rockmate", "rkgb", "solvers"])
def test_every_exported_name_is_in_the_reference(package: str) -> None:
    page = read(f"docs/api/{package}.md")
    assert [name for name in importlib.import_module(package).__all__ if not re.search(rf"\b{name}\b", page)] == []


def test_equations_of_the_solver_guide_are_those_of_the_architecture() -> None:
    written = re.findall(r"^ *(\(\d+\) .*|minimise .*)$", read("docs/solvers.md"), re.MULTILINE)
    assert len(written) > 20
    assert written == [
        line
        for title in (
            "The integer program of a block",
            "The dynamic program over blocks",
            "The program of a whole graph",
        )
        for line in re.findall(
            r"^    (\(\d+\) .*|minimise .*)$", section(read("solvers/README.md"), title), re.MULTILINE
        )
    ]


def test_recipes_are_parts_of_the_examples() -> None:
    page = read("docs/scripts.md")
    recipes = re.findall(r"^```py\n((?:(?!```).*\n)+)```\n\nThe whole script: \[(\w+\.py)\]", page, re.MULTILINE)
    examples = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert sorted(name for _, name in recipes) == examples
    assert sorted(set(re.findall(r"\(examples/(\w+\.py)\)", read("README.md")))) == examples
    for lines, name in recipes:
        source = {line.strip() for line in read(f"examples/{name}").splitlines()}
        assert [line for line in lines.splitlines() if line.strip() not in source] == []


def tables(document: str, *titles: str) -> list[list[str]]:
    """The rows of each table of ``document`` whose titles are ``titles``."""
    head = re.escape(f"| {' | '.join(titles)} |\n") + r"\|[-|]+\|\n"
    found = re.findall(rf"^{head}((?:\|.*\n)+)", read(document), re.MULTILINE)
    assert found, f"{document} has no such table"
    return [re.split(r" *\| *", row.strip("| ")) for rows in found for row in rows.splitlines()]


def rounded(figure: float) -> str:
    """To two places, as people round, of the decimal number that was written."""
    return str(Decimal(str(figure)).quantize(Decimal("0.01"), ROUND_HALF_UP))


@pytest.mark.parametrize("document", ["README.md", "docs/index.md", "docs/gpu.md"])
def test_times_on_a_gpu_are_those_of_the_results(document: str) -> None:
    rows = [json.loads(line) for line in read("benchmarks/results/gpu.jsonl").splitlines()]
    timed = [row["row"] for row in rows if row.get("section") == "time" and "method" in row["row"]]
    plain = {row["case"]: row for row in timed if row["method"] == "eager"}
    known = {row["case"]: row for row in timed if row["method"] == "checkpoint every block"}
    names = {"GPT-2": "gpt", "Llama": "llama", "ViT-L": "vit", "U-Net": "unet", "ResNet-50": "resnet50"}
    head = ("model", "peak of eager", "peak with every block checkpointed", "its time", "Rockmate's time")
    shown = tables(document, *head)
    assert {names[row[0].split(",")[0]] for row in shown} == set(known)  # none is left out
    for model, eager, least, its, ours in shown:
        case = names[model.split(",")[0]]
        row, size = known[case], plain[case]
        assert (eager, least) == tuple(f"{found['peak_bytes'] / 2**30:.1f} GiB" for found in (size, row))
        assert (its, ours) == tuple(rounded(row[name]) for name in ("time_of_eager", "our_time_of_eager"))
        if "," in model:
            assert model.endswith(f", {round(size['parameters'] / 1e6)} million parameters")


@pytest.mark.parametrize("document", ["README.md", "docs/index.md"])
def test_times_beside_peers_are_those_of_their_page(document: str) -> None:
    known = re.findall(r"^\| (.*?) \| (.*?) \| (\S+) \| (\S+) \(.*?\) \| (\S+) \(", read("docs/peers.md"), re.MULTILINE)
    shown = tables(document, "model", "method", "peak, of eager's", "its time", "Rockmate's time")
    assert [row for row in shown if tuple(row) not in known] == []


def test_costs_on_the_first_page_are_those_of_the_readme() -> None:
    head = "budget (of eager mode's peak)", "predicted peak", "measured peak", "predicted extra time"
    known = {budget: peak for budget, _, peak, _ in tables("README.md", *head)}
    times = {row["percent"]: row["measured"] for row in json.loads(read("benchmarks/results/overhead.json"))}
    head = "budget", "of eager's peak", "measured peak", "extra time, measured"
    for budget, share, peak, time in tables("docs/index.md", *head):
        assert known[f"{budget} ({share})"] == peak
        assert time == f"{100 * times[int(share.split()[0])]:.1f} %"


def test_the_citation_is_of_this_version() -> None:
    """What the Citation File Format 1.2.0 requires, and what the project says of itself."""
    known = yaml.safe_load(read("CITATION.cff"))
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert known["cff-version"] == "1.2.0" and known["message"]
    assert (known["version"], known["license"]) == (project["version"], project["license"])
    assert known["title"].lower() == project["name"]
    assert [person["name"] for person in known["authors"]] == [person["name"] for person in project["authors"]]
    assert {word.lower() for word in known["keywords"]} == set(project["keywords"])
    allowed = {"conference-paper", "report", "article", "software"}
    for work in known["references"]:
        assert work["type"] in allowed and work["title"] and isinstance(work["year"], int)
        assert all(person["family-names"] and person["given-names"] for person in work["authors"])
