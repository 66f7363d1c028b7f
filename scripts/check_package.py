"""Install the wheel and the source distribution, each in a virtual environment of its own, and use them there.

    python scripts/check_package.py [dist]           with the dependencies of the environment that runs this
    python scripts/check_package.py [dist] --alone   with dependencies of their own, in the versions of constraints.txt

The second one takes minutes, and shows that nothing else is needed. All runs outside of the checkout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = ("rockmate", "rkgb", "solvers")

MODEL = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)), torch.ones(64, 8)
"""

DEMO = (
    "--layers 2 --width 32 --heads 2 --length 16 --batch 2 --vocabulary 64 --steps 1 --pairs 1 --budgets 90 "
    "--costs flops --device cpu"
)

WHERE = """
import importlib, importlib.metadata, pathlib, sys
import rockmate
for name in sys.argv[2:]:
    file = pathlib.Path(importlib.import_module(name).__file__).resolve()
    assert pathlib.Path(sys.prefix).resolve() in file.parents, f"{name} is {file}, which is not the one installed"
    assert (file.parent / "py.typed").is_file(), f"{name} has no py.typed"
assert importlib.metadata.version("rockmate") == rockmate.__version__ == sys.argv[1], rockmate.__version__
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    archives = sorted(p.resolve() for p in options.folder.iterdir() if p.suffix in (".whl", ".gz"))
    assert {p.suffix for p in archives} == {".gz", ".whl"} and len(archives) == 2, (
        f"{options.folder} has {archives}: run make package"
    )
    for archive in archives:
        with tempfile.TemporaryDirectory() as folder:
            check(archive, Path(folder), options.alone)
        print(f"{archive.name}: installed, and works")


def check(archive: Path, folder: Path, alone: bool) -> None:
    """Install ``archive`` in a virtual environment in ``folder``, and run it there."""
    check_contents(archive)
    environment = folder / "environment"
    venv.create(environment)
    binaries = environment / ("Scripts" if os.name == "nt" else "bin")
    install(archive, environment, alone)

    def run(*command: str) -> str:
        """What a command prints that runs in ``folder``; nothing of the checkout is in its way."""
        outside = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        outside["ROCKMATE_CACHE"] = "off"
        return subprocess.run(command, cwd=folder, env=outside, stdout=subprocess.PIPE, text=True, check=True).stdout

    version = archive.name.split("-")[1].removesuffix(".tar.gz")
    run(str(binaries / "python"), "-c", WHERE, version, *PACKAGES)
    rockmate = str(binaries / "rockmate")
    assert run(rockmate, "--version").split() == ["rockmate", version]
    (folder / "model.py").write_text(MODEL)
    assert '"supported": true' in run(rockmate, "check", "model.py:make", "--costs", "flops", "--json")
    if archive.suffix == ".whl":
        assert "yes" in run(rockmate, "demo", *DEMO.split())


def check_contents(archive: Path) -> None:
    """A wheel has the packages and what describes them, an archive of sources no tests."""
    if archive.suffix == ".whl":
        tops = {name.split("/")[0] for name in zipfile.ZipFile(archive).namelist()}
        described = {name for name in tops if name.endswith(".dist-info")}
        assert tops - described == set(PACKAGES) and len(described) == 1, f"{archive.name} has {sorted(tops)}"
    else:
        with tarfile.open(archive) as opened:
            tests = [name for name in opened.getnames() if "tests" in name.split("/")]
        assert not tests, f"{archive.name} has {tests[:3]}"


def install(archive: Path, environment: Path, alone: bool) -> None:
    """By the pip of this environment, which is quicker than to make one for each."""
    python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    if alone:
        pip += ["--constraint", str(ROOT / "constraints.txt"), f"{archive}[plot]"]
    else:
        # Whatever this environment has can be imported; of its .pth files none is read, so not an editable rockmate.
        paths = {name: Path(path) for name, path in sysconfig.get_paths().items()}
        site = environment / paths["purelib"].relative_to(Path(sys.prefix))
        (site / "beside.pth").write_text(f"{paths['purelib']}\n{paths['platlib']}\n")
        pip += ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed", str(archive)]
    subprocess.run(pip, check=True)


if __name__ == "__main__":
    main()
