"""Every script in examples/ runs, recomputes, and prints the same losses without the lines that name ``rockmate``, its
meter or its callback.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from programs import ROOT, load

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LIBRARIES = ("accelerate", "lightning", "peft", "torchvision", "transformers")
LINE = re.compile(r"^( *).*\b(?:rockmate|meter)\.\w+.*$", re.MULTILINE)
ARGUMENT = re.compile(r"^ *callbacks=\[RockmateCallback\(.*\)\],\n", re.MULTILINE)


def let_torchvision_be_imported() -> None:
    """Where its compiled operators do not load."""
    vision = sys.modules.get("vision") or load("tests/training/vision.py")  # as tests/training imports it
    vision.import_can_go_on()


def without_rockmate(source: str) -> str:
    """The script as it was before."""
    before, text, code = source.split('"""', 2)
    return '"""'.join((before, text, LINE.sub(r"\1pass", ARGUMENT.sub("", code))))


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    """accelerate has one state a process, which the next Accelerator would find."""
    yield
    if accelerate := sys.modules.get("accelerate"):
        accelerate.state.AcceleratorState._reset_state(True)


def run_here(source: str, path: Path) -> str:
    """What the script prints; warnings are errors."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, str(path), "exec"), {"__name__": "__main__"})
    if accelerate := sys.modules.get("accelerate"):
        accelerate.state.AcceleratorState._reset_state(True)
    return printed.getvalue()


def run_apart(source: str, path: Path, folder: Path) -> str:
    """What the script prints in a process of its own, as it starts others that import it."""
    copied = folder / path.name
    copied.write_text(source, encoding="utf-8")
    known = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, copied], check=False, env=known, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Warning:" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",  # asked by peft
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # TorchDynamo hides it, but not where it is an error
    "ignore:The 'train_dataloader' does not have many workers",
)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    for library in LIBRARIES:
        if re.search(rf"^(?:import| *from) {library}\b", source, re.MULTILINE):
            let_torchvision_be_imported()
            pytest.importorskip(library)
    apart = "multiprocessing.spawn" in source
    if apart and not dist.is_gloo_available():
        pytest.skip("needs gloo")
    assert LINE.search(source)
    printed = [
        run_apart(text, path, tmp_path) if apart else run_here(text, path)
        for text in (source, without_rockmate(source))
    ]
    losses = [re.findall(r"^loss (\S+)$", text, re.MULTILINE) for text in printed]
    assert len(losses[0]) > 2
    assert losses[0] == losses[1]
    assert "predicted peak" not in printed[1]
    overheads = re.findall(r"^predicted overhead +([\d.]+) %", printed[0], re.MULTILINE)
    assert any(float(found) for found in overheads), "the budget forces nothing"


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if "torchvision" in path.read_text(encoding="utf-8")], ids=lambda path: path.stem
)
def test_a_torchvision_that_does_not_fit_is_named(path: Path, tmp_path: Path) -> None:
    """Beside another build of torch its import fails, and that of libraries which import it names something else."""
    (tmp_path / "torchvision").mkdir()
    broken = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision" / "__init__.py").write_text(broken, encoding="utf-8")
    known = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, path], check=False, env=known, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert done.stderr == (
        "torchvision does not fit this torch (operator torchvision::nms does not exist): install both from one index\n"
    )
