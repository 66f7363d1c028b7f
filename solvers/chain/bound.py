"""What no schedule of a training step can do better: a proven lower bound on time, for a given budget.

At any one step, say the loss, what is live fits the budget together with what the step itself needs. What the
backwards from then on read is live there or made by later reruns, which again read data that are live
or made by reruns. The least time of such reruns, each counted once, is an integer program with one memory row:
``solvers.whole.relaxation`` with that step as its only position. It bounds *every* schedule that the walker accepts,
in any order of reruns, with persistent checkpoints or not. What it leaves out is memory at all other steps.

The steps that are looked at, one at a time and then all together, are those where keeping everything oversteps the
budget most: the loss for deep networks, a late backward where gradients of parameters are what fills memory.
"""

from __future__ import annotations

import time
from math import ceil

from solvers.milp.milp import Effort, Program, run
from solvers.problem import Problem

GAP = 1e-3
"""Of the reruns' time; what is left open is taken off the bound."""

SECONDS = 2.0
"""Usually a tenth of one is enough."""

STEPS = 3
"""Steps looked at beside the loss."""


def lower_bound(problem: Problem, budget: int, name: str = "HiGHS", seconds: float = SECONDS) -> int:
    """Nanoseconds that every schedule with a peak of at most ``budget`` bytes takes, backwards included.

    ``name``: a PuLP solver; ``seconds``: when to stop, which makes the bound lower at most.
    """
    # Loaded here: `import solvers` is to be quick, and saved plans need no solver of whole graphs.
    from solvers.whole.relaxation import relax
    from solvers.whole.stages import peaks, staged_step, timeline

    staged = staged_step(problem)
    keep = timeline(staged, staged.none())
    loss = (len(problem.nodes),) * 2
    worst = [cell for cell in peaks(keep, budget, STEPS) if cell != loss]
    best = 0
    end = time.perf_counter() + seconds
    for positions in ([loss], *([cell] for cell in worst), *([[loss, *worst]] if worst else ())):
        left = end - time.perf_counter()
        if left > 0:
            model = relax(staged, budget, positions)
            best = max(best, _least(model.program, model.time_unit, Effort(name, gap=GAP, seconds=left)))
    return problem.eager_time + best


def _least(program: Program, time_unit: float, effort: Effort) -> int:
    """A lower bound on the cost of ``program``, in nanoseconds."""
    outcome = run(program, effort)
    if outcome.bound >= 1e20:  # nothing fits, so that any bound holds
        return 0
    # Tolerances of the solver: 1e-5 of the unit, which is 1e-9 of the time of all operations.
    return max(0, ceil((outcome.bound - 1e-5) * time_unit))


def least_budget(problem: Problem) -> tuple[int, str]:
    """Bytes below which no schedule fits, and the step that needs them on its own."""
    from solvers.whole.stages import staged_step  # loaded here for the same reason as above
    from solvers.whole.whole_graph import least_step

    least, step = least_step(staged_step(problem))
    return least, _name(problem, step)


def _name(problem: Problem, t: int) -> str:
    count = len(problem.nodes)
    if t < count:
        return f"fwd.{problem.nodes[t].name}"
    return "loss" if t == count else f"bwd.{problem.nodes[problem.backward_order()[t - count - 1]].name}"
