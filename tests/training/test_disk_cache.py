"""Plans on disk: a second start measures and solves nothing, and what cannot be trusted is not."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from against_eager import assert_in_budget, assert_trains_as_eager, step, tight_budget
from models import randn
from torch import nn

import rkgb.cost.measure
import rockmate.planning.disk
import rockmate.planning.kept
from rockmate import InputError, PlanError, Rockmate, attach
from rockmate.planning.disk import Disk, disk_of, named
from rockmate.planning.planner import Planner

ROOT = Path(__file__).parents[2]


def mlp(p: float = 0.25, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    blocks = [[nn.Linear(8, 32), nn.GELU(), nn.Dropout(p), nn.Linear(32, 8)] for _ in range(3)]
    return nn.Sequential(*(layer for block in blocks for layer in block)).to(dtype)


def sample(rows: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return randn(rows, 8, seed=1).to(dtype)


@pytest.fixture(scope="module")
def budget() -> int:
    return tight_budget(mlp(), (sample(),))


class Work:
    """How often nodes were measured, and solvers asked for a schedule or a bound."""

    def __init__(self) -> None:
        self.measured = self.solved = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    found = Work()

    def counted(owner: Any, name: str, which: str) -> None:
        original = getattr(owner, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            setattr(found, which, getattr(found, which) + 1)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    counted(rkgb.cost.measure, "_measured", "measured")
    counted(Planner, "chain", "solved")
    return found


@contextmanager
def nothing_done(work: Work) -> Iterator[None]:
    before = work.measured, work.solved
    yield
    assert (work.measured, work.solved) == before


def start(
    folder: Any, budget: int, model: nn.Module | None = None, x: torch.Tensor | None = None, **more: Any
) -> Rockmate:
    """As a script starts; flops, so that what is made anew is the same."""
    return Rockmate(model or mlp(), sample() if x is None else x, budget, **{"costs": "flops", "cache": folder, **more})


def files(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f"{kind}-*.json"))


# ------------------------------------------------------------------------------------- a second start

PROGRAM = """
import json, sys
sys.path[:0] = [{tests!r}, {training!r}]
import torch
import rkgb.cost.measure
from rockmate import Rockmate
from rockmate.planning.planner import Planner
from test_disk_cache import mlp, sample

