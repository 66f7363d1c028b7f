"""The solvers of a ``Problem`` by name, behind ``solvers.solve``."""

from __future__ import annotations

from solvers.baselines import checkpoint_blocks, chen_sqrt, keep_everything, recompute_all
from solvers.chain import ChainPlanner
from solvers.chain import frontier as chain_frontier
from solvers.errors import InfeasibleError
from solvers.problem import Problem
from solvers.schedule import Schedule
from solvers.solution import Frontier
from solvers.solve import KINDS, Answer, Judged, Kind, Request, register
from solvers.walker import walk


def _judge(problem: Problem, schedule: Schedule) -> Judged:
    walked = walk(problem, schedule)
    return Judged(walked.peak, walked.time)


def _frontier(problem: Problem, request: Request) -> Frontier:
    return chain_frontier(problem)


KINDS[Problem] = Kind(_judge, lambda problem: problem.eager_time, _frontier)


@register(Problem, "keep_all")
def _keep_all(problem: Problem, request: Request) -> Answer:
    return Answer(keep_everything(problem))


@register(Problem, "recompute_all")
def _recompute_all(problem: Problem, request: Request) -> Answer:
    return Answer(recompute_all(problem))


@register(Problem, "every_block")
def _every_block(problem: Problem, request: Request) -> Answer:
    return Answer(checkpoint_blocks(problem))


@register(Problem, "sqrt")
def _sqrt(problem: Problem, request: Request) -> Answer:
    return Answer(chen_sqrt(problem))


@register(Problem, "rotor")
def _rotor(problem: Problem, request: Request) -> Answer:
    """Options per block, then the dynamic program; keeping everything needs no solver."""
    keep = keep_everything(problem)
    if walk(problem, keep).peak <= request.budget:
        return Answer(keep, solver="keep_all")
    try:
        return Answer(ChainPlanner(problem).solve(request.budget).schedule)
    except InfeasibleError as error:
        return Answer(None, reason=str(error))


@register(Problem, "auto")
def _auto(problem: Problem, request: Request) -> Answer:
    return _rotor(problem, request)
