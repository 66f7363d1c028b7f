"""The solvers of a ``GraphProblem`` by name, behind ``solvers.solve``.

``checkmate`` (and ``auto``): the whole graph as one integer program with lazily generated positions
(``solvers.whole.whole_graph``). ``hierarchical``: the same with most of the time for neighbourhoods, for graphs far too
large for one program. ``greedy``: the fast heuristic alone (``solvers.whole.repair``), which proves nothing. Baselines:
``keep_all``, ``recompute_all``, ``sqrt``.

Each function imports what it calls: `import solvers` is to be quick, and training steps need no solver of graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from solvers.curve import Frontier
from solvers.solve import KINDS, Answer, Kind, Request, register
from solvers.whole.graph import GraphProblem
from solvers.whole.walker import walk_graph

if TYPE_CHECKING:
    from solvers.whole.stages import Reruns

CLASS = "in the fixed order of first runs, frontier-advancing"


def _frontier(problem: GraphProblem, request: Request) -> Frontier:
    from solvers.whole.frontier import frontier_staged
    from solvers.whole.stages import staged_graph

    return frontier_staged(staged_graph(problem), request)


KINDS[GraphProblem] = Kind(walk_graph, lambda problem: problem.eager_time, _frontier)


def _answer(problem: GraphProblem, runs: Reruns) -> Answer:
    from solvers.whole.stages import schedule_graph

    return Answer(schedule_graph(problem, runs))


@register(GraphProblem, "keep_all")
def _keep_all(problem: GraphProblem, request: Request) -> Answer:
    from solvers.whole.stages import staged_graph

    return _answer(problem, staged_graph(problem).none())


@register(GraphProblem, "recompute_all")
def _recompute_all(problem: GraphProblem, request: Request) -> Answer:
    from solvers.whole.baselines import recompute_all
    from solvers.whole.stages import staged_graph

    return _answer(problem, recompute_all(staged_graph(problem)))


@register(GraphProblem, "sqrt")
def _sqrt(problem: GraphProblem, request: Request) -> Answer:
    from solvers.whole.baselines import sqrt_segments
    from solvers.whole.stages import staged_graph

    return _answer(problem, sqrt_segments(staged_graph(problem)))


@register(GraphProblem, "greedy")
def _greedy(problem: GraphProblem, request: Request) -> Answer:
    from solvers.whole.repair import repair
    from solvers.whole.stages import staged_graph

    staged = staged_graph(problem)
    runs = repair(staged, request.budget, staged.none(), request.remaining)
    return (
        Answer(None, reason="no drop of the heuristic reduces what exceeds the budget, or its time is up")
        if runs is None
        else _answer(problem, runs)
    )


def _whole(problem: GraphProblem, request: Request, hierarchical: bool) -> Answer:
    from solvers.whole.stages import schedule_graph, staged_graph
    from solvers.whole.whole_graph import solve_staged

    solution = solve_staged(staged_graph(problem), request, hierarchical=hierarchical)
    bound = problem.eager_time + solution.bound
    if solution.runs is None:
        return Answer(None, bound, infeasible=solution.infeasible)
    stopped = "stopped by Ctrl-C; the best so far " if solution.interrupted else ""
    return Answer(schedule_graph(problem, solution.runs), bound, stopped + CLASS)


@register(GraphProblem, "checkmate")
def _checkmate(problem: GraphProblem, request: Request) -> Answer:
    return _whole(problem, request, hierarchical=False)


@register(GraphProblem, "hierarchical")
def _hierarchical(problem: GraphProblem, request: Request) -> Answer:
    return _whole(problem, request, hierarchical=True)


@register(GraphProblem, "auto")
def _auto(problem: GraphProblem, request: Request) -> Answer:
    return _checkmate(problem, request)
