"""Solvers of graphs behind ``solve``: sizes of all scales, odd shapes, limits, interruption, other solvers by name."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from graph_strategies import cheapest, graphs, least_costs
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import ROOT, load

from solvers import (
    Del,
    GraphNode,
    GraphProblem,
    ProblemError,
    Progress,
    Run,
    Schedule,
    ScheduleError,
    Solution,
    frontier,
    solve,
    solver_names,
    walk_graph,
)
from solvers.whole.stages import Reruns, memory, schedule_graph, staged_graph, timeline

TERA = 10**13


instances = load("benchmarks/instances.py")


def graph(*nodes: tuple[int, int, tuple[int, ...]]) -> GraphProblem:
    """Nodes as (time, size, reads)."""
    return GraphProblem(tuple(GraphNode(f"n{i}", *node) for i, node in enumerate(nodes)))


def keep_peak(problem: GraphProblem) -> int:
    peak = solve(problem, 10**18, "keep_all").peak
    assert peak is not None
    return peak


# a and b are read at the start and at the end; in between, c needs most of the memory.
SKIP = graph((5, 4, ()), (3, 3, ()), (1, 1, (0, 1)), (1, 9, (2,)), (1, 1, (3,)), (1, 1, (0, 1, 4)))


def check(problem: GraphProblem, solution: Solution, budget: int) -> None:
    """The solution is what an independent walk says, and the bound is one."""
    if solution.schedule is None:
        assert solution.status in ("infeasible", "unknown")
        assert solution.reason
        return
    walked = walk_graph(problem, solution.schedule)
    assert walked.peak == solution.peak is not None
    assert walked.peak <= budget
    assert walked.time == solution.cost
    assert problem.eager_time <= solution.bound <= walked.time


def test_what_is_dropped_is_the_cheaper_one() -> None:
    assert keep_peak(SKIP) == 17
    found = solve(SKIP, 14, "checkmate")
    assert (found.status, found.cost, found.bound, found.gap) == ("optimal", 15, 15, 0.0)
    assert [s for s in found.schedule or () if s == Run(1)] == [Run(1), Run(1)]
    assert solve(SKIP, 13).cost == 17
    assert solve(SKIP, 10).cost == 20
    assert solve(SKIP, 9).status == "infeasible"
    assert "step 3 alone needs 10 B" in solve(SKIP, 9).reason


def test_ten_bytes_beside_ten_terabytes_decide() -> None:
    """Beside terabytes, a byte is below every tolerance of the solver: only the check in bytes sees it."""
    problem = graph((5, TERA, ()), (3, 10, ()), (1, 1, (0, 1)), (1, TERA, (2,)), (1, 1, (3,)), (1, 1, (0, 1, 4)))
    everything = 2 * TERA + 11
    assert keep_peak(problem) == everything
    costs = [solve(problem, everything - less, "checkmate").cost for less in (0, 1, 10, 11)]
    assert costs == [12, 15, 15, 17]
    assert solve(problem, TERA + 11).status == "infeasible"


SCALES = st.sampled_from([1, 7, 10, 10**6 + 3, TERA])


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_sizes_of_all_scales_in_one_graph(data: st.DataObject) -> None:
    problem = data.draw(graphs(max_nodes=5))
    nodes = (replace(n, size=n.size * data.draw(SCALES), time=n.time * data.draw(SCALES)) for n in problem.nodes)
    problem = GraphProblem(tuple(nodes))

    def judge(runs: Reruns) -> tuple[int, int]:
        walked = walk_graph(problem, schedule_graph(problem, runs))
        return walked.peak, walked.time

    pareto = least_costs(staged_graph(problem), judge)
    for budget in sorted({max(0, peak + delta) for peak, _ in pareto for delta in (-1, 0)}):
        found = solve(problem, budget, "checkmate", gap=1e-6)
        best = cheapest(pareto, budget)
        assert (found.cost is None) == (best is None)
        assert best is None or found.cost is None or best <= found.cost <= best * (1 + 1e-6)


def test_odd_graphs() -> None:
    empty, single = GraphProblem(()), graph((3, 4, ()))
    assert (solve(empty, 0).status, solve(empty, 0).cost, solve(empty, 0).gap) == ("optimal", 0, 0.0)
    assert (solve(single, 4).status, solve(single, 4).peak) == ("optimal", 4)
    assert solve(single, 3).status == "infeasible"
    apart = graph((1, 5, ()), (1, 5, ()), (1, 5, ()))
    assert solve(apart, 5).cost == 3
    free = graph((0, 0, ()), (0, 0, (0,)), (0, 0, (0, 1)))
    assert (solve(free, 0).status, solve(free, 0).cost) == ("optimal", 0)
    equal = graph(*[(1, 2, ())] * 6, (1, 9, ()), (1, 1, tuple(range(6))))
    assert keep_peak(equal) == 21
    assert [solve(equal, b).cost for b in (21, 20, 19, 18, 13)] == [8, 9, 9, 10, 12]
    assert solve(equal, 12).status == "infeasible"  # the last step reads all six


@settings(deadline=None, max_examples=150)
@given(graphs(max_nodes=9, largest=6), st.sampled_from(solver_names(GraphProblem)), st.floats(0, 1))
def test_the_walker_never_rejects(problem: GraphProblem, name: str, fraction: float) -> None:
    budget = round(fraction * keep_peak(problem))
    check(problem, solve(problem, budget, name, time_limit=5), budget)


@settings(deadline=None, max_examples=100)
@given(graphs(max_nodes=7), st.data())
def test_memory_is_that_of_the_walker(problem: GraphProblem, data: st.DataObject) -> None:
    staged = staged_graph(problem)
    runs = tuple(
        tuple(sorted(data.draw(st.sets(st.integers(0, t - 1))))) if t else () for t in range(len(problem.nodes))
    )
    now = timeline(staged, runs)
    assert now.memory.tolist() == memory(staged, now.cells).tolist()
    schedule = schedule_graph(problem, runs)
    walked = walk_graph(problem, schedule)
    assert [m for m, s in zip(walked.timeline, schedule, strict=True) if isinstance(s, Run)] == now.memory.tolist()


FORBIDDEN: list[tuple[str, Schedule]] = [
    ("step 0 (run n2) reads n0, which is not live", (Run(2),)),
    ("step 2 (run n2) reads n1, which is not live", (Run(0), Run(0), Run(2))),
    ("step 0 (del n0) deletes an output that is not live", (Del(0),)),
    ("step 0: no node 9", (Run(9),)),
    ("step 0: no node -1", (Del(-1),)),
    ("step 1 (end): n1 never ran", (Run(0),)),
]


@pytest.mark.parametrize(("message", "steps"), FORBIDDEN)
def test_the_walker_rejects(message: str, steps: Schedule) -> None:
    with pytest.raises(ScheduleError) as error:
        walk_graph(SKIP, steps)
    assert str(error.value) == message


BAD_CALLS = [
    ({"budget": -1}, "budget=-1: bytes cannot be negative"),
    ({"budget": 1.5}, "budget=1.5: give whole bytes as an int"),
    ({"solver": "best"}, "solver='best' is not known for a GraphProblem; choose one of: auto, checkmate"),
    ({"time_limit": 0}, "time_limit=0: give a positive number of seconds"),
    ({"threads": 0}, "threads=0: give a whole number from 1"),
    ({"gap": 1.0}, "gap=1.0: give a fraction"),
    ({"milp": "NoSuch"}, "milp='NoSuch' is not available; PuLP finds:"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS)
def test_bad_calls_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ProblemError) as error:
        solve(SKIP, **{"budget": 14, **arguments})  # type: ignore[arg-type]
    assert str(error.value).startswith(message)


def test_what_is_no_problem_is_refused() -> None:
    with pytest.raises(ProblemError, match="no solver for a str; a problem is one of: GraphProblem, Problem"):
        solve("graph", 1)
    with pytest.raises(ProblemError, match="reads node 1, which is not an earlier node"):
        solve(graph((1, 1, (1,)), (1, 1, ())), 1)


def test_other_solvers_by_name() -> None:
    for problem, budget in ((SKIP, 14), (SKIP, 13), (instances.layered(30, 1), None)):
        budget = budget or round(0.85 * keep_peak(problem))
        ours, cbc = solve(problem, budget), solve(problem, budget, milp="PULP_CBC_CMD")
        assert ours.status == cbc.status == "optimal"
        assert ours.cost == cbc.cost


def test_baselines_and_heuristics_on_a_training_graph() -> None:
    problem = instances.encoder_decoder(2)
    keep = keep_peak(problem)
    best = solve(problem, keep // 2, time_limit=20)
    check(problem, best, keep // 2)
    assert best.status == "optimal"
    for name in ("greedy", "hierarchical"):
        found = solve(problem, keep // 2, name, time_limit=2)
        check(problem, found, keep // 2)
        assert best.bound <= (found.cost or 0)
    everything = solve(problem, keep, "recompute_all")
    segments = solve(problem, keep, "sqrt")
    assert everything.cost is not None and segments.cost is not None and segments.peak is not None
    assert best.bound < segments.cost < everything.cost
    assert segments.peak < keep


def test_cost_does_not_rise_with_the_budget_and_the_frontier_agrees() -> None:
    problem = instances.encoder_decoder(1)
    keep = keep_peak(problem)
    curve = frontier(problem, time_limit=6)
    assert curve.points[-1][1] == 0.0
    assert curve.lower <= curve.min_budget == curve.points[0][0] <= curve.max_budget == keep
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(curve.points))
    costs = [round((1 + overhead) * problem.eager_time) for _, overhead in curve.points]
    for percent in (60, 80, 100):
        budget = keep * percent // 100
        found = solve(problem, budget)
        assert found.status == "optimal"
        within = [cost for (peak, _), cost in zip(curve.points, costs, strict=True) if peak <= budget]
        assert found.bound <= min(within)
    assert curve.points == tuple(sorted(curve.points))


def test_progress_is_reported() -> None:
    heard: list[Progress] = []
    problem = instances.layered(60, 5)
    found = solve(problem, round(0.8 * keep_peak(problem)), progress=heard.append)
    assert heard
    assert all(p.bound <= (found.cost or 0) for p in heard)
    assert [p.bound for p in heard] == sorted(p.bound for p in heard)


INTERRUPTED = """
import os, signal, sys
sys.path[:0] = {tests!r}
from test_graph_solvers import instances, keep_peak, solve, check
problem = instances.layered(300, 2)
budget = keep_peak(problem) * 85 // 100
def heard(p):
    if p.cost is not None:
        print("interrupting", flush=True)
        os.kill(os.getpid(), signal.SIGINT)
found = solve(problem, budget, time_limit=50, gap=0.0, progress=heard)
check(problem, found, budget)
print(found.status)
"""


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_ctrl_c_returns_the_best_so_far() -> None:
    program = INTERRUPTED.format(tests=[str(folder) for folder in Path(__file__).parents[:2]])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    # What was found is checked; whether it is proven depends on the moment of the interrupt.
    assert "interrupting" in done.stdout and done.stdout.splitlines()[-1] in ("feasible", "optimal")
