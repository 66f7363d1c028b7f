"""Plans as files, the same plan every time, and how many plans are kept."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from against_eager import assert_in_budget, assert_trains_as_eager, planned, step
from models import GPT, SEVERAL, case, randn, square_loss
from torch import nn

import rockmate.calls.runnable
import rockmate.planning.planner
import rockmate.planning.prepare
from rockmate import BudgetError, PlanError, PlanningWarning, Rockmate
from solvers import parse_schedule


@pytest.mark.parametrize("name", ["gpt", "dropout_mlp", "two_in_two_out", "tied"])
def test_a_saved_plan_runs_without_measuring_or_solving(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = case(name)
    eager, rk = planned(c)
    path = tmp_path / "plan.json"
    rk.plan.save(path)
    args, kwargs = c.call(0)
    monkeypatch.setattr(rockmate.planning.planner.Planner, "solve", None)
    monkeypatch.setattr(rockmate.planning.prepare, "make_all_graphs", None)
    loaded = Rockmate(c.model(), args, plan=path, sample_kwargs=kwargs)
    assert loaded.plan.schedule == rk.plan.schedule
    assert loaded.plan.problem == rk.plan.problem
    assert (loaded.budget, loaded.plan.predicted_peak) == (rk.budget, rk.plan.predicted_peak)
    assert loaded.plans_made == 0

    def train(_: nn.Module, call: nn.Module) -> Any:
        args, kwargs = c.call(1)
        yield from step(call, args, kwargs)

    assert_trains_as_eager(eager, loaded, train)
    assert_in_budget(loaded, lambda: step(loaded, args, kwargs), [t for t in args if t.requires_grad])


@pytest.mark.parametrize("name", ["gpt", "function"])
def test_plans_are_the_same_in_every_process(name: str, tmp_path: Path) -> None:
    """With ``costs="flops"``: byte for byte the same file, whatever the hash seed."""
    here = Path(__file__).parents[1]
    program = (
        f"import sys; sys.path[:0] = [{str(here)!r}, {str(here / 'training')!r}]\n"
        "from against_eager import planned\nfrom models import case\n"
        f"planned(case({name!r}))[1].plan.save(sys.argv[1])"
    )
    files = [tmp_path / "here.json", tmp_path / "there.json"]
    planned(case(name))[1].plan.save(files[0])
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(here.parent)}
    subprocess.run([sys.executable, "-c", program, str(files[1])], check=True, env=environment)
    assert files[0].read_text() == files[1].read_text()


def test_the_file_is_readable(tmp_path: Path) -> None:
    _, rk = planned(case("gpt"))
    path = tmp_path / "plan.json"
    rk.plan.save(path)
    found = json.loads(path.read_text())
    assert found["inputs"] == ["int64[2, 16]"]
    assert found["budget"] == rk.budget
    assert parse_schedule(rk.plan.problem, "\n".join(found["program"])) == rk.plan.schedule
    assert sum("recompute" in line for line in found["program"]) == rk.plan.recomputed


def other_models() -> list[Any]:
    ids = case("gpt").call(0)[0][0]
    gpt = case("gpt").model()
    frozen = copy.deepcopy(gpt)
    next(frozen.parameters()).requires_grad_(False)
    deterministic = copy.deepcopy(gpt)
    deterministic.drop.p = 0.2
    return [
        pytest.param(gpt, ids[:1], r"called with int64\[2, 16\], the sample is int64\[1, 16\]", id="other shape"),
        pytest.param(
            GPT(2, 32, 4, 16, 64), ids, r"nodes and this graph .*, and they differ from node", id="fewer layers"
        ),
        pytest.param(frozen, ids, "other arguments, types, modes or parameters that require grad", id="frozen"),
        pytest.param(deterministic, ids, "other arguments, types, modes", id="other constant"),
        pytest.param(copy.deepcopy(gpt).bfloat16(), ids, "other arguments, types, modes", id="other precision"),
    ]


@pytest.mark.parametrize(("model", "x", "message"), other_models())
def test_plans_for_another_graph_are_refused(model: nn.Module, x: torch.Tensor, message: str, tmp_path: Path) -> None:
    planned(case("gpt"))[1].plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=f"for another graph: .*{message}"):
        Rockmate(model, x, plan=tmp_path / "plan.json")


def test_a_plan_for_another_autocast_or_function_is_refused_in_these_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = case("function")
    args, _ = c.call(0)
    plain, cast = tmp_path / "plain.json", tmp_path / "cast.json"
    Rockmate(c.model(), args, 10**6).plan.save(plain)
    with torch.autocast("cpu", torch.bfloat16):
        Rockmate(c.model(), args, 10**6).plan.save(cast)
        with pytest.raises(PlanError, match="made under no autocast, and is loaded under autocast bfloat16"):
            Rockmate(c.model(), args, plan=plain)
    with pytest.raises(PlanError, match="made under autocast bfloat16, and is loaded under no autocast"):
        Rockmate(c.model(), args, plan=cast)
    monkeypatch.setattr(models.Cube, "backward", staticmethod(lambda ctx, grad: grad * ctx.saved_tensors[0].exp()))
    with pytest.raises(PlanError, match=r"an autograd.Function computes otherwise \(models.py:\d+, models.py:\d+\)"):
        Rockmate(c.model(), args, plan=plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.update(format=0), "has format 0"),
        (lambda found: found.pop("program"), "is no plan: KeyError"),
        (lambda found: found["program"].insert(3, "    bwd.nothing()"), "cannot be read: line 4"),
        (lambda found: found["program"].pop(1), "is not valid|cannot be read"),
        (lambda found: found.update(budget=found["budget"] // 2), "its budget is"),
        (lambda found: found.update(budget=10**400), "is no plan: ProblemError: the plan: budget is"),
        (lambda found: found.update(nodes=[]), "are not those of this graph"),
        (lambda found: found.update(data=[]), "are not those of this graph"),
        (lambda found: found.update(held=[10**6]), "are not those of this graph"),
        (lambda found: found["usage"].update(roots=[7]), "are not those of this graph"),
        (lambda found: found["nodes"][0].update(peak=0), "are not those of this graph"),
        (lambda found: found.update(costs="x"), "are not those of this graph"),
    ],
    ids=[
        "format",
        "field",
        "step",
        "missing step",
        "budget",
        "huge",
        "nodes",
        "data",
        "held",
        "usage",
        "node",
        "costs",
    ],
)
def test_changed_files_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned(case("mlp"))[1].plan.save(path)
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(PlanError, match=message):
        Rockmate(case("mlp").model(), case("mlp").call(0)[0], plan=path)


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    model, args = case("mlp").model(), case("mlp").call(0)[0]
    with pytest.raises(PlanError, match="there is no plan in"):
        Rockmate(model, args, plan=tmp_path / "nothing.json")
    (tmp_path / "text").write_text("budget: 3")
    with pytest.raises(PlanError, match="is no plan"):
        Rockmate(model, args, plan=tmp_path / "text")
    with pytest.raises(BudgetError, match="either"):
        Rockmate(model, args, "1 MiB", plan=tmp_path / "text")


def test_a_plan_made_with_gradients_needs_them(tmp_path: Path) -> None:
    c = case("mlp")
    model = c.model()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    Rockmate(model, c.call(0)[0], "10 MiB", costs="flops").plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="gradients, which now have none"):
        Rockmate(c.model(), c.call(0)[0], plan=tmp_path / "plan.json")


def test_another_budget_for_a_loaded_plan(tmp_path: Path) -> None:
    c = case("mlp")
    _, rk = planned(c)
    rk.plan.save(tmp_path / "plan.json")
    loaded = Rockmate(c.model(), c.call(0)[0], plan=tmp_path / "plan.json")
    loaded.budget = 10 * rk.budget
    assert loaded.plan.recomputed == 0
    assert loaded.frontier() == rk.frontier()


def test_the_number_of_plans_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rockmate.calls.runnable, "MAX_PLANS", 3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    eager = copy.deepcopy(model)
    rk = Rockmate(model, randn(1, 4, seed=0), "1 MiB", costs="flops")

    def train(_: nn.Module, call: nn.Module) -> Any:
        for batch in (2, 3, 1):
            yield from step(call, (randn(batch, 4, seed=batch),))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for batch in (4, 5, 1, 2):
                yield from step(call, (randn(batch, 4, seed=batch),))
        if call is rk:
            assert [w.category for w in seen] == [PlanningWarning]

    assert_trains_as_eager(eager, rk, train)
    assert len(rk._front.plans) == 3
    assert rk.plans_dropped == 3


@pytest.mark.filterwarnings(SEVERAL)
def test_calls_in_between_keep_their_state() -> None:
    """A call whose plan has gone by the time of its backward."""
    c = case("mlp")
    eager, rk = planned(c)

    def train(_: nn.Module, call: nn.Module) -> Any:
        loss = square_loss(call(*c.call(1)[0]))
        if call is rk:
            rk.budget = 2 * rk.budget
        square_loss(call(*c.call(2)[0])).backward()
        loss.backward()
        yield loss.detach()

    assert_trains_as_eager(eager, rk, train)
