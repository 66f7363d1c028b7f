"""The solvers of a ``Problem`` by name, behind ``solvers.solve``.

``rotor``: options per block, then the dynamic program (``solvers.chain``). ``auto``: rotor, then, where its plan is
not proven to be the best and the problem is small, ``checkmate`` from there: the whole step as one program
(``solvers.whole_graph``; on its own, ``solvers.graph_solvers`` has it). Baselines: ``keep_all``,
``recompute_all``, ``every_block``, ``sqrt``, ``revolve``. All of them carry ``solvers.chain_bound``'s bound, which
holds for every schedule that the walker accepts.
"""

from __future__ import annotations

from collections.abc import Iterable

from solvers.baselines import checkpoint_blocks, chen_sqrt, keep_everything, recompute_all
from solvers.chain import ChainPlan, ChainPlanner
from solvers.chain_bound import least_budget, lower_bound
from solvers.errors import InfeasibleError
from solvers.ilp import Grid
from solvers.memory_program import SolverOptions
from solvers.problem import Problem
from solvers.revolve import revolve_schedules
from solvers.schedule import Bwd, Run, Schedule
from solvers.solution import Frontier
from solvers.solve import KINDS, Answer, Judged, Kind, Request, register
from solvers.stages import Runs, schedule_step, staged_step, timeline, without_useless
from solvers.text import format_bytes
from solvers.walker import walk
from solvers.whole_graph import solve_staged

SMALL = 60
"""Nodes up to which ``auto`` lets the whole-graph program try what the chain's has left open."""

ANY = "the bound holds for every schedule that the walker accepts"
CHAIN = f"found with options per block, persistent checkpoints and slots of memory; {ANY}"
WHOLE = "the class: forward and backward order fixed, each node at most once more between two backwards, in order"
STOPPED = "stopped by Ctrl-C; the best schedule so far"


def _judge(problem: Problem, schedule: Schedule) -> Judged:
    walked = walk(problem, schedule)
    return Judged(walked.peak, walked.time)


def _planner(problem: Problem, request: Request) -> ChainPlanner:
    options = SolverOptions(request.milp, request.gap, min(10.0, request.time_limit), request.threads)

    def report(doing: str, part: float) -> None:
        request.report(None, problem.eager_time, f"{doing} {100 * part:.0f} %")

    return ChainPlanner(problem, grid=Grid(solver=options, threads=1), report=report, remaining=request.remaining)


def _frontier(problem: Problem, request: Request) -> Frontier:
    return _planner(problem, request).frontier()


KINDS[Problem] = Kind(_judge, lambda problem: problem.eager_time, _frontier)


def _first_fitting(problem: Problem, request: Request, schedules: Iterable[Schedule]) -> Answer:
    """The cheapest of ``schedules`` that fits, with the bound for its budget."""
    walked = [(walk(problem, s), s) for s in schedules]
    fitting = [(w.time, w.peak, s) for w, s in walked if w.peak <= request.budget]
    if not fitting:
        least = min(w.peak for w, _ in walked)
        return Answer(None, reason=f"the least this solver needs is {format_bytes(least)} ({least} bytes)")
    schedule = min(fitting, key=lambda x: x[:2])[2]
    return Answer(schedule, _bound(problem, request), ANY)


def _bound(problem: Problem, request: Request) -> int:
    """The bound for the budget. It gets a little time even where none is left: it says how good a plan is."""
    return lower_bound(problem, request.budget, request.milp, max(0.2, min(2.0, request.remaining())))


@register(Problem, "keep_all")
def _keep_all(problem: Problem, request: Request) -> Answer:
    return _first_fitting(problem, request, [keep_everything(problem)])


@register(Problem, "recompute_all")
def _recompute_all(problem: Problem, request: Request) -> Answer:
    return _first_fitting(problem, request, [recompute_all(problem)])


@register(Problem, "every_block")
def _every_block(problem: Problem, request: Request) -> Answer:
    return _first_fitting(problem, request, [checkpoint_blocks(problem)])