done = []
def counted(owner, name):
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: (done.append(name), original(*args, **kwargs))[1])
counted(rkgb.cost.measure, "_measured")
counted(Planner, "chain")
plans, sums = [], []
rk = Rockmate(mlp(), sample(), int(sys.argv[1]))
optimizer = torch.optim.SGD(rk.parameters(), 0.1)
torch.manual_seed(1)
for k in range(4):
    plans.append([rk.plan.program(), rk.plan.predicted_peak, rk.plan.bound, rk.plan.room.between])
    loss = rk(sample()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    sums.append(loss.item().hex())
plan = rk.plan
print(json.dumps([plans, sums, done, plan.solver, sorted(plan.setup_seconds)]))
"""


def process(folder: Path, budget: int) -> subprocess.Popen[str]:
    here = ROOT / "tests"
    code = PROGRAM.format(tests=str(here), training=str(here / "training"))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"ROCKMATE_CACHE": str(folder), "PYTHONPATH": path}
    command = [sys.executable, "-c", code, str(budget)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def said(started: subprocess.Popen[str]) -> Any:
    with started:
        out = started.communicate(timeout=600)[0]
    assert started.returncode == 0
    return json.loads(out.splitlines()[-1])


def test_a_second_process_measures_and_solves_nothing(tmp_path: Path, budget: int) -> None:
    """Two at once, with measured costs; then a third, which finds what they kept, also after the first step."""
    both = [process(tmp_path / "new" / "folder", budget) for _ in range(2)]
    first, other = map(said, both)
    assert first[2] or other[2]  # both, unless one was over before the other began
    plans, sums, done, solver, doing = said(process(tmp_path / "new" / "folder", budget))
    assert done == []
    assert solver.endswith(", loaded")
    assert doing == ["capture", "load", "simplify", "trace"]
    assert plans in (first[0], other[0])  # all that is loaded is of one of them, or both are the same
    assert sums == first[1] == other[1]


def test_the_same_plan_and_the_same_training(tmp_path: Path, budget: int, work: Work) -> None:
    first = start(tmp_path, budget)
    assert first.plan.recomputed
    step(first, (sample(),))
    adapted = first.plan
    with nothing_done(work):
        second = start(tmp_path, budget)
        assert second.plan.solver.endswith(", loaded")
        torch.manual_seed(0)
        step(second, (sample(),))
    assert second.plan.schedule == adapted.schedule
    assert second.plan.problem == adapted.problem
    assert second.plan.predicted_peak == adapted.predicted_peak
    assert (second.plan.bound, second.plan.provable) == (adapted.bound, adapted.provable)
    assert (second.plan.reason, second.plan.room) == (adapted.reason, adapted.room)
    assert "loaded" in str(second.plan)

    third = start(tmp_path, budget)

    def train(_: nn.Module, call: nn.Module) -> Iterator[Any]:
        for seed in range(3):
            yield from step(call, (randn(64, 8, seed=seed),))

    assert_trains_as_eager(mlp(), third, train)
    assert_in_budget(third, lambda: step(third, (sample(),)))


def test_loaded_costs_are_those_that_were_measured(tmp_path: Path, budget: int, work: Work) -> None:
    first = start(tmp_path, budget, costs="measured")
    with nothing_done(work):
        second = start(tmp_path, budget, costs="measured")
    assert second.plan.graph.nodes == first.plan.graph.nodes
    assert second.plan.schedule == first.plan.schedule
    assert "measure" in first.plan.setup_seconds and "solve" in first.plan.setup_seconds
    assert sorted(second.plan.setup_seconds) == ["capture", "load", "simplify", "trace"]


def test_a_budget_that_does_not_bind_needs_no_schedule(tmp_path: Path, work: Work) -> None:
    start(tmp_path, 2**30)
    assert files(tmp_path, "costs") and not files(tmp_path, "schedule")
    measured = work.measured
    assert not start(tmp_path, 2**30).plan.recomputed
    assert work.measured == measured


def test_a_saved_plan_does_not_tell_where_it_comes_from(tmp_path: Path, budget: int) -> None:
    for k in range(2):
        start(tmp_path / "cache", budget).plan.save(tmp_path / f"{k}.json")
    assert (tmp_path / "0.json").read_text() == (tmp_path / "1.json").read_text()


def test_attach_and_the_backend_keep_plans_too(
    tmp_path: Path, budget: int, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    def attached() -> None:
        model = mlp()
        attach(model, budget, costs="flops", cache=tmp_path)
        step(model, (sample(),))

    def compiled() -> None:
        options = {"budget": budget, "costs": "flops", "cache": str(tmp_path)}
        step(torch.compile(mlp(), backend="rockmate", options=options, fullgraph=True), (sample(),))

    attached()
    with nothing_done(work), caplog.at_level(logging.INFO, "rockmate"):
        attached()
    assert "(costs and schedule loaded)" in caplog.text
    compiled()
    with nothing_done(work):
        compiled()


def test_another_length_of_a_loaded_graph(tmp_path: Path, budget: int, work: Work) -> None:
    """Costs that were scaled are not taken for measured ones, and no size is measured twice."""

    def lengths() -> list[Any]:
        rk = start(tmp_path, budget)
        for rows in (64, 48, 96):
            step(rk, (sample(rows),))
        return [p.plan.predicted_peak for p in rk._front.plans]

    first = lengths()
    with nothing_done(work):
        assert lengths() == first


# ------------------------------------------------------------------------------------- what is not taken


def test_another_budget_is_solved_with_the_same_costs(tmp_path: Path, budget: int, work: Work) -> None:
    start(tmp_path, budget)
    measured, solved = work.measured, work.solved
    rk = start(tmp_path, budget - 1024)
    assert work.measured == measured
    assert work.solved > solved
    assert not rk.plan.solver.endswith("loaded")
    with nothing_done(work):
        rk.budget = budget
    assert rk.plan.solver.endswith(", loaded")


def other_starts() -> list[Any]:
    def thawed() -> nn.Module:
        model = mlp()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        return model

    def frozen() -> nn.Module:
        model = mlp()
        next(model.parameters()).requires_grad_(False)
        return model

    return [
        pytest.param(lambda: {"x": sample(80)}, id="shape"),
        pytest.param(lambda: {"model": mlp(dtype=torch.float64), "x": sample(dtype=torch.float64)}, id="type"),
        pytest.param(lambda: {"model": mlp(p=0.5)}, id="constant"),
        pytest.param(lambda: {"model": mlp().eval()}, id="mode"),
        pytest.param(lambda: {"model": thawed()}, id="gradients that are there"),
        pytest.param(lambda: {"model": frozen()}, id="frozen"),
        pytest.param(lambda: {"costs": "measured"}, id="kind of costs"),
    ]


@pytest.mark.parametrize("other", other_starts())
def test_other_graphs_are_measured(tmp_path: Path, budget: int, work: Work, other: Callable[[], Any]) -> None:
    start(tmp_path, budget)
    measured = work.measured
    rk = start(tmp_path, 4 * budget, **other())
    assert work.measured > measured
    assert "measure" in rk.plan.setup_seconds


@pytest.mark.parametrize("what", ["version", "device", "threads", "deterministic"])
def test_other_surroundings_are_measured(
    tmp_path: Path, budget: int, work: Work, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path, budget)
    measured = work.measured
    before = torch.get_num_threads()
    try:
        if what == "version":
            monkeypatch.setattr(rockmate.planning.kept, "versions", lambda: ("another",))
        elif what == "device":
            monkeypatch.setattr(rkgb.device.Cpu, "model", lambda *_: "another processor")
        elif what == "threads":
            torch.set_num_threads(before + 1)
        else:
            torch.use_deterministic_algorithms(True)
        start(tmp_path, budget)
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(False)
    assert work.measured > measured


def test_a_schedule_of_another_version_or_limit_is_not_taken(
    tmp_path: Path, budget: int, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path, budget)
    solved = [work.solved]
    for changes in ({"time_limit": 30.0}, {"loss_memory": 2048}):
        start(tmp_path, budget, **changes)
        solved.append(work.solved)
    monkeypatch.setattr(rockmate.planning.kept, "versions", lambda: ("another",))
    start(tmp_path, budget)
    solved.append(work.solved)
    assert len(set(solved)) == 4


def test_versions_name_torch_and_our_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "somebodys"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rockmate.planning.kept, "_PACKAGES", ("somebodys",))
    rockmate.planning.kept.versions.cache_clear()
    try:
        before = rockmate.planning.kept.versions()
        assert f"torch {torch.__version__}" in before
        (package / "solver.py").write_text("better = True")
        rockmate.planning.kept.versions.cache_clear()
        assert rockmate.planning.kept.versions() != before
    finally:
        rockmate.planning.kept.versions.cache_clear()


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * torch.cos(ctx.saved_tensors[0])


class Copied(Sine):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x + 0)


@torch.library.custom_op("rockmate_tests::sine", mutates_args=())
def own_sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@own_sine.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class OwnSine(Sine):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return own_sine(x)


class WithFunction(nn.Module):
    def __init__(self, function: type[Sine]) -> None:
        super().__init__()
        self.inner, self.function = mlp(), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function.apply(self.inner(x))


def test_functions_are_kept_by_what_they_compute(tmp_path: Path, budget: int, work: Work) -> None:
    start(tmp_path, 4 * budget, WithFunction(Sine))
    with nothing_done(work):
        start(tmp_path, 4 * budget, WithFunction(Sine))
    measured = work.measured
    start(tmp_path, 4 * budget, WithFunction(Copied))
    assert work.measured > measured


def test_operations_of_the_users_own_are_not_kept(tmp_path: Path, budget: int, work: Work) -> None:
    """Their code may be another one at the next start."""
    start(tmp_path, 4 * budget, WithFunction(OwnSine))
    measured = work.measured
    start(tmp_path, 4 * budget, WithFunction(OwnSine))
    assert work.measured > measured
    assert not files(tmp_path, "costs")


# ------------------------------------------------------------------------------------- files that are wrong


def _with(found: dict[str, Any], **changes: Any) -> str:
    return json.dumps({**found, **changes})


def _cost(found: dict[str, Any], **changes: Any) -> str:
    costs = [dict(c) for c in found["costs"]]
    fed = next(c for c in costs if any(c["inputs"]))
    fed.update(changes)
    return _with(found, costs=costs)


BROKEN: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "no JSON": lambda text: "\x00plan",
    "a list": lambda text: "[]",
    "nested": lambda text: "[" * 100_000,
    "foreign": lambda text: '{"name": "somebody", "scripts": {}}',
    "no fields": lambda text: json.dumps({"name": json.loads(text)["name"]}),
}

BROKEN_COSTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "too few": lambda found: _with(found, of=found["of"][:-1]),
    "too many": lambda found: _with(found, of=[*found["of"], 0]),
    "of nothing": lambda found: _with(found, of=[10**6] * len(found["of"])),
    "negative position": lambda found: _with(found, of=[-1] * len(found["of"])),
    "negative": lambda found: _cost(found, forward_time=-1),
    "negative peak": lambda found: _cost(found, backward_peak=-8),
    "infinite": lambda found: _cost(found, forward_peak=10**30),
    "a fraction": lambda found: _cost(found, forward_time=1.5),
    "true": lambda found: _cost(found, forward_time=True),
    "text": lambda found: _cost(found, forward_time="7"),
    "no gradients": lambda found: _cost(found, results=[]),
    "other gradients": lambda found: _cost(found, inputs=[]),
    "negative gradient": lambda found: _cost(found, inputs=[{"bytes": -1, "shares": None}] * 3),
    "gradient in nothing": lambda found: _cost(found, inputs=[{"bytes": 1, "shares": ["input", 2]}] * 3),
    "gradient of nothing": lambda found: _cost(found, inputs=[{"bytes": 1, "shares": ["result", 7]}] * 3),
    "another word": lambda found: _cost(found, inputs=[{"bytes": 1, "shares": ["other", 0]}] * 3),
    "views": lambda found: _cost(found, views=[9]),
    "unknown field": lambda found: _cost(found, comment="?"),
}


def _program(change: Callable[[list[str]], list[str]]) -> Callable[[dict[str, Any]], str]:
    return lambda found: _with(found, program=change(found["program"]))


BROKEN_SCHEDULES: dict[str, Callable[[dict[str, Any]], str]] = {
    "unknown node": _program(lambda p: [*p[:1], "    x = fwd.nobody()", *p[1:]]),
    "a step less": _program(lambda p: p[:-1]),
    "a step more": _program(lambda p: [*p, p[-1]]),
    "turned round": _program(lambda p: p[::-1]),
    "too much memory": _program(lambda p: [line for line in p if "del " not in line]),
    "no text": _program(lambda p: [7]),  # type: ignore[list-item]
    "a program of Python": _program(lambda p: ["import os", "os.abort()"]),
    "no solver": lambda found: _with(found, solver=None),
    "a reason of another type": lambda found: _with(found, reason=["at the time limit"]),
    "a bound above the step": lambda found: _with(found, bound=10**18),
    "a negative bound": lambda found: _with(found, bound=-1),
    "a bound as text": lambda found: _with(found, bound="0"),
}


def _decoded(change: Callable[[dict[str, Any]], str]) -> Callable[[str], str]:
    return lambda text: change(json.loads(text))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, budget: int) -> dict[str, bytes]:
    """The files of one start."""
    folder = tmp_path_factory.mktemp("kept")
    start(folder, budget)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(pytest.param("*", change, id=name) for name, change in BROKEN.items()),
        *(pytest.param("costs", _decoded(change), id=f"costs {name}") for name, change in BROKEN_COSTS.items()),
        *(pytest.param("schedule", _decoded(change), id=f"program {n}") for n, change in BROKEN_SCHEDULES.items()),
    ],
)
def test_a_wrong_file_is_ignored_with_a_note_and_written_anew(
    tmp_path: Path,
    budget: int,
    work: Work,
    kept: dict[str, bytes],
    kind: str,
    change: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    changed = 0
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
        if kind in ("*", name.split("-")[0]):
            (tmp_path / name).write_text(change(content.decode()))
            changed += 1
    with caplog.at_level(logging.INFO, "rockmate"):
        rk = start(tmp_path, budget)
    assert caplog.text.count("is ignored, and will be written anew") == changed > 0
    assert (work.measured > 0) == (kind in ("*", "costs"))
    assert (work.solved > 0) == (kind in ("*", "schedule"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept
    assert rk.plan.predicted_peak <= budget


def test_bytes_that_are_no_text(tmp_path: Path, budget: int, kept: dict[str, bytes], work: Work) -> None:
    for name in kept:
        (tmp_path / name).write_bytes(b"\xff\xfe\x00" * 99)
    start(tmp_path, budget)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept


def test_a_file_under_another_name_is_not_taken(
    tmp_path: Path, budget: int, kept: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    disk, name = Disk(tmp_path), named("costs", "other")
    (tmp_path / f"{name}.json").write_bytes(next(iter(kept.values())))
    with caplog.at_level(logging.INFO, "rockmate"):
        assert disk.read(name, lambda found: found) is None
    assert "another file's content" in caplog.text


# ------------------------------------------------------------------------------------- folders


@pytest.mark.parametrize("kind", ["a file", "below a file", "a folder in place of a file", "not to be written"])
def test_a_folder_that_cannot_be_used(
    tmp_path: Path,
    budget: int,
    kept: dict[str, bytes],
    kind: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A note, once, and a plan."""
    folder = tmp_path / "cache"
    if kind == "a folder in place of a file":
        for name in kept:
            (folder / name).mkdir(parents=True)
    elif kind == "not to be written":

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(13, "Permission denied", str(folder))

        monkeypatch.setattr(Path, "write_text", refuse)  # as a superuser may write anywhere
    else:
        folder.write_text("")
        folder = folder / "below" if kind == "below a file" else folder
    with caplog.at_level(logging.INFO, "rockmate"):
        for _ in range(2):
            assert start(folder, budget).plan.recomputed
    notes = [r.getMessage() for r in caplog.records if "plans are not kept in" in r.getMessage()]
    assert len(notes) == 1
    assert str(folder) in notes[0] and "cache=" in notes[0] and "ROCKMATE_CACHE" in notes[0]
    monkeypatch.undo()
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".tmp"]


