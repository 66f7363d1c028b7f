"""The whole-graph solver against every schedule of its class, on graphs and steps small enough to enumerate."""

from __future__ import annotations

from itertools import pairwise

from graph_strategies import cheapest, graphs, least_costs
from hypothesis import example, given, settings
from solver_strategies import limited_problems, problems

from solvers import Backward, Block, Data, GraphProblem, Node, Problem, Request, frontier, solve, walk, walk_graph
from solvers.whole.stages import Reruns, schedule_graph, schedule_step, staged_graph, staged_step, timeline
from solvers.whole.whole_graph import solve_staged


def graph_costs(problem: GraphProblem) -> list[tuple[int, int]]:
    def judge(runs: Reruns) -> tuple[int, int]:
        walked = walk_graph(problem, schedule_graph(problem, runs))
        assert timeline(staged, runs).peak == walked.peak
        return walked.peak, walked.time

    staged = staged_graph(problem)
    return least_costs(staged, judge)


@settings(deadline=None, max_examples=60)
@given(graphs())
def test_graphs_are_solved_to_the_optimum_of_the_class(problem: GraphProblem) -> None:
    pareto = graph_costs(problem)
    for budget in sorted({max(0, peak + delta) for peak, _ in pareto for delta in (-1, 0, 1)}):
        found = solve(problem, budget, "checkmate", gap=0.0)
        assert found.cost == cheapest(pareto, budget)
        assert found.status == ("infeasible" if found.cost is None else "optimal")
        assert found.cost is None or found.bound == found.cost


# Its first datum cannot go: a rerun in time for the third node would be in the forward phase.
KEPT = Problem(
    nodes=(
        Node("kept", 0, (), (0,), 1, Backward(0, (), 0, 0, 0)),
        Node("large", 0, (), (), 1, None),
        Node("reads", 0, (0,), (), 0, None),
    ),
    data=(Data("kept", 1, 0),),
    held=frozenset(),
    loss=0,
    blocks=(Block(0, 3, 0),),
)

# Its loss has no room for the gradient that it leaves: the peak is where the first of two data has been deleted.
NO_ROOM = Problem(
    nodes=(Node("f", 1, (), (0, 1), 1, Backward(1, (), 1, 1, 0)),),
    data=(Data("empty", 0, 0), Data("output", 1, 0)),
    held=frozenset(),
    loss=0,
    blocks=(Block(0, 1, 0),),
    returned=frozenset({0, 1}),
)

# The loss reads one datum of the second node, and the backward before which that node runs again reads the other.
HALF_DROPPED = Problem(
    nodes=(
        Node("f", 0, (), (0,), 0, Backward(2, (0,), 2, 2, 0), rerun=False),
        Node("two", 1, (0,), (1, 2), 3, Backward(1, (1,), 1, 2, 0)),
        Node("reads", 1, (2,), (3,), 1, None, rerun=False),
    ),
    data=(Data("f", 0, 0), Data("dropped", 1, 1), Data("returned", 2, 1), Data("reads", 1, 2)),
    held=frozenset(),
    loss=1,
    blocks=(Block(0, 3, 0),),
    returned=frozenset({2}),
)


def test_deletions_beside_more_gradients_than_the_loss_has_room_for_count() -> None:
    staged = staged_step(NO_ROOM)
    schedule = schedule_step(NO_ROOM, staged.none())
    assert walk(NO_ROOM, schedule).timeline == (1, 1, 2, 1, 1)
    assert timeline(staged, staged.none()).memory.tolist() == [1, 2, 1]
    assert [solve(NO_ROOM, budget, "checkmate").status for budget in (1, 2)] == ["unknown", "optimal"]


@settings(deadline=None, max_examples=60)
@given(problems(max_nodes=3) | limited_problems())
@example(KEPT)
@example(NO_ROOM)
@example(HALF_DROPPED)
def test_training_steps_are_solved_to_the_optimum_of_the_class(problem: Problem) -> None:
    def judge(runs: Reruns) -> tuple[int, int]:
        walked = walk(problem, schedule_step(problem, runs))
        assert timeline(staged, runs).peak == walked.peak
        return walked.peak, walked.recompute

    staged = staged_step(problem)
    pareto = least_costs(staged, judge)
    for budget in sorted({max(0, peak + delta) for peak, _ in pareto for delta in (-1, 0, 1)}):
        found = solve_staged(staged, Request(budget, gap=0.0))
        cost, least = None if found.runs is None else judge(found.runs)[1], cheapest(pareto, budget)
        if staged.rises:  # what is claimed holds, but may be less than what is true
            assert cost is None or (least is not None and found.bound <= least <= cost)
            assert least is None or not found.infeasible
            continue
        assert cost == least
        assert found.bound == cost or (cost is None and found.infeasible)


@settings(deadline=None, max_examples=20)
@given(graphs(max_nodes=4))
def test_frontier_is_the_pareto_set_where_it_looks(problem: GraphProblem) -> None:
    pareto = graph_costs(problem)
    curve = frontier(problem)
    assert curve.exact
    assert curve.min_budget == pareto[0][0]
    costs = [(peak, round(overhead * (problem.eager_time or 1))) for peak, overhead in curve.points]
    assert costs == sorted(costs)
    assert all(b < a for (_, a), (_, b) in pairwise(costs))
    for peak, cost in costs:
        assert cheapest(pareto, peak) == problem.eager_time + cost
