"""The solvers of a ``Problem`` by name, behind ``solvers.solve``.

``rotor``: options per block, then the dynamic program (``solvers.chain.chain``). ``checkmate``: the whole step as one
integer program (``solvers.chain.refine``). ``auto``: rotor, then, if its plan is not proven optimal, the integer
program, which starts from it. Baselines: ``keep_all``, ``recompute_all``, ``every_block``, ``sqrt``, ``revolve``.
``rotor`` and the baselines return the bound of ``solvers.chain.bound``, for every schedule that the walker accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from solvers.baselines import checkpoint_blocks, chen_sqrt, keep_everything, recompute_all
from solvers.block.ilp import Grid
from solvers.chain.bound import least_budget, lower_bound
from solvers.chain.chain import ChainPlan, ChainPlanner
from solvers.chain.refine import refine
from solvers.chain.revolve import revolve_schedules
from solvers.curve import Frontier
from solvers.errors import InfeasibleError
from solvers.milp.options import SolverOptions
from solvers.problem import Problem
from solvers.schedule import Schedule
from solvers.solve import KINDS, Answer, Kind, Request, register
from solvers.text import format_bytes
from solvers.walker import walk

ANY = "the bound holds for every schedule that the walker accepts"
CHAIN = f"found with options per block, persistent checkpoints and slots of memory; {ANY}"
WHOLE = "schedules in the fixed order of first runs, frontier-advancing"
STOPPED = "stopped by Ctrl-C; the best schedule so far"


def _planner(problem: Problem, request: Request) -> ChainPlanner:
    options = SolverOptions(request.milp, request.gap, request.time_limit, request.threads)

    def report(doing: str, part: float) -> None:
        request.report(None, problem.eager_time, f"{doing} {100 * part:.0f} %")

    return ChainPlanner(
        problem.free_reruns(), grid=Grid(solver=options, threads=1), report=report, remaining=request.remaining
    )


def _frontier(problem: Problem, request: Request) -> Frontier:
    return _planner(problem, request).frontier()


KINDS[Problem] = Kind(walk, lambda problem: problem.eager_time, _frontier)


def _bound(problem: Problem, request: Request) -> tuple[int, str]:
    """The bound for the budget, and why it was stopped, if it was. It gets 0.2 seconds even if no time is left."""
    try:
        return lower_bound(problem, request.budget, request.milp, max(0.2, min(2.0, request.remaining()))), ""
    except KeyboardInterrupt:
        return 0, STOPPED


def _baseline(name: str, schedules: Callable[[Problem], Iterable[Schedule]]) -> None:
    """Register a solver that takes the cheapest of these ``schedules`` that fits, with the bound for its budget."""

    @register(Problem, name)
    def solver(problem: Problem, request: Request) -> Answer:
        walked = [(walk(problem, s), s) for s in schedules(problem.free_reruns())]
        fitting = [(w.time, w.peak, s) for w, s in walked if w.peak <= request.budget]
        if not fitting:
            least = min(w.peak for w, _ in walked)
            return Answer(None, reason=f"the least this solver needs is {format_bytes(least)} ({least} bytes)")
        schedule = min(fitting, key=lambda x: x[:2])[2]
        bound, note = _bound(problem, request)
        return Answer(schedule, bound, f"{note}; {ANY}" if note else ANY)


_baseline("keep_all", lambda problem: [keep_everything(problem)])
_baseline("recompute_all", lambda problem: [recompute_all(problem)])
_baseline("every_block", lambda problem: [checkpoint_blocks(problem)])
_baseline("sqrt", lambda problem: [chen_sqrt(problem)])
_baseline("revolve", revolve_schedules)


def _plan(problem: Problem, request: Request) -> tuple[ChainPlan | None, str]:
    """The chain's plan, and why there is none or why the search was stopped."""
    planner, cut = _planner(problem, request), f"the time limit of {request.time_limit:g} s cut the search short"
    try:
        plan: ChainPlan | None = planner.solve(request.budget)
    except InfeasibleError as error:
        return None, f"{cut}: {error}" if planner.stopped else str(error)
    except KeyboardInterrupt:
        return planner.best_known(request.budget), STOPPED
    return plan, "" if request.remaining() > 0 else cut


@register(Problem, "rotor")
def _rotor(problem: Problem, request: Request) -> Answer:
    """Options per block, then the dynamic program; neither if keeping everything fits."""
    least, step = least_budget(problem)
    if least > request.budget:
        needs = f"{step} alone needs {format_bytes(least)} ({least} bytes)"
        return Answer(None, infeasible=f"{needs}, more than the budget of {request.budget} bytes")
    keep = keep_everything(problem)
    if walk(problem, keep).peak <= request.budget:
        return Answer(keep, solver="keep_all")
    plan, note = _plan(problem, request)
    if plan is None:
        return Answer(None, reason=note)
    bound = 0
    if note != STOPPED:
        bound, stopped = _bound(problem, request)
        note = stopped or note
    request.report(plan.time, bound, "chain")
    return Answer(plan.schedule, bound, f"{note}; {CHAIN}" if note else CHAIN)


@register(Problem, "checkmate")
def _checkmate(problem: Problem, request: Request) -> Answer:
    """The whole step as one integer program, without a schedule to start from."""
    refined = refine(problem, None, request)
    note = f"{STOPPED}; " if refined.interrupted else ""
    reason = f"{note}the bound holds for {WHOLE}" if refined.schedule is not None or note else ""
    return Answer(refined.schedule, refined.bound, reason, refined.infeasible)


@register(Problem, "auto")
def _auto(problem: Problem, request: Request) -> Answer:
    """rotor, then the whole-graph program from its plan, if the plan is not proven optimal and time is left."""
    chain = _rotor(problem, request)
    cost = None if chain.schedule is None else walk(problem, chain.schedule).time
    done = cost is not None and cost - chain.bound <= request.gap * cost
    if done or chain.infeasible or chain.solver or STOPPED in chain.reason or request.remaining() <= 0:
        return chain
    refined = refine(problem, chain.schedule, request)
    if chain.schedule is None and refined.infeasible:
        return Answer(None, refined.bound, infeasible=refined.infeasible)
    note = f"{STOPPED}; " if refined.interrupted else ""
    if refined.schedule is not None:
        better = walk(problem, refined.schedule)
        if better.peak <= request.budget and (cost is None or better.time < cost):
            bound = max(chain.bound, refined.bound)
            return Answer(refined.schedule, bound, f"{note}the bound holds for {WHOLE}", solver="checkmate")
    # A chain's schedule may not be of the whole program's class, and then cost less than the bound of the class.
    outside = cost is not None and refined.bound > cost
    reason = chain.reason if outside else f"{note}the bound holds for {WHOLE}"
    return Answer(chain.schedule, chain.bound if outside else max(chain.bound, refined.bound), reason, solver="rotor")
