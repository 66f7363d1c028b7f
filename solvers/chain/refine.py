"""Improves a chain's plan by the whole-graph program, which starts from it, and bounds what could still be gained.

The chain's solver composes options of single blocks. The whole-graph program (``solvers.whole.whole_graph``) decides on
the step as a whole, and limits memory at few positions. If it starts from a good plan, it mostly has to prove a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from solvers.chain.bound import lower_bound
from solvers.chain.chain import ChainPlan
from solvers.problem import Problem
from solvers.schedule import Bwd, Loss, Run, Schedule
from solvers.solve import Request
from solvers.walker import walk

if TYPE_CHECKING:
    from solvers.whole.stages import Reruns


@dataclass(frozen=True, slots=True)
class Refined:
    """The result of ``refine``. ``schedule``: a better one, or None.

    ``bound``: nanoseconds that every schedule of the whole-graph program's class takes at least; others may take less.
    ``infeasible``: why no schedule of the class fits, if that is proven. ``interrupted``: whether Ctrl-C ended it.
    """

    schedule: Schedule | None
    bound: int
    infeasible: str
    interrupted: bool


def refine(problem: Problem, start: Schedule | None, request: Request) -> Refined:
    """Improve ``start``, which fits ``request.budget``, until it is proven optimal in its class or time is up."""
    # Loaded here: `import solvers` is to be quick, and saved plans need no solver of whole graphs.
    from solvers.whole.stages import schedule_step, staged_step, timeline
    from solvers.whole.whole_graph import solve_staged

    staged = staged_step(problem)
    runs = None if start is None else runs_of(problem, start)
    if runs is not None and timeline(staged, runs).peak > request.budget:
        runs = None
    solution = solve_staged(staged, request, runs)
    schedule = None
    if solution.runs is not None and (runs is None or staged.cost(solution.runs) < staged.cost(runs)):
        schedule = schedule_step(problem, solution.runs)
    return Refined(schedule, problem.eager_time + solution.bound, solution.infeasible, solution.interrupted)


def improve(problem: Problem, plan: ChainPlan, budget: int, seconds: float) -> tuple[ChainPlan, int]:
    """``plan`` or a better one within ``budget`` bytes, and a lower bound in nanoseconds.

    The bound holds for all schedules that the walker accepts. If that for the whole-graph program's class is higher,
    and the plan is no cheaper than it, the bound holds for that class. A quarter of ``seconds`` is for the first bound.
    If it proves the plan optimal, nothing else is tried. The result depends on the machine's speed, so it
    is not for plans that must be equal on several machines. Ctrl-C raises ``KeyboardInterrupt``.
    """
    request = Request(budget, seconds)
    bound = lower_bound(problem, budget, seconds=seconds / 4)
    if plan.time - bound <= request.gap * plan.time:
        return plan, bound
    refined = refine(problem, plan.schedule, request)
    if refined.interrupted:
        raise KeyboardInterrupt
    if refined.schedule is not None:
        walked = walk(problem, refined.schedule)
        if walked.peak <= budget and walked.time < plan.time:
            plan = ChainPlan(refined.schedule, walked, "chain, then whole graph")
    return plan, max(bound, refined.bound) if refined.bound <= plan.time else bound


def runs_of(problem: Problem, schedule: Schedule) -> Reruns:
    """The reruns of ``schedule`` per stage, each once and in forward order, without those that are useless then."""
    from solvers.whole.stages import staged_step, without_useless  # loaded here for the same reason as above

    stages: list[set[int]] = [set() for _ in range(len(problem.nodes) + 1)]
    now: set[int] = set()
    for step in schedule[schedule.index(Loss()) :]:
        if isinstance(step, Run):
            now.add(step.node)
        elif isinstance(step, Bwd):
            stages.append(now)
            now = set()
    return without_useless(staged_step(problem), [sorted(stage) for stage in stages])
