"""The bound of a chain holds for every schedule; solvers by name are verified and say what their answers rest on."""

from __future__ import annotations

import sys
from itertools import pairwise, product
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_cases import gpt_chain, lin_relu_lin
from solver_strategies import problems
from test_solvers_schedule import orders

from solvers import (
    Backward,
    Block,
    Bwd,
    ChainPlanner,
    Data,
    Grid,
    Loss,
    Node,
    Problem,
    ProblemError,
    Progress,
    Run,
    SolverError,
    Step,
    all_baselines,
    frontier,
    keep_everything,
    solve,
    walk,
    with_deletes,
)
from solvers.chain.bound import least_budget, lower_bound
from solvers.chain.revolve import revolve

NAMES = ("keep_all", "recompute_all", "every_block", "sqrt", "revolve", "rotor", "checkmate", "auto")


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_no_schedule_is_below_the_bound(data: st.DataObject) -> None:
    """Reruns in any order, any number of times, and generator states, held data and nodes that run once."""
    problem = data.draw(problems(max_nodes=5))
    walked = walk(problem, with_deletes(problem, data.draw(orders(problem))))
    assert lower_bound(problem, walked.peak) <= walked.time
    assert least_budget(problem)[0] <= walked.peak


def every_order(problem: Problem) -> list[list[Step]]:
    """All schedules in which up to two nodes run again before each backward, in any order."""
    again = [i for i, n in enumerate(problem.nodes) if n.rerun]
    before: list[list[Run]] = [[], *([Run(i)] for i in again), *([Run(i), Run(j)] for i in again for j in again)]
    first: list[Step] = [*(Run(i) for i in range(len(problem.nodes))), Loss()]
    backwards = [Bwd(i) for i in problem.backward_order()]
    found = []
    for choice in product(before, repeat=len(backwards)):
        order = list(first)
        for runs, backward in zip(choice, backwards, strict=True):
            order += [*runs, backward]
        found.append(order)
    return found


@settings(deadline=None, max_examples=40)
@given(problems(max_nodes=3))
def test_solutions_lie_between_bound_and_brute_force(problem: Problem) -> None:
    walked = [walk(problem, with_deletes(problem, order)) for order in every_order(problem)]
    last = None
    for budget in sorted({w.peak for w in walked}):
        best = min(w.time for w in walked if w.peak <= budget)
        found = solve(problem, budget)
        assert lower_bound(problem, budget) <= found.bound
        if found.cost is None:  # the chain never runs a node before its stage, brute force does
            assert found.status in ("infeasible", "unknown")
            continue
        assert found.peak is not None
        assert found.peak <= budget
        assert found.bound <= found.cost
        assert lower_bound(problem, budget) <= min(best, found.cost)
        assert last is None or found.cost <= last
        last = found.cost


@settings(deadline=None, max_examples=40)
@given(problems(max_nodes=6, max_blocks=4))
def test_solvers_by_name_are_verified_and_auto_is_no_worse(problem: Problem) -> None:
    for schedule in all_baselines(problem).values():
        budget = walk(problem, schedule).peak
        auto = solve(problem, budget)
        assert auto.cost is not None
        for name in NAMES:
            found = solve(problem, budget, name)
            if found.cost is None:
                assert found.schedule is None
                assert found.reason
                continue
            assert found.schedule is not None
            assert found.peak is not None
            assert walk(problem, found.schedule).time == found.cost >= auto.cost >= found.bound
            assert walk(problem, found.schedule).peak == found.peak <= budget


@settings(deadline=None, max_examples=30)
@given(problems(max_nodes=6, max_blocks=3))
def test_frontier_is_monotone_and_its_lower_end_is_proven(problem: Problem) -> None:
    curve = frontier(problem)
    assert [a > b for (_, a), (_, b) in pairwise(curve.points)] == [True] * (len(curve.points) - 1)
    assert [a < b for (a, _), (b, _) in pairwise(curve.points)] == [True] * (len(curve.points) - 1)
    assert curve.points[0][0] == curve.min_budget >= curve.lower
    assert curve.points[-1][0] <= curve.max_budget == walk(problem, keep_everything(problem)).peak
    assert curve.points[-1][1] == 0
    if curve.lower:
        refused = solve(problem, curve.lower - 1)
        assert refused.status == "infeasible"
        assert "alone needs" in refused.reason


