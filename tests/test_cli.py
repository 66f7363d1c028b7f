"""The command line: what it answers, as text and as JSON, its exit codes, and what it says of misuse."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rockmate
from rkgb.device import Cpu
from rockmate import Rockmate, frontier, progress
from rockmate.cli import answers, main

ROOT = Path(__file__).resolve().parent.parent

FILE = '''
import random, sys
from collections import UserDict
import torch
from torch import nn

ARGUMENTS = sys.argv[1:]

def net(layers=3):
    torch.manual_seed(0)
    return nn.Sequential(*(l for _ in range(layers) for l in (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))))

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
    def forward(self, x, scale=None):
        return self.net(x) if scale is None else self.net(x) * scale

class Takes(Scaled):
    """Takes numbers from an iterator, which cannot be put back, and is no one graph."""
    def __init__(self):
        super().__init__()
        self.taken = iter(range(1000))
    def forward(self, x):
        return self.net(x) * (next(self.taken) + random.random())

class Drops(nn.Module):
    """Layers of which Python's random numbers leave some out: no one graph."""
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(net(1) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            if random.random() < 2:
                x = layer(x)
        return x

class Looks(nn.Module):
    """Looks at values between layers, so that it is followed."""
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(net(1) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
            if torch.isnan(x).any():
                raise ValueError("nan")
        return x

X = torch.ones(256, 16)
NET = net()

def looks():
    return Looks(), X

def make(): return net(), X
def pair(): return Scaled(), (X, torch.ones(16))
def named(): return Scaled(), UserDict(x=X, scale=torch.ones(16))
def keywords(): return Scaled(), [X], {"scale": torch.ones(16)}
def small(): return net(), X[:8]
def talks():
    print("building")
    return net(), X
def takes(): return Takes(), X
def drops(): return Drops(), X
def arguments(): return ARGUMENTS or make()

def needs(batch): return net(), X[:batch]
def fails(): return inner()
def inner(): raise RuntimeError("no weights") from KeyError("layer")
def ends(): sys.exit("done")
def nothing(): pass
def alone(): return net()
def swapped(): return X, net()
def no_sample(): return net(), None
def flat(): return Scaled(), X, torch.ones(16)
def four(): return net(), X, {}, {}
def wrong(): return net(), torch.ones(4, 3)
def frozen(): return net().requires_grad_(False), X
def meta():
    with torch.device("meta"):
        return net(), X
def wide(): return nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 512)), torch.ones(8, 64, dtype=torch.long)
def heavy():
    wide = (nn.Linear(256, 256) for _ in range(6))
    return nn.Sequential(*wide, nn.GELU(), nn.Linear(256, 8)), torch.ones(256, 256)
