"""A proven lower bound on the time of every schedule of a training step, for a given budget.

At any one step, say the loss, the live data and what the step allocates fit the budget. The backwards behind it read
data that are live there or made by later reruns, which read data that are live there or made by reruns. The least time
of such reruns, each counted once, is an integer program with one memory row: ``solvers.whole.relaxation`` with that
step as its only position. It bounds *every* schedule that the walker accepts, in any order of reruns, with persistent
checkpoints or not. It ignores memory at all other steps.

The bound is the best of several programs. Their positions are the loss and the steps at which keeping everything
exceeds the budget most (a late backward, if gradients of parameters fill memory): one at a time, then all together.
"""

from __future__ import annotations

import time
from math import ceil

from solvers.liveness import plain_steps
from solvers.milp.options import SolverOptions
from solvers.problem import Problem
from solvers.walker import step_name

GAP = 1e-3
"""Relative gap at which a proof may stop; the bound is lower by this gap at most."""

SECONDS = 2.0
"""Seconds for a bound at most; usually a tenth of a second is enough."""

STEPS = 3
"""Positions beside the loss."""


def lower_bound(problem: Problem, budget: int, name: str = "HiGHS", seconds: float = SECONDS) -> int:
    """Nanoseconds that every schedule with a peak of at most ``budget`` bytes takes at least, backwards included.

    ``name``: a PuLP solver. ``seconds``: when to stop; the bound may be lower then.
    """
    # Loaded here: `import solvers` is to be quick, and saved plans need no solver of whole graphs.
    from solvers.milp.milp import run
    from solvers.whole.relaxation import Relaxation
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
            model = Relaxation(staged, budget, positions)
            outcome = run(model.program, SolverOptions(name, GAP, left))
            # If nothing fits, any bound holds. The solver's tolerances: 1e-5 units, 1e-9 of the time of all operations.
            if outcome.bound < 1e20:
                best = max(best, ceil((outcome.bound - 1e-5) * model.time_unit))
    return problem.eager_time + best


def least_budget(problem: Problem) -> tuple[int, str]:
    """A budget in bytes that every schedule needs, since one step alone does; and the name of that step."""
    from solvers.whole.stages import staged_step  # loaded here for the same reason as above
    from solvers.whole.whole_graph import least_step

    least, step = least_step(staged_step(problem))
    return least, step_name(problem, plain_steps(problem)[step])