def test_the_folder_keeps_what_was_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rockmate.planning.disk, "MOST_FILES", 3)
    disk, names = Disk(tmp_path), [named("costs", k) for k in range(6)]
    others = [tmp_path / "package.json", tmp_path / "costs-of-mine.json", tmp_path / "notes.tmp"]
    for path in others:
        path.write_text("{}")
    left = [tmp_path / f"{names[0]}.{k:016x}.tmp" for k in range(2)]
    for path in left:
        path.write_text("{")
    os.utime(left[0], (0, 0))
    now = time.time() - 1000
    for k, name in enumerate(names[:3]):
        disk.write(name, {"k": k})
        os.utime(tmp_path / f"{name}.json", (now + k, now + k))
    assert disk.read(names[0], lambda found: found["k"]) == 0  # used now
    disk.write(names[3], {"k": 3})
    assert {path.stem for path in files(tmp_path, "costs") if "mine" not in path.stem} == {
        names[0],
        names[2],
        names[3],
    }
    assert all(path.exists() for path in others)
    assert [path.exists() for path in left] == [False, True]  # another process may be writing the second
    monkeypatch.setattr(rockmate.planning.disk, "MOST_BYTES", 150)
    disk.write(names[4], {"k": 4})
    disk.write(names[5], {"text": 1000 * "x"})
    assert len([path for path in files(tmp_path, "costs") if "mine" not in path.stem]) <= 1


