"""From an order of runs and backwards to a schedule: drop useless reruns, add deletions.

Solvers decide the order of runs and backwards. Deletions follow from it by liveness (``with_deletes``). An order that
starts with the complete forward phase always gives a valid schedule. Orders differ in peak and time.
"""

from __future__ import annotations

from collections.abc import Iterable

from solvers.problem import Problem
from solvers.schedule import Bwd, Del, Loss, Run, Schedule, Step
from solvers.whole.graph import GraphProblem


def reads_of(problem: Problem | GraphProblem, step: Step) -> tuple[int, ...]:
    """Data that ``step`` reads."""
    if isinstance(step, Run):
        return problem.nodes[step.node].reads
    if isinstance(problem, GraphProblem):
        return ()
    if isinstance(step, Bwd):
        backward = problem.nodes[step.node].backward
        return backward.reads if backward else ()
    return tuple(sorted(problem.returned)) if isinstance(step, Loss) else ()


def makes_of(problem: Problem | GraphProblem, step: Step) -> tuple[int, ...]:
    """Data that ``step`` makes."""
    if not isinstance(step, Run):
        return ()
    return problem.nodes[step.node].makes if isinstance(problem, Problem) else (step.node,)


def with_deletes(problem: Problem | GraphProblem, order: Iterable[Step]) -> Schedule:
    """The schedule that runs ``order`` (Run, Loss and Bwd steps) and deletes each datum as early as possible.

    A copy of a datum is deleted right after its last read, or right after the run that made it if nothing reads it.
    Held data are never deleted. Del steps in ``order`` are ignored.
    """
    steps = [s for s in order if not isinstance(s, Del)]
    held = problem.held if isinstance(problem, Problem) else frozenset()
    needed: set[int] = set()
    backwards: list[Step] = []
    for step in reversed(steps):
        reads, makes = reads_of(problem, step), makes_of(problem, step)
        dead = [d for d in dict.fromkeys(reads + makes) if d not in needed and d not in held]
        backwards.extend(Del(d) for d in reversed(dead))
        backwards.append(step)
        needed.difference_update(makes)
        needed.update(reads)
    return tuple(reversed(backwards))


def drop_useless_runs(problem: Problem, order: Iterable[Step]) -> tuple[Step, ...]:
    """``order`` without useless reruns: those of whose data no copy is read.

    The scan goes backwards, so that runs which only served a dropped rerun are dropped as well. Runs of the forward
    phase stay.
    """
    steps = tuple(order)
    kept: list[Step] = []
    needed: set[int] = set()
    after_loss = Loss() in steps
    for step in reversed(steps):
        if isinstance(step, Loss):
            after_loss = False
        makes = makes_of(problem, step)
        if isinstance(step, Run) and after_loss and needed.isdisjoint(makes):
            continue
        needed.difference_update(makes)
        needed.update(reads_of(problem, step))
        kept.append(step)
    return tuple(reversed(kept))


def forward_phase(problem: Problem) -> tuple[Step, ...]:
    """Every node once, in order, then the loss. Each schedule begins with these steps."""
    return (*(Run(i) for i in range(len(problem.nodes))), Loss())


def plain_steps(problem: Problem) -> tuple[Step, ...]:
    """The forward phase, then every backward: what runs without recomputation."""
    return (*forward_phase(problem), *(Bwd(i) for i in problem.backward_order()))
