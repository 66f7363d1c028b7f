"""Nodes that take less time right after the run that made what they read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_cases import lin_relu_lin
from solver_strategies import problems
from test_solvers_bound import every_order
from test_solvers_schedule import orders

from solvers import (
    Backward,
    Block,
    ChainPlanner,
    Data,
    Node,
    Problem,
    ProblemError,
    improve,
    keep_everything,
    parse_problem,
    solve,
    solver_names,
    walk,
    with_deletes,
)
from solvers.chain.bound import lower_bound
from solvers.chain.refine import runs_of
from solvers.files.files import format_problem
from solvers.schedule import Bwd, Del, Loss, Run
from solvers.whole.stages import schedule_step, staged_step


@st.composite
def with_warm_runs(draw: st.DrawFn, plain: bool = True, max_nodes: int = 5) -> Problem:
    problem = draw(problems(max_nodes=max_nodes, plain=plain))
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


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_schedule_is_below_the_bound(data: st.DataObject) -> None:
    """Reruns in any order, any number of times, also of what is live, so that others are warm."""
    problem = data.draw(with_warm_runs(plain=False))
    walked = walk(problem, with_deletes(problem, data.draw(orders(problem))))
    assert lower_bound(problem, walked.peak) <= walked.time


@settings(max_examples=40, deadline=None)
@given(with_warm_runs(plain=False, max_nodes=3))
def test_the_bound_is_not_above_brute_force(problem: Problem) -> None:
    walked = [walk(problem, with_deletes(problem, order)) for order in every_order(problem)]
    for budget in {w.peak for w in walked}:
        assert lower_bound(problem, budget) <= min(w.time for w in walked if w.peak <= budget)


@settings(max_examples=60, deadline=None)
@given(with_warm_runs(plain=False), st.data())
def test_whole_graph_programs_count_as_the_walker_does(problem: Problem, data: st.DataObject) -> None:
    runs = runs_of(problem, with_deletes(problem, data.draw(orders(problem))))
    assert staged_step(problem).cost(runs) == walk(problem, schedule_step(problem, runs)).recompute


def a_chain(*warm: int | None) -> Problem:
    """Three nodes behind an input, of 100 ns each, whose backwards read what the node before made."""
    nodes = [Node("input", 0, (), (0,), 1, None, rerun=False)]
    for k, least in enumerate(warm, 1):
        nodes.append(Node(f"f{k}", 100, (k - 1,), (k,), 1, Backward(100, (k - 1, k), 1, 2, 1), warm=least))
    data = tuple(Data(n.name, 1, i) for i, n in enumerate(nodes))
    return Problem(tuple(nodes), data, frozenset(), 0, (Block(0, len(nodes), 0),))


def test_a_run_from_memory_is_bounded_by_its_whole_time() -> None:
    problem = a_chain(10, 10, 10, 10)
    budget = walk(problem, keep_everything(problem)).peak - 1
    # Something must run again. Its inputs stayed: whatever it is, the first run takes 100 ns.
    assert lower_bound(problem, budget) == problem.eager_time + 100 == solve(problem, budget).cost


def test_running_what_is_live_again_may_pay() -> None:
    """f1 takes 1 ns, and f2 90 less behind it: both run again although what f1 makes has stayed."""
    problem = a_chain(1, 10, 100, 100)
    cheap = replace(problem.nodes[1], time=1)
    problem = replace(problem, nodes=(problem.nodes[0], cheap, *problem.nodes[2:]))
    first = [Run(0), Run(1), Run(2), Run(3), Del(2), Run(4), Loss(), Bwd(4), Del(4)]
    both = walk(problem, (*first, Run(1), Run(2), Bwd(3), Bwd(2), Bwd(1)))
    alone = walk(problem, (*first, Run(2), Bwd(3), Bwd(2), Bwd(1)))
    assert (both.peak, both.recompute) == (alone.peak, 11)
    assert alone.recompute == 100
    assert lower_bound(problem, both.peak) <= both.time


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
