"""The notebooks run from their first cell to their last, and what is committed is what they show."""

from __future__ import annotations

import copy
import os
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "test_rkgb.ipynb"
ROTOR = ROOT / "notebooks" / "rotor.ipynb"
TRAIN = ROOT / "notebooks" / "train_under_a_budget.ipynb"
CHOOSE = ROOT / "notebooks" / "choosing_a_budget.ipynb"
EVERY = (TRAIN, CHOOSE, NOTEBOOK, ROTOR)


def executed(notebook: NotebookNode) -> NotebookNode:
    """A copy with the outputs of a fresh kernel."""
    fresh = copy.deepcopy(notebook)
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    client = NotebookClient(fresh, timeout=300, kernel_name="python3", resources=where, record_timing=False)
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"})
    fresh.metadata["language_info"] = {"name": "python"}
    return fresh


def printed(cell: NotebookNode) -> str:
    """What a cell printed, without the cells that say that their figures vary; plans are told of on stderr."""
    if "varies" in cell.metadata.get("tags", ()):
        return ""
    return "".join(
        output.text for output in cell.get("outputs", ()) if output.output_type == "stream" and output.name == "stdout"
    )


def kinds(cell: NotebookNode) -> list[list[str]]:
    """In which forms a cell shows its results."""
    return [sorted(output.data) for output in cell.get("outputs", ()) if "data" in output]


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_notebook_shows_what_the_code_makes(path: Path) -> None:
    committed = nbformat.read(path, as_version=4)
    fresh = executed(committed)
    if os.environ.get("ROCKMATE_UPDATE") == "1":
        nbformat.write(fresh, path)
        return
    for known, now in zip(committed.cells, fresh.cells, strict=True):
        assert printed(known) == printed(now), "run again with ROCKMATE_UPDATE=1 if the change is meant, and look at it"
        if shutil.which("dot"):
            assert kinds(known) == kinds(now)


def test_notebook_has_the_pictures_of_every_model() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    shown = [cell for cell in notebook.cells if any("image/svg+xml" in forms for forms in kinds(cell))]
    assert len(shown) >= 11
    for model in ("GPT2LMHeadModel(", "resnet101(", "regnet_x_3_2gf(", "mixer_s32_224", "nn.Transformer("):
        assert any(model in cell.source for cell in shown), f"no picture of {model}"
    assert any("image/png" in forms for cell in notebook.cells for forms in kinds(cell))
    assert not [cell for cell in notebook.cells for output in cell.get("outputs", ()) if output.get("name") == "stderr"]


def test_rotor_notebook_has_its_parts_in_order_and_a_picture() -> None:
    notebook = nbformat.read(ROTOR, as_version=4)
    nbformat.validate(notebook)
    titles = [
        line[3:]
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
        if line.startswith("## ")
    ]
    assert titles == [
        "The training loop",
        "The simple usage",
        "Measuring",
        "The computed sequence",
        "Limits",
        "Sequentialisation",
        "In-place operations",
    ]
    assert any("image/png" in forms for cell in notebook.cells for forms in kinds(cell))
    assert all(cell.outputs for cell in notebook.cells if cell.cell_type == "code" and "print(" in cell.source)
    assert not [cell for cell in notebook.cells for output in cell.get("outputs", ()) if output.get("name") == "stderr"]


@pytest.mark.parametrize("path", [TRAIN, CHOOSE], ids=lambda path: path.stem)
def test_notebooks_about_budgets_show_the_curve_the_plan_and_the_memory(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for call, form in ((".picture()", "image/svg+xml"), ("curve.plot(", "image/png"), (".plot_memory(", "image/png")):
        shown = [form in forms for cell in code for forms in kinds(cell) if call in cell.source]
        assert shown and all(shown), call
    told = [o.text for cell in code for o in cell.outputs if o.get("name") == "stderr"]
    assert all(line.startswith("rockmate: ") for text in told for line in text.splitlines())


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_what_is_committed_is_small_and_says_nothing_of_the_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < 320_000
    assert not re.findall(r"/(?:tmp|home|root|Users|work)/|ipykernel_\d|site-packages", text)


def test_links_between_notebooks_lead_somewhere() -> None:
    for path in EVERY:
        for link in re.findall(r"\]\(([\w.]+\.ipynb)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