@register(Problem, "sqrt")
def _sqrt(problem: Problem, request: Request) -> Answer:
    return _first_fitting(problem, request, [chen_sqrt(problem)])


@register(Problem, "revolve")
def _revolve(problem: Problem, request: Request) -> Answer:
    return _first_fitting(problem, request, revolve_schedules(problem))


def _too_small(problem: Problem, budget: int) -> str:
    """Why no schedule fits, where one step alone shows it."""
    least, step = least_budget(problem)
    if least <= budget:
        return ""
    return f"{step} alone needs {format_bytes(least)} ({least} bytes), more than the budget of {budget} bytes"


def _plan(problem: Problem, request: Request) -> tuple[ChainPlan | None, str]:
    """The chain's plan, and why there is none or what cut the search short."""
    planner = _planner(problem, request)
    try:
        plan: ChainPlan | None = planner.solve(request.budget)
    except InfeasibleError as error:
        return None, str(error)
    except KeyboardInterrupt:
        return planner.best_known(request.budget), STOPPED
    return plan, "" if request.remaining() > 0 else f"the time limit of {request.time_limit:g} s cut the search short"


@register(Problem, "rotor")
def _rotor(problem: Problem, request: Request) -> Answer:
    """Options per block, then the dynamic program; keeping everything needs no solver."""
    why = _too_small(problem, request.budget)
    if why:
        return Answer(None, infeasible=why)
    keep = keep_everything(problem)
    if walk(problem, keep).peak <= request.budget:
        return Answer(keep, solver="keep_all")
    plan, note = _plan(problem, request)
    if plan is None:
        return Answer(None, reason=note)
    bound = _bound(problem, request) if note != STOPPED else 0
    request.report(plan.time, bound, "chain")
    return Answer(plan.schedule, bound, f"{note}; {CHAIN}" if note else CHAIN)


def _whole(problem: Problem, request: Request, start: Schedule | None) -> Answer:
    """The whole step as one integer program."""
    staged = staged_step(problem)
    found = solve_staged(staged, request, None if start is None else _runs(problem, start, request.budget))
    bound = problem.eager_time + found.bound
    if found.runs is None:
        return Answer(None, bound, STOPPED if found.interrupted else "", found.infeasible)
    reason = f"{STOPPED}; {WHOLE}" if found.interrupted else WHOLE
    return Answer(schedule_step(problem, found.runs), bound, reason, solver="checkmate")


def _runs(problem: Problem, schedule: Schedule, budget: int) -> Runs | None:
    """``schedule`` as reruns per stage; None if it runs a node twice in a stage to a purpose."""
    stages: list[set[int]] = [set() for _ in range(len(problem.nodes) + 1)]
    now: set[int] = set()
    first = len(problem.nodes)
    for step in schedule:
        if isinstance(step, Run):
            first -= 1
            if first < 0:
                now.add(step.node)
        elif isinstance(step, Bwd):
            stages.append(now)
            now = set()
    staged = staged_step(problem)
    runs = without_useless(staged, [sorted(stage) for stage in stages])
    return runs if timeline(staged, runs).peak <= budget else None


@register(Problem, "auto")
def _auto(problem: Problem, request: Request) -> Answer:
    """rotor; then checkmate, where the plan is not proven to be the best and the problem is small."""
    chain = _rotor(problem, request)
    if chain.infeasible or chain.solver or STOPPED in chain.reason or len(problem.nodes) > SMALL:
        return chain
    cost = None if chain.schedule is None else walk(problem, chain.schedule).time
    if request.remaining() <= 0 or (cost is not None and cost - chain.bound <= request.gap * cost):
        return chain
    whole = _whole(problem, request, chain.schedule)
    if whole.infeasible:
        return whole
    if cost is not None and (whole.schedule is None or walk(problem, whole.schedule).time >= cost):
        # The chain may run a node twice between two backwards; then the whole program's bound is not for it.
        bound = max(chain.bound, whole.bound) if whole.bound <= cost else chain.bound
        return Answer(chain.schedule, bound, chain.reason, solver="rotor")
    return Answer(whole.schedule, max(chain.bound, whole.bound), whole.reason, solver="checkmate")
