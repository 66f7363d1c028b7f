"""The dynamic program against its own recurrence, the walker, and the baselines."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from solver_cases import MIB, gpt_chain, lin_relu_lin
from solver_strategies import limited_problems, problems

from solvers import (
    Backward,
    Block,
    ChainPlanner,
    Data,
    Grid,
    InfeasibleError,
    Node,
    Problem,
    SolverOptions,
    all_baselines,
    format_schedule,
    keep_everything,
    parse_schedule,
    solve,
    solve_chain,
    solver_names,
    walk,
)
from solvers.chain.chain import with_single_nodes
from solvers.chain.costs import ChainCosts, chain_costs, kind_options
from solvers.chain.table import ChainTable

INFINITE = float("inf")
SMALL = Grid(saves=(0.5, 0.0), peaks=(0.5,), fresh_peaks=(0.3,), solver=SolverOptions(gap=0.0))


class Recurrence:
    """``ChainTable``'s equations in exact bytes, enumerated without tables."""

    def __init__(self, costs: ChainCosts) -> None:
        self.c = costs
        self.inner = cache(self._inner)
        self.top = cache(self._top)

    def _inner(self, i: int, j: int, m: int) -> float:
        c = self.c
        times = [INFINITE]
        for o in c.options[i]:
            if m < c.backward_base[i] + o.backward_peak:
                continue
            if i == j and o.fresh:
                times.append(o.time)
            elif m >= c.rerun_base[j] + o.forward_peak:
                left = m - o.save - c.interface_bytes[i][i + 1]
                times.append(o.forward_time + o.time + (0 if i == j else self.inner(i + 1, j, left)))
        for k in range(i + 1, j + 1):
            if m >= c.rerun_base[j] + max(c.interface_bytes[i][b] + c.pass_peak[b] for b in range(i, k)):
                again = self.inner(k, j, m - c.interface_bytes[i][k]) + self.inner(i, k - 1, m)
                times.append(sum(c.pass_time[i:k]) + again)
        return min(times)

    def _top(self, i: int, m: int) -> float:
        c = self.c
        if i == c.blocks:
            return 0 if m >= c.loss_peak else INFINITE
        times = [INFINITE]
        for o in c.options[i]:
            if m >= max(c.first_base[i] + o.forward_peak, c.backward_base[i] + o.backward_peak):
                times.append(o.time + self.top(i + 1, m - o.save - c.interface_bytes[i][i + 1]))
        for k in range(i + 1, c.blocks + 1):
            if m >= max(c.interface_bytes[i][b] + c.pass_peak[b] + c.first_base[b] for b in range(i, k)):
                times.append(self.top(k, m - c.interface_bytes[i][k]) + self.inner(i, k - 1, m))
        return min(times)


@settings(deadline=None, max_examples=60)
@given(problems(max_nodes=6, max_blocks=4))
def test_table_is_the_recurrence(problem: Problem) -> None:
    costs = chain_costs(problem, kind_options(problem, SMALL))
    table = ChainTable(costs, 1, costs.keep_everything_need() + 1)
    expected = Recurrence(costs)
    for m in range(0, table.size + 1, max(1, table.size // 12)):
        assert table.top[0, m] == expected.top(0, m)
    assert table.top[0, costs.keep_everything_need()] == 0


@settings(deadline=None, max_examples=60)
@given(problems(max_nodes=6, max_blocks=4))
def test_plans_fit_and_are_no_worse_than_baselines(problem: Problem) -> None:
    planner = ChainPlanner(problem, grid=SMALL)
    frontier = planner.frontier()
    last = None
    for budget in range(frontier.min_budget, frontier.max_budget + 1):
        solution = planner.solve(budget)
        assert walk(problem, solution.schedule) == solution.walk
        assert solution.peak <= budget
        assert last is None or solution.time <= last
        last = solution.time
    assert planner.solve(frontier.max_budget).overhead == 0
    for schedule in all_baselines(problem).values():
        walked = walk(problem, schedule)
        assert planner.solve(walked.peak).time <= walked.time
    with pytest.raises(InfeasibleError) as error:
        planner.solve(frontier.min_budget - 1)
    assert error.value.min_budget == frontier.min_budget


@settings(deadline=None, max_examples=40)
@given(problems(max_nodes=6, max_blocks=4, plain=True))
def test_nominal_memory_of_plain_chains_is_never_exceeded(problem: Problem) -> None:
    """Without constants that are only estimates, what the table promises is what the walker sees."""
    costs = chain_costs(problem, kind_options(problem, SMALL))
    table = ChainTable(costs, 1, costs.keep_everything_need() + 1)
    planner = ChainPlanner(problem, kind_options(problem, SMALL), slots=costs.keep_everything_need() + 1)
    for m in table.breakpoints():
        assert planner.solve(m).walk.recompute <= table.top[0, m]


@settings(deadline=None, max_examples=30)
@given(limited_problems(max_nodes=5))
def test_all_solvers_heed_where_nodes_may_run_again(problem: Problem) -> None:
    whole = walk(problem, keep_everything(problem)).peak
    for name in solver_names(problem):  # the walker judges what they return
        found = solve(problem, budget := whole * 3 // 4, name)
        assert found.peak is None or found.peak <= budget
        assert solve(problem, whole, name).cost is not None or name not in ("auto", "rotor", "checkmate", "keep_all")


def test_infeasible_budget_says_what_would_do() -> None:
    with pytest.raises(InfeasibleError) as error:
        solve_chain(lin_relu_lin(), 3 * MIB)
    assert error.value.min_budget == 7 * MIB
    assert str(error.value) == (
        "a budget of 3.0 MiB is too small: the least this solver can plan for is 7.0 MiB (7340032 bytes), "
        "set by step 8 (bwd.relu); raise the budget or use a smaller batch"
    )


def test_transformer_chain() -> None:
    problem = gpt_chain(12)
    problem.verify()
    planner = ChainPlanner(problem, grid=Grid(saves=(0.7, 0.5, 0.3, 0.1, 0.0), peaks=(), fresh_peaks=(0.5,)))
    frontier = planner.frontier()
    overheads = [overhead for _, overhead in frontier.points]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[-1] == 0
    assert frontier.max_budget == walk(problem, keep_everything(problem)).peak
    third = planner.solve(frontier.max_budget // 3)
    assert third.overhead < 0.1
    assert parse_schedule(problem, format_schedule(problem, third.schedule)) == third.schedule
    json.dumps(frontier.points)


def test_a_chain_in_one_block_is_planned_as_a_chain() -> None:
    """Options of one block have no checkpoints between its nodes."""
    n = 12
    nodes = tuple(
        Node(f"n{i}", 100, (i - 1,) if i else (), (i,), 10, Backward(200, (i - 1,) if i else (), 10, 20, 10))
        for i in range(n)
    )
    data = tuple(Data(f"d{i}", 10, i) for i in range(n))
    whole = Problem(nodes, data, frozenset(), 0, (Block(0, n, 0),))
    whole.verify()
    chain = with_single_nodes(whole)
    assert len(chain.blocks) == n
    for kept in (3, 4, 6):
        budget = kept * 10 + 20
        best = ChainPlanner(whole).solve(budget)
        assert best.time <= ChainPlanner(chain, grid=Grid(unlimited=False, peaks=(), fresh_peaks=())).solve(budget).time
