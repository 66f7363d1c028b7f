"""The solvers of a ``GraphProblem`` by name, behind ``solvers.solve``.

``checkmate`` (and ``auto``): the whole graph as one integer program with lazily generated positions
(``solvers.whole.whole_graph``). ``hierarchical``: the same with most of the time for neighbourhoods, for graphs far too
large for one program. ``greedy``: the fast heuristic alone (``solvers.whole.repair``), which proves nothing. Baselines:
``keep_all``, ``recompute_all``, ``sqrt``.

Each function imports what it calls: `import solvers` is to be quick, and training steps need no solver of graphs.
"""

from __future__ import annotations

from solvers.curve import Frontier
from solvers.solve import KINDS, Answer, Kind, Request, SolverFunction, register
from solvers.whole.graph import GraphProblem
from solvers.whole.walker import walk_graph

CLASS = "in the fixed order of first runs, frontier-advancing"


def _frontier(problem: GraphProblem, request: Request) -> Frontier:
    from solvers.whole.frontier import frontier_staged
    from solvers.whole.stages import staged_graph

    return frontier_staged(staged_graph(problem), request)


KINDS[GraphProblem] = Kind(walk_graph, lambda problem: problem.eager_time, _frontier)


def _heuristic(name: str) -> SolverFunction:
    """One of those that prove nothing."""

    def solver(problem: GraphProblem, request: Request) -> Answer:
        from solvers.whole.baselines import recompute_all, sqrt_segments
        from solvers.whole.repair import repair
        from solvers.whole.stages import schedule_graph, staged_graph

        staged = staged_graph(problem)
        runs = {
            "keep_all": staged.none,
            "recompute_all": lambda: recompute_all(staged),
            "sqrt": lambda: sqrt_segments(staged),
            "greedy": lambda: repair(staged, request.budget, staged.none(), request.remaining),
        }[name]()
        if runs is None:
            return Answer(None, reason="no drop of the heuristic reduces what exceeds the budget, or its time is up")
        return Answer(schedule_graph(problem, runs))

    return solver


def _whole(hierarchical: bool) -> SolverFunction:
    """The program of the whole graph; ``hierarchical``: as for ``solve_staged``."""

    def solver(problem: GraphProblem, request: Request) -> Answer:
        from solvers.whole.stages import schedule_graph, staged_graph
        from solvers.whole.whole_graph import solve_staged

        solution = solve_staged(staged_graph(problem), request, hierarchical=hierarchical)
        bound = problem.eager_time + solution.bound
        if solution.runs is None:
            return Answer(None, bound, infeasible=solution.infeasible)
        stopped = "stopped by Ctrl-C; the best so far " if solution.interrupted else ""
        return Answer(schedule_graph(problem, solution.runs), bound, stopped + CLASS)

    return solver


for _name in ("keep_all", "recompute_all", "sqrt", "greedy"):
    register(GraphProblem, _name)(_heuristic(_name))
for _name in ("auto", "checkmate", "hierarchical"):
    register(GraphProblem, _name)(_whole(_name == "hierarchical"))