def test_bound_meets_the_plan_of_a_transformer() -> None:
    """Five layers at four fifths of the memory: proven optimal among all schedules; at a half, within one per cent."""
    problem = gpt_chain(5)
    keep = walk(problem, keep_everything(problem)).peak
    found = solve(problem, round(0.8 * keep), "rotor")
    assert found.status == "optimal"
    assert found.cost is not None
    assert found.cost > problem.eager_time
    half = solve(problem, keep // 2, "rotor")
    assert half.status == "feasible"
    assert half.gap < 0.01
    assert "every schedule that the walker accepts" in half.reason


def test_a_time_limit_gives_the_best_so_far_and_says_so() -> None:
    problem = gpt_chain(3)
    keep = walk(problem, keep_everything(problem)).peak
    found = solve(problem, keep // 2, "rotor", time_limit=0.01)
    assert found.cost is not None
    assert found.status == "feasible"
    assert "the time limit of 0.01 s cut the search short" in found.reason


def test_ctrl_c_gives_the_best_so_far() -> None:
    problem = gpt_chain(3)
    keep = walk(problem, keep_everything(problem)).peak
    seen: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == 1:
            raise KeyboardInterrupt

    found = solve(problem, keep // 2, progress=interrupt)
    assert seen[0].doing.startswith("blocks")
    assert found.status == "feasible"
    assert found.reason.startswith("stopped by Ctrl-C")


@pytest.mark.filterwarnings("ignore:PULP_CBC_CMD is deprecated:DeprecationWarning")
def test_any_solver_of_pulp() -> None:
    problem = gpt_chain(2)
    budget = round(0.8 * walk(problem, keep_everything(problem)).peak)
    costs = [solve(problem, budget, "rotor", milp=name).cost for name in ("HiGHS", "PULP_CBC_CMD")]
    assert costs[0] == costs[1]


def test_a_missing_solver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = gpt_chain(1)
    budget = round(0.9 * walk(problem, keep_everything(problem)).peak)
    with pytest.raises(ProblemError, match="milp='NONE' is not available; PuLP finds:"):
        solve(problem, budget, milp="NONE")
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(SolverError, match="HiGHS is not installed: pip install highspy, or name another solver"):
        solve(problem, budget)


def test_a_saved_plan_of_one_budget_serves_another() -> None:
    """Whatever was walked before is remembered, so that asking in any order gives no worse plans."""
    problem = lin_relu_lin()
    planner = ChainPlanner(problem, grid=Grid(threads=1))
    curve = planner.frontier()
    for budget, overhead in curve.points:
        assert planner.solve(budget).overhead <= overhead


def homogeneous(count: int) -> Problem:
    """One node a block, whose backward reads what the node saves."""
    data: list[Data] = []
    nodes: list[Node] = []
    for i in range(count):
        reads = (2 * i - 2,) if i else ()
        data += [Data(f"x{i}", 4, i), Data(f"saved{i}", 4, i)]
        nodes.append(Node(f"f{i}", 1, reads, (2 * i, 2 * i + 1), 8, Backward(2, (2 * i + 1,), 4, 8, 4)))
    blocks = tuple(Block(i, i + 1, 0) for i in range(count))
    return Problem(tuple(nodes), tuple(data), frozenset({2 * count - 2}), 4, blocks)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 10, 15, 21])
def test_revolve_runs_as_few_blocks_as_its_paper_says(count: int) -> None:
    """p(l, s) = r l - C(s + r, r - 1) for the least r with l <= C(s + r, s)."""
    problem = homogeneous(count)
    problem.verify()
    for checkpoints in range(count):
        s = checkpoints + 1
        r = next(r for r in range(count + 1) if count <= comb(s + r, s))
        expected = r * count - comb(s + r, r - 1) if r else 0
        assert walk(problem, revolve(problem, checkpoints)).recompute == expected
