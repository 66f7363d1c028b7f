"""Nodes that take less time right after the run that made what they read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_cases import lin_relu_lin
from solver_strategies import problems

from solvers import ChainPlanner, Problem, ProblemError, improve, parse_problem, solve, solver_names, walk
from solvers.chain.bound import lower_bound
from solvers.files.files import format_problem
from solvers.schedule import Bwd, Del, Loss, Run


@st.composite
def with_warm_runs(draw: st.DrawFn) -> Problem:
    problem = draw(problems(plain=True))
    nodes = [replace(n, warm=draw(st.integers(0, n.time) | st.none())) for n in problem.nodes]
    return replace(problem, nodes=tuple(nodes))


def test_a_run_is_warm_where_runs_before_it_in_the_same_stage_made_all_that_it_reads() -> None:
    problem = lin_relu_lin()
    nodes = [replace(n, warm=n.time // 2) for n in problem.nodes]
    problem = replace(problem, nodes=tuple(nodes))
    forward = [Run(0), Run(1), Run(2), Del(1), Run(3), Del(2), Loss()]
    together = [Run(1), Run(2), Bwd(3), Del(2), Run(2), Bwd(2), Bwd(1)]
    walked = walk(problem, (*forward, *together))
    # lin1 reads what stayed; relu what lin1 made, and behind a backward what had been made before it
    assert walked.recompute == nodes[1].time + nodes[2].time // 2 + nodes[2].time
    assert problem.eager_time == lin_relu_lin().eager_time


def test_warm_runs_take_no_longer_than_others() -> None:
    problem = lin_relu_lin()
    nodes = (replace(problem.nodes[0], warm=1), *problem.nodes[1:])
    with pytest.raises(ProblemError, match=r"node 0 \(input\): warm is 1 ns"):
        replace(problem, nodes=nodes).verify()


@settings(max_examples=60, deadline=None)
@given(with_warm_runs())
def test_bounds_hold_for_what_takes_place(problem: Problem) -> None:
    for plan in ChainPlanner(problem).walked():
        assert lower_bound(problem, plan.peak) <= plan.time
        better, bound = improve(problem, plan, plan.peak, 10.0)
        assert bound <= better.time <= plan.time
        assert better.walk == walk(problem, better.schedule)


@settings(max_examples=40, deadline=None)
@given(with_warm_runs(), st.floats(0, 1))
def test_no_solver_claims_more_than_the_walker_counts(problem: Problem, share: float) -> None:
    peaks = [plan.peak for plan in ChainPlanner(problem).walked()]
    budget = int(min(peaks) + share * (max(peaks) - min(peaks)))
    costs = {}
    for name in solver_names(Problem):
        found = solve(problem, budget, name, time_limit=10.0)
        if found.schedule is not None:
            costs[name] = found.cost
            assert found.bound <= walk(problem, found.schedule).time == found.cost
            assert all(found.bound <= other for other in costs.values()), (name, found.bound, costs)


@settings(max_examples=30, deadline=None)
@given(with_warm_runs())
def test_they_are_in_files(problem: Problem) -> None:
    assert parse_problem(format_problem(problem)) == problem