def test_many_write_and_read_one_file_at_once(tmp_path: Path) -> None:
    """Each reads the whole of what one of them has written."""
    disk, name = Disk(tmp_path), named("costs", "shared")

    def whole(found: dict[str, Any]) -> int:
        assert found["text"] == found["k"] * 10_000
        return 1

    def work(k: int) -> int:
        found = 0
        for _ in range(20):
            disk.write(name, {"k": chr(65 + k), "text": chr(65 + k) * 10_000})
            found += disk.read(name, whole) or 0
        return found

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [20] * 4
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.json"]


# ------------------------------------------------------------------------------------- what is asked


def test_cache_and_the_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk_of(False) is None and disk_of(None) is None
    assert disk_of(tmp_path) == disk_of(str(tmp_path)) == Disk(tmp_path)
    assert disk_of(True) is None  # as all tests run
    for off in ("off", "0", "False", " none ", ""):
        monkeypatch.setenv("ROCKMATE_CACHE", off)
        assert disk_of(True) is None
        assert disk_of(tmp_path) == Disk(tmp_path)
    monkeypatch.setenv("ROCKMATE_CACHE", str(tmp_path / "there"))
    assert disk_of(True) == Disk(tmp_path / "there")
    assert disk_of(False) is None
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for on in ("on", "1", None):
        if on is None:
            monkeypatch.delenv("ROCKMATE_CACHE")
        else:
            monkeypatch.setenv("ROCKMATE_CACHE", on)
        usual = disk_of(True)
        assert usual is not None and usual.folder.is_absolute()
        if sys.platform == "linux":
            assert usual.folder == tmp_path / "xdg" / "rockmate"
    monkeypatch.setenv("ROCKMATE_CACHE", "~/plans")
    assert disk_of(True) == Disk(tmp_path / "plans")
    for wrong in (7, 1.5, "", "off", "True", b"", object()):
        with pytest.raises(InputError, match="give the path of the folder"):
            disk_of(wrong)


def test_where_plans_are_not_kept(tmp_path: Path, budget: int, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKMATE_CACHE", str(tmp_path))
    start(False, budget)
    start(None, budget)
    assert not list(tmp_path.iterdir())
    start(True, budget)
    assert files(tmp_path, "costs") and files(tmp_path, "schedule")
    measured = work.measured
    start(False, budget)
    assert work.measured > measured


def test_a_plan_from_a_file_is_the_files(tmp_path: Path, budget: int) -> None:
    """Whatever is in the folder."""
    start(tmp_path / "cache", budget).plan.save(tmp_path / "plan.json")
    loaded = Rockmate(mlp(), sample(), plan=tmp_path / "plan.json", cache=tmp_path / "cache")
    assert not loaded.plan.solver.endswith("loaded")
    with pytest.raises(PlanError, match="for another graph"):
        Rockmate(mlp(), sample(80), plan=tmp_path / "plan.json", cache=tmp_path / "cache")