'''


class Result(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def values(self) -> dict[str, Any]:
        """The object that was printed."""
        found: dict[str, Any] = json.loads(self.out)
        return found


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command in a folder that has ``model.py``."""
    (tmp_path / "model.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(progress, "DELAY", 1e6)
    before = set(sys.modules)

    def run(*arguments: str) -> Result:
        code = main(list(arguments))
        return Result(code, *capsys.readouterr())

    yield run
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("command", ["check", "frontier", "estimate"])
def test_where_there_is_no_terminal_a_line_says_that_a_command_works(
    command: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "DELAY", -1.0)
    done = run(command, "model.py:small", *(("--sizes", "32") if command == "estimate" else ("--costs", "flops")))
    assert (done.code, done.err) == (0, f"rockmate {command}: planning takes some time\n")


# ------------------------------------------------------------------------------------------------- answers


def test_check_says_what_there_is_to_gain(run: Run) -> None:
    done = run("check", "model.py:make", "--costs", "flops")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "model               Sequential: 6,384 parameters, 24.9 KiB, on cpu"
    assert lines[1:4] == [
        "inputs              input float32[256, 16]",
        "mode                train, no autocast",
        "supported           yes",
    ]
    assert "  budget  of eager's peak  extra time" in done.out
    curve = frontier(*sys.modules["model"].make(), costs="flops")
    cheap = [f"{100 * share:.0f}%" for _, share, overhead in curve.table() if 0 < overhead <= 0.1]
    assert f'rockmate.attach(model, "{cheap[-1]}")' in done.out
    assert done.out.endswith(f'rockmate plan model.py:make --budget "{cheap[-1]}"\n')


def test_the_documentation_shows_what_check_prints(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of 2 GiB, of which other programs have 500 MiB."""
    monkeypatch.setattr(Cpu, "total", lambda self, device: 2**31)
    monkeypatch.setattr(Cpu, "free", lambda self, device: 2**31 - 500 * 2**20)
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    (code,), (shown, *_) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("py", "text"))
    (tmp_path / "model.py").write_text(code)
    assert run("check", "model.py:make", "--costs", "flops").out == shown


def test_check_as_json_has_the_figures_of_the_library(run: Run) -> None:
    done = run("check", "model.py:talks", "--costs", "flops", "--json")
    assert done.code == 0 and done.err == "building\n"
    module = sys.modules["model"]
    curve = frontier(*module.make(), costs="flops")
    found = done.values
    assert (found["supported"], found["error"], found["model"]) == (True, None, "Sequential")
    assert found["calls"] == [["input float32[256, 16]", "train"]]
    assert (found["min_budget"], found["max_budget"]) == (curve.min_budget, curve.max_budget)
    assert [(p["budget"], p["share"], p["overhead"]) for p in found["points"]] == curve.table()
    assert found["eager_peak"] == Rockmate(*module.make(), "100%", costs="flops").plan.predicted_peak
    memory = found["memory"]
    assert memory["parameters"] == memory["gradients"] == memory["optimizer"] // 2 == found["parameter_bytes"]
    assert memory["total"] == sum(size for name, size in memory.items() if name not in ("device", "total"))


@pytest.mark.parametrize("function", ["pair", "named", "keywords"])
def test_samples_of_all_forms(run: Run, function: str) -> None:
    done = run("check", f"model.py:{function}", "--costs", "flops", "--json")
    ((*inputs, mode),) = done.values["calls"]
    assert sorted(inputs) == ["scale float32[16]", "x float32[256, 16]"] and mode == "train"


def test_check_of_a_model_that_is_not_supported(run: Run) -> None:
    done = run("check", "model.py:takes")
    assert done.code == 1
    assert "supported           no\n\nUnsupportedError: the attribute taken is an iterator or a queue" in done.out
    found = run("check", "model.py:takes", "--json")
    assert found.code == 1 and found.values["supported"] is False
    assert found.values["error"]["type"] == "UnsupportedError"


def test_a_model_that_is_followed_is_trained_for_some_steps(run: Run) -> None:
    done = run("check", "model.py:drops", "--costs", "flops")
    assert done.code == 0
    assert "supported           yes, followed operation by operation" in done.out
    done = run("plan", "model.py:drops", "--costs", "flops", "--budget", "70%", "--json", "--program")
    assert done.code == 0 and done.values["calls"] == [["x float32[256, 16]", "train"]]
    assert done.values["predicted_peak"] <= done.values["budget"] < done.values["eager_peak"]
    assert done.values["program"].count("def step():") == 1
    done = run("plan", "model.py:drops", "--costs", "flops", "--budget", "70%", "--save", "plan.json")
    assert done.code == 2 and "the plan was not saved: the model is not captured as one graph" in done.err
    done = run("plan", "model.py:drops", "--costs", "flops", "--budget", "1%")
    assert done.code == 1 and "no plan fits a budget of" in done.err


def test_check_gives_the_figures_of_attach_where_a_model_is_followed(run: Run) -> None:
    found = run("check", "model.py:looks", "--costs", "flops", "--json").values
    model, x = sys.modules["model"].looks()
    handle = rockmate.attach(model, found["min_budget"], costs="flops")
    for _ in range(4):
        model.zero_grad()
        model(x).mean().backward()
    assert handle.frontier().min_budget <= found["min_budget"] < found["eager_peak"]
    assert "followed" in run("check", "model.py:looks", "--costs", "flops").out
    assert run("plan", "model.py:looks", "--costs", "flops", "--budget", "90%", "--save", "plan.json").code == 2


def test_plan_is_saved_and_runs(run: Run, tmp_path: Path) -> None:
    done = run("plan", "model.py:make", "--costs", "flops", "--budget", "60%", "--save", "plan.json", "--program")
    assert done.code == 0
    assert done.out.startswith("inputs              input float32[256, 16]\n")
    assert "\nsaved in plan.json: rockmate.Rockmate(model, sample, plan='plan.json')\n" in done.out
    assert "def step():" in done.out and "recompute" in done.out
    model, sample = sys.modules["model"].make()
    rk = Rockmate(model, sample, plan=tmp_path / "plan.json")
    found = run("plan", "model.py:make", "--costs", "flops", "--budget", "60%", "--json").values
    assert (found["budget"], found["predicted_peak"]) == (rk.budget, rk.plan.predicted_peak)
    assert found["recomputed"] == rk.plan.recomputed == sum(block["reruns"] for block in found["blocks"]) > 0
    assert "program" not in found and "saved" not in found


def test_plan_for_autocast_with_another_solver(run: Run) -> None:
    more = ("--autocast", "bfloat16", "--solver", "every_block", "--loss-memory", "1 KiB", "--time-limit", "5")
    done = run("plan", "model.py:make", "--budget", "1 MiB", "--costs", "flops", *more, "--json")
    assert done.values["calls"] == [["input float32[256, 16]", "train", "autocast bfloat16"]]
    done = run("check", "model.py:make", "--autocast", "bf16", "--costs", "flops")
    assert "mode                train, autocast bfloat16" in done.out and "--autocast bfloat16\n" in done.out


def test_plans_for_compiled_kernels(run: Run) -> None:
    done = run("plan", "model.py:make", "--budget", "100%", "--costs", "flops", "--compile")
    assert "\npieces              " in done.out and "of them compiled" in done.out
    done = run("check", "model.py:make", "--costs", "flops", "--compile")
    assert ", compile=True)" in done.out and " --compile\n" in done.out


def test_no_plan_fits(run: Run) -> None:
    done = run("plan", "model.py:make", "--budget", "1 KiB", "--costs", "flops", "--json")
    assert done.code == 1
    assert done.values["error"]["type"] == "InfeasibleBudgetError"
    assert done.err.startswith(
        "Error: Sequential: no plan fits a budget of 1.00 KiB for float32[256, 16]: the smallest "
    )


def test_where_no_plan_fits_a_share_that_would_do_is_said(run: Run) -> None:
    done = run("plan", "model.py:heavy", "--budget", "30%", "--costs", "flops")
    (share,) = re.findall(r'As a share of eager\'s peak, that is "([0-9]+)%"', done.err)
    assert run("plan", "model.py:heavy", "--budget", f"{share}%", "--costs", "flops").code == 0
    assert run("plan", "model.py:heavy", "--budget", f"{int(share) - 1}%", "--costs", "flops").code == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [("--wrong", "No such option '--wrong'.\n"), ("--cost", "No such option '--cost'. Did you mean '--costs'?\n")],
)
def test_an_option_that_does_not_exist_is_told_what_was_meant_if_it_is_like_it(run: Run, given: str, said: str) -> None:
    done = run("check", "model.py:make", given)
    assert done.code == 2 and done.err.endswith(said)


def test_check_does_not_say_that_nothing_can_be_gained_under_a_table_that_shows_otherwise(run: Run) -> None:
    done = run("check", "model.py:wide", "--costs", "flops")
    assert "with room for a larger loss" in done.out
    assert "There is nothing to gain" not in done.out and "print(handle.frontier())" in done.out


def test_frontier_as_table_json_and_plot(run: Run, tmp_path: Path) -> None:
    done = run("frontier", "model.py:make", "--costs", "flops", "--plot", "frontier.png")
    assert done.code == 0 and done.out.endswith("\nplotted in frontier.png\n")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    model, sample = sys.modules["model"].make()
    curve = frontier(model, sample, costs="flops")
    assert done.out.startswith(str(curve))
    found = run("frontier", "model.py:make", "--costs", "flops", "--json").values
    assert [(p["budget"], p["overhead"]) for p in found["points"]] == list(curve.points)
    assert [b["name"] for b in found["baselines"]] == [b.name for b in curve.baselines]


@pytest.mark.parametrize("sizes", [["--sizes", "64,128"], ["--sizes", "64 128"], ["--sizes", "64", "128"]])
def test_estimate_of_several_sizes(run: Run, sizes: list[str]) -> None:
    done = run("estimate", "model.py:small", *sizes, "--budget", "64 KiB", "--json")
    assert done.code == 0
    model, sample = sys.modules["model"].small()
    found = rockmate.estimate(model, sample, [64, 128], "64 KiB")
    assert [(s["size"], s["peak"], s["fits"]) for s in done.values["sizes"]] == [
        (s.size, s.peak, s.fits) for s in found.sizes
    ]
    assert (done.values["largest"], done.values["largest_plain"]) == (found.largest, found.largest_plain)


def test_estimate_as_text(run: Run) -> None:
    done = run("estimate", "model.py:small", "--sizes", "64", "--dim", "0")
    assert done.code == 0 and done.out.split()[:4] == ["size", "peak", "smallest", "budget"]
    done = run("estimate", "model.py:small", "--sizes", "64", "--dim", "5")
    assert done.code == 2 and "say with --dim which dimension grows" in done.err


def test_graphs_as_text(run: Run, tmp_path: Path) -> None:
    done = run("graphs", "model.py:make", "--format", "text", "--out", "made", "--costs", "flops")
    assert done.code == 0
    for stage in "BDSK":
        assert (tmp_path / "made" / f"Sequential_{stage}.txt").read_text().startswith(f"# {stage}")
        assert str(Path("made", f"Sequential_{stage}.txt")) in done.out.splitlines()


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_a_block_of_the_graphs_is_drawn_beside_them(run: Run, tmp_path: Path) -> None:
    done = run("graphs", "model.py:make", "--out", "made", "--costs", "flops", "--block", "0")
    assert done.code == 0
    assert done.out.splitlines()[-1] == str(Path("made", "Sequential_K_block0.svg"))
    assert (tmp_path / "made" / "Sequential_K_block0.svg").read_text().count("block 0") > 0
    done = run("graphs", "model.py:make", "--out", "made", "--costs", "flops", "--block", "99")
    assert done.code == 2 and "--block 99: give a number from 0 to" in done.err
    done = run("graphs", "model.py:make", "--format", "text", "--block", "0")
    assert done.code == 2 and "--block is drawn, not written" in done.err


def test_pictures_need_graphviz(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    done = run("graphs", "model.py:make", "--format", "pdf")
    assert done.code == 2 and "install Graphviz (for example: apt install graphviz), or take --format text" in done.err


def test_the_demo_gets_its_arguments(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr("runpy.run_module", lambda *args, **kwargs: seen.append((args, kwargs, sys.argv[1:])))
    assert run("demo", "--layers", "2", "--help").code == 0
    assert seen == [(("rockmate.demo",), {"run_name": "__main__", "alter_sys": True}, ["--layers", "2", "--help"])]


# -------------------------------------------------------------------------------------------------- misuse

MISUSE: list[tuple[list[str], str]] = [
    (["check"], "Missing argument 'FILE:FUNCTION'"),
    (["chekc"], "No such command 'chekc'"),
    (["check", "model.py"], "names no function: give FILE:FUNCTION, such as model.py:make. Its functions without"),
    (["check", "modle.py:make"], "there is no file modle.py in .*: did you mean model.py?"),
    (["check", "nosuch:make"], r"neither a file nor a module nosuch: .*\(path/to/model.py:make\)"),
    (["check", ".:make"], "is a folder: give a file in it, such as model.py:make"),
    (["check", "model.py:mkae"], "model.py has no function 'mkae'. Its functions without arguments are .*make, pair"),
    (["check", "model.py:NET"], "NET of model.py is a Sequential, and no function"),
    (["check", "model.py:needs"], r"needs\(batch\) of model.py needs arguments, .*def make\(\): return needs"),
    (
        ["check", "model.py:fails"],
        r"fails\(\) of model.py raised RuntimeError: no weights, at model.py:71 .caused by KeyError: 'layer'",
    ),
    (["check", "model.py:ends"], r"ends\(\) of model.py ended the program: SystemExit: done"),
    (["check", "model.py:nothing"], r"nothing\(\) of model.py returns nothing. Let it return model, sample"),
    (["check", "model.py:alone"], r"returns a model \(Sequential\), and no sample"),
    (["check", "model.py:swapped"], "returns the model as the second value"),
    (["check", "model.py:no_sample"], "returns nothing as the sample"),
    (["check", "model.py:flat"], r"as the third value, .* one tuple: model, \(x, y\)"),
    (["check", "model.py:four"], r"returns 4 values \(Sequential, Tensor, dict, dict\)"),
    (["check", "model.py:meta"], r"is on the meta device, .*model.to_empty"),
    (["check", "model.py:wrong"], "the model cannot be called with this sample: RuntimeError"),
    (["graphs", "model.py:wrong", "--format", "text"], "the model cannot be called with this sample"),
    (["check", "model.py:frozen"], "nothing needs a gradient"),
    (["check", "broken.py:make"], "broken.py:2 is no valid Python: "),
    (["check", "lacking.py:make"], "lacking.py:1 imports 'no_such_library', which is not installed for "),
    (["check", "relative.py:make"], r"relative import.*give the file as a module of its package"),
    (["check", "script.py:make"], r"script.py ended when it was imported \(script.py:2\): put what the script does"),
    (
        ["check", "model.py:make", "--loss-memory", "lots"],
        "the room for the loss .loss_memory. 'lots' is no amount of memory: give bytes",
    ),
    (["check", "model.py:make", "--loss-memory", "200"], 'is 200 bytes: was "200 GiB" meant?'),
    (["check", "model.py:make", "--costs", "guessed"], "Invalid value for '--costs'"),
    (["plan", "model.py:make"], "Missing option '--budget'"),
    (["plan", "model.py:make", "--budget", "8"], 'was "8 GiB" meant?'),
    (["plan", "model.py:make", "--budget", "lots"], "the budget 'lots' is no amount of memory"),
    (["plan", "model.py:make", "--budget", "8", "GiB"], r'put what has spaces in quotes, such as --budget "8 GiB"'),
    (["plan", "model.py:make", "--budget", "60%", "--solver", "none"], "solver='none': choose one of auto"),
    (["plan", "model.py:make", "--budget", "60%", "--save", "a/b.json"], "there is no folder .*a: make it first"),
    (["frontier", "model.py:make", "--plot", "curve.doc"], "--plot curve.doc: give a file that ends in .*png"),
    (["estimate", "model.py:make", "--sizes", "64,x"], "'64,x' is no list of whole numbers"),
    (["estimate", "model.py:make", "--sizes", "8"], "the size 8 is below the sample's, 256"),
    (["estimate", "model.py:make", "--sizes", "512", "--budget", "50%"], "is a share of each size's own peak"),
]


@pytest.mark.parametrize(("arguments", "message"), MISUSE, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_misuse_is_told_in_a_line_without_a_traceback(
    run: Run, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "broken.py").write_text("import torch\nx = (\n")
    (tmp_path / "lacking.py").write_text("import no_such_library\n")
    (tmp_path / "relative.py").write_text("from .model import make\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(len(sys.argv))\n")
    done = run(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert "Traceback" not in done.err
    (error,) = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    assert re.search(message, error), error


def test_misuse_as_json(run: Run) -> None:
    done = run("plan", "model.py:fails", "--budget", "60%", "--json")
    assert done.code == 2 and done.err.startswith("Error: fails() of model.py raised")
    assert done.values["error"]["type"] == "RuntimeError"
    assert run("plan", "model.py:make", "--budget", "x", "--json").values["error"]["type"] == "BudgetError"
    assert run("plan", "model.py:make", "--json").values["error"]["type"] == "MissingParameter"
    done = run("graphs", "model.py:make", "--format", "text", "--out", os.devnull, "--json", "--costs", "flops")
    assert done.code == 2 and "cannot be written to" in done.values["error"]["message"]


def test_traceback_on_demand(run: Run) -> None:
    done = run("check", "model.py:fails", "--traceback")
    assert done.code == 2
    assert 'raise RuntimeError("no weights")' in done.err and "Error: fails() of model.py raised" in done.err


def test_a_defect_shows_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "check", lambda given, options: 1 // 0)
    done = run("check", "model.py:make")
    assert done.code == 3
    assert "ZeroDivisionError" in done.err and "please report it" in done.err


def test_interrupting(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(answers, "check", interrupted)
    done = run("check", "model.py:make")
    assert done.code == 130 and "Traceback" not in done.err and "Interrupted." in done.err


def test_files_and_modules_see_their_own_arguments_and_neighbours(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "parts.py").write_text("from .sizes import ROWS\nfrom model import net\nimport torch\n"
                                     "def make(): return net(), torch.ones(ROWS, 16)\n")  # fmt: skip
    (folder / "sizes.py").write_text("ROWS = 32\n")
    done = run("check", "package.parts:make", "--costs", "flops", "--json")
    assert done.values["calls"] == [["input float32[32, 16]", "train"]]
    done = run("check", str(tmp_path / "model.py") + ":arguments", "--costs", "flops", "--json")
    assert done.code == 0, done.err
    (folder / "lacking.py").write_text("import package.nothing\n")
    done = run("check", "package.lacking:make")
    assert done.code == 2 and "lacking.py:1 imports 'package.nothing', which is not installed" in done.err


# ----------------------------------------------------------------------------------------------- programs


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_help_names_the_commands_and_the_exit_codes() -> None:
    done = started("-m", "rockmate", "--help")
    assert done.returncode == 0, done.stderr
    for command in ("check", "plan", "frontier", "estimate", "graphs", "demo"):
        assert f"\n  {command} " in done.stdout
    assert "Exit codes" in done.stdout


def test_python_m_rockmate() -> None:
    done = started("-m", "rockmate", "--version")
    assert (done.returncode, done.stdout) == (0, f"rockmate {rockmate.__version__}\n")
    assert started("-m", "rockmate", "check").returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_answer_that_cannot_be_written(more: list[str], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FILE)
    command = [sys.executable, "-m", "rockmate", "check", "model.py:make", *more]
    with Path("/dev/full").open("w") as full:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment, check=False
        )
    assert done.returncode == 2
    assert "the answer cannot be written to the standard output: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
