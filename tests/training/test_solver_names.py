"""Training under the plan of a solver that the caller names."""

from __future__ import annotations

import copy

import pytest
import torch
from against_eager import assert_same, snapshot
from models import case, mlp, randn, square_loss

from rockmate import InfeasibleBudgetError, InputError, Rockmate, attach
from solvers import Problem
from solvers.liveness import drop_useless_runs, forward_phase, with_deletes
from solvers.schedule import Bwd, Run
from solvers.solve import KINDS, Answer, Request, register


def trained(model: torch.nn.Module, x: torch.Tensor) -> list[object]:
    torch.manual_seed(0)
    loss = square_loss(model(x))
    loss.backward()
    return [loss.detach(), *snapshot(model)]


@pytest.mark.parametrize("name", ["sqrt", "every_block", "rotor", "checkmate"])
def test_the_named_solver_plans(name: str) -> None:
    model, x = mlp(20), randn(256, 16, seed=0)
    eager = copy.deepcopy(model)
    everything = Rockmate(copy.deepcopy(model), x, "1 GiB", costs="flops").plan.predicted_peak
    handle = attach(model, int(0.8 * everything), sample=x, costs="flops", solver=name)
    assert handle.plan is not None
    assert handle.plan.solver == name
    assert handle.plan.recomputed > 0
    assert_same(trained(model, x), trained(eager, x))


def test_a_solver_of_the_callers_own() -> None:
    @register(Problem, "all_of_it")
    def all_of_it(problem: Problem, _: Request) -> Answer:
        steps = list(forward_phase(problem))
        for i in problem.backward_order():
            steps += [Run(k) for k in range(i + 1) if problem.nodes[k].rerun]
            steps.append(Bwd(i))
        return Answer(with_deletes(problem, drop_useless_runs(problem, tuple(steps))))

    try:
        c = case("mlp")
        (x,), _ = c.call(0)
        everything = Rockmate(c.model(), x, "1 GiB", costs="flops").plan.predicted_peak
        model = c.model()
        rk = Rockmate(model, x, int(0.9 * everything), costs="flops", solver="all_of_it")
        assert rk.plan.solver == "all_of_it"
        assert rk.plan.recomputed > 0
        assert_same(trained(rk, x), trained(c.model(), x))
    finally:
        del KINDS[Problem].solvers["all_of_it"]


def test_a_solver_that_has_no_plan_says_what_would_do() -> None:
    c = case("mlp")
    (x,), _ = c.call(0)
    everything = Rockmate(c.model(), x, "1 GiB", costs="flops").plan.predicted_peak
    with pytest.raises(InfeasibleBudgetError, match=r"solver='keep_all' has no plan .* plans for is"):
        Rockmate(c.model(), x, int(0.8 * everything), costs="flops", solver="keep_all")


def test_unknown_solvers_are_refused_at_once() -> None:
    c = case("mlp")
    with pytest.raises(InputError, match=r"solver='gurobi': choose one of auto, checkmate"):
        attach(c.model(), "1 GiB", solver="gurobi")


def test_a_share_that_a_solver_has_no_plan_for_is_refused_at_once() -> None:
    """Another solver's plan does not run in its place."""
    model = mlp(20)
    attach(model, "5%", solver="sqrt", costs="flops", cache=False)
    with pytest.raises(InfeasibleBudgetError, match="solver='sqrt' has no plan") as error:
        model(randn(256, 16, seed=0))
    assert "As a share" not in str(error.value)
