"""What one answer promises, the next one keeps: the frontier's points can be planned, in any state of the process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import ZOO, case
from torch import nn

import rockmate.planning.finder
import rockmate.planning.plan
from rkgb.sample import Call
from rockmate import InfeasibleBudgetError, Rockmate, frontier
from rockmate.demo.gpt import GPT
from rockmate.planning.options import PlanOptions
from rockmate.planning.planner import Planner
from rockmate.planning.prepare import make_planner
from solvers import lower_bound, walk

NARROW = "gpt_narrow"


def planner_of(name: str) -> Planner:
    if name == NARROW:
        torch.manual_seed(0)
        return make_planner(GPT(2, 16, 2, 8, 32), torch.zeros(2, 8, dtype=torch.int64), PlanOptions("flops"))
    args, kwargs = case(name).call(1)
    return make_planner(case(name).model(), Call(args, kwargs), PlanOptions("flops"))


@pytest.mark.parametrize("name", [*(c.name for c in ZOO), NARROW])
def test_each_point_of_the_frontier_can_be_planned(name: str) -> None:
    """And a plan takes no less time than is proven."""
    planner = planner_of(name)
    for budget, overhead in planner.frontier().points:
        assert planner.solve(budget).overhead <= overhead, budget
    plan = planner.plan(planner.frontier().min_budget)
    assert plan.lower_bound is not None
    assert plan.problem.eager_time <= plan.lower_bound <= walk(plan.problem, plan.schedule).time


@pytest.mark.parametrize("name", ["mlp", NARROW])
def test_the_smallest_budget_named_by_the_error_is_feasible(name: str) -> None:
    planner = planner_of(name)
    with pytest.raises(InfeasibleBudgetError) as error:
        planner.solve(100)
    least = error.value.min_budget
    assert planner.described(least, planner.solve(least)).predicted_peak <= least


def test_planning_after_a_forward_in_the_same_autocast() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)), torch.ones(8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)  # autocast now holds a cast copy of each weight
        rk = Rockmate(model, x, "1 MiB", costs="flops")
        assert torch.equal(rk(x), expected)
        assert frontier(model, x, costs="flops").min_budget > 0


@pytest.mark.parametrize("costs", ["flops", "measured"])
def test_a_plan_says_how_far_from_the_best_it_is(costs: str) -> None:
    args, kwargs = case("mlp").call(1)
    planner = make_planner(case("mlp").model(), Call(args, kwargs), PlanOptions(costs))
    curve = planner.frontier()
    assert curve.min_budget < curve.max_budget
    tight, empty = planner.plan(curve.min_budget), planner.plan(curve.max_budget)
    assert empty.gap == 0
    assert "predicted overhead  0.0 % more time, proven to be the least in the program's order" in str(empty)
    planned = walk(tight.problem, tight.schedule).time
    assert tight.lower_bound is not None and tight.gap is not None
    assert tight.problem.eager_time <= tight.lower_bound <= planned
    assert tight.gap == (planned - tight.lower_bound) / planned
    above = "proven to be" if tight.gap < 1e-4 else f"at most {100 * tight.gap:.2f} % of the step above"
    assert f"{above} the least in the program's order" in str(tight)


def test_a_plan_that_stays_for_what_its_loss_takes_is_proven_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    args, kwargs = case("mlp").call(1)
    planner = make_planner(case("mlp").model(), Call(args, kwargs), PlanOptions("flops"))
    before = planner.plan(planner.frontier().min_budget)
    proofs: list[Any] = []

    def proven(*asked: Any) -> int:
        proofs.append(asked)
        return lower_bound(*asked)

    for place in (rockmate.planning.plan, rockmate.planning.finder):
        monkeypatch.setattr(place, "lower_bound", proven)
    plan = planner.kept_plan(before)
    assert plan is not None and plan.recomputed and not proofs
    assert plan.lower_bound == before.lower_bound and plan.gap == before.gap
    assert len(proofs) == 1
