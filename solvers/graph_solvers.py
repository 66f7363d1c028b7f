"""The solvers of a ``GraphProblem`` by name, and the whole-graph solver of a ``Problem``, behind ``solvers.solve``."""

from __future__ import annotations

from solvers.graph import GraphProblem
from solvers.graph_baselines import recompute_all, sqrt_segments
from solvers.graph_frontier import frontier_staged
from solvers.graph_walker import walk_graph
from solvers.problem import Problem
from solvers.schedule import Schedule
from solvers.solution import Frontier
from solvers.solve import KINDS, Answer, Judged, Kind, Request, register
from solvers.stages import Runs, schedule_graph, schedule_step, staged_graph, staged_step
from solvers.whole_graph import solve_staged

CLASS = "in the fixed order of first runs, frontier-advancing"


def _judge(problem: GraphProblem, schedule: Schedule) -> Judged:
    walked = walk_graph(problem, schedule)
    return Judged(walked.peak, walked.time)


def _frontier(problem: GraphProblem, request: Request) -> Frontier:
    return frontier_staged(staged_graph(problem), request)


KINDS[GraphProblem] = Kind(_judge, lambda problem: problem.eager_time, _frontier)


def _answer(problem: GraphProblem, runs: Runs) -> Answer:
    return Answer(schedule_graph(problem, runs))


@register(GraphProblem, "keep_all")
def _keep_all(problem: GraphProblem, request: Request) -> Answer:
    return _answer(problem, staged_graph(problem).none())


@register(GraphProblem, "recompute_all")
def _recompute_all(problem: GraphProblem, request: Request) -> Answer:
    return _answer(problem, recompute_all(staged_graph(problem)))


@register(GraphProblem, "sqrt")
def _sqrt(problem: GraphProblem, request: Request) -> Answer:
    return _answer(problem, sqrt_segments(staged_graph(problem)))


@register(GraphProblem, "checkmate")
def _checkmate(problem: GraphProblem, request: Request) -> Answer:
    found = solve_staged(staged_graph(problem), request)
    schedule = None if found.runs is None else schedule_graph(problem, found.runs)
    return Answer(schedule, problem.eager_time + found.bound, CLASS if schedule else "", found.infeasible)


@register(Problem, "checkmate")
def _checkmate_step(problem: Problem, request: Request) -> Answer:
    """The whole training step at once; its class has that of every block program and of the chain in it."""
    found = solve_staged(staged_step(problem), request)
    schedule = None if found.runs is None else schedule_step(problem, found.runs)
    return Answer(schedule, problem.eager_time + found.bound, CLASS if schedule else "", found.infeasible)


@register(GraphProblem, "auto")
def _auto(problem: GraphProblem, request: Request) -> Answer:
    return _checkmate(problem, request)
