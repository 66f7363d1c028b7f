"""A chain's plan as the start of the whole-graph program, which betters it a little and proves how little is left.

The chain's solver composes options of single blocks; the whole-graph program (``solvers.whole.whole_graph``) looks at
the step as one and at few of its moments. Alone it has to find a schedule; from a good plan it mostly has to prove.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from solvers.chain.bound import lower_bound
from solvers.chain.chain import ChainPlan
from solvers.problem import Problem
from solvers.schedule import Bwd, Run, Schedule
from solvers.solve import Request
from solvers.walker import walk

if TYPE_CHECKING:
    from solvers.whole.stages import Runs


@dataclass(frozen=True, slots=True)
class Refined:
    """``schedule``: a better one, None if none was found. ``bound``: nanoseconds that every schedule of the whole-graph
    program's class takes; one that is not of the class may take less. ``infeasible``: why none of the class fits,
    where that is proven. ``interrupted``: by Ctrl-C."""

    schedule: Schedule | None
    bound: int
    infeasible: str
    interrupted: bool


def refine(problem: Problem, start: Schedule | None, request: Request) -> Refined:
    """Improve ``start``, which fits ``request.budget``, for as long as ``request`` allows or until nothing is left."""
    # Loaded here: `import solvers` is to be quick, and saved plans need no solver of whole graphs.
    from solvers.whole.stages import schedule_step, staged_step, timeline
    from solvers.whole.whole_graph import solve_staged

    staged = staged_step(problem)
    runs = None if start is None else runs_of(problem, start)
    if runs is not None and timeline(staged, runs).peak > request.budget:
        runs = None
    found = solve_staged(staged, request, runs)
    better = found.runs is not None and (runs is None or staged.cost(found.runs) < staged.cost(runs))
    schedule = schedule_step(problem, found.runs) if better and found.runs is not None else None
    return Refined(schedule, problem.eager_time + found.bound, found.infeasible, found.interrupted)


def improve(problem: Problem, plan: ChainPlan, budget: int, seconds: float, gap: float = 1e-4) -> tuple[ChainPlan, int]:
    """``plan`` or a better one within ``budget`` bytes, and a lower bound (nanoseconds): for all schedules that the
    walker accepts, or for those of the whole-graph program's class if that is higher and the plan is of the class.

    Nothing is tried where the first bound, which gets a quarter of the time, already shows the plan to be the best, up
    to ``gap``. How far it gets in ``seconds`` depends on the machine: what must be equal everywhere must not come from
    here.
    """
    request = Request(budget, seconds, gap=gap)
    bound = lower_bound(problem, budget, seconds=seconds / 4)
    if plan.time - bound <= gap * plan.time:
        return plan, bound
    found = refine(problem, plan.schedule, request)
    if found.interrupted:
        raise KeyboardInterrupt
    if found.schedule is not None:
        walked = walk(problem, found.schedule)
        if walked.peak <= budget and walked.time < plan.time:
            plan = ChainPlan(found.schedule, walked, "chain, then whole graph")
    return plan, max(bound, found.bound) if found.bound <= plan.time else bound


def runs_of(problem: Problem, schedule: Schedule) -> Runs:
    """The reruns of ``schedule`` per stage, in forward order and each once; what that makes useless is left out."""
    from solvers.whole.stages import staged_step, without_useless  # loaded here for the same reason as above

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
    return without_useless(staged_step(problem), [sorted(stage) for stage in stages])
