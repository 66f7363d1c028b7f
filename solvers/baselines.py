"""Schedules without a solver, with which those of solvers are compared.

- keep everything: no recomputation;
- one checkpoint per block: keep the blocks' inputs, and run each block again before its backward;
- Chen's sqrt(n) segments: keep the inputs of about sqrt(B) segments of B blocks, and run each segment again
  (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4);
- recompute all: one segment, so that the whole forward phase runs twice.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, isqrt

from solvers.liveness import drop_useless_runs, forward_phase, plain_steps, with_deletes
from solvers.problem import Problem
from solvers.schedule import Bwd, Run, Schedule, Step


def segments(problem: Problem, cuts: tuple[int, ...]) -> Schedule:
    """The schedule that runs each segment of nodes again, as a whole, before its backwards.

    ``cuts``: node positions at which segments begin and end, from 0 to the number of nodes. A rerun reads data of other
    segments as kept from the forward phase.
    """
    order: list[Step] = list(forward_phase(problem))
    for start, stop in reversed(list(pairwise(cuts))):
        order += [Run(i) for i in range(start, stop) if problem.nodes[i].rerun]
        order += [Bwd(i) for i in reversed(range(start, stop)) if problem.nodes[i].backward]
    return with_deletes(problem, drop_useless_runs(problem, order))


def keep_everything(problem: Problem) -> Schedule:
    """The schedule without recomputation: every datum is deleted after its last read."""
    return with_deletes(problem, plain_steps(problem))


def checkpoint_blocks(problem: Problem) -> Schedule:
    """One checkpoint per block."""
    return segments(problem, (0, *(b.stop for b in problem.blocks)))


def chen_sqrt(problem: Problem) -> Schedule:
    """Segments of about sqrt(B) blocks each."""
    if not problem.blocks:
        return keep_everything(problem)
    length = max(1, ceil(len(problem.blocks) / max(1, isqrt(len(problem.blocks)))))
    stops = [b.stop for b in problem.blocks]
    return segments(problem, tuple(dict.fromkeys((0, *stops[length - 1 :: length], stops[-1]))))


def recompute_all(problem: Problem) -> Schedule:
    """Keep nothing between the phases; run everything again after the loss."""
    return segments(problem, (0, len(problem.nodes)))


def all_baselines(problem: Problem) -> dict[str, Schedule]:
    """Every baseline by name."""
    return {
        "keep everything": keep_everything(problem),
        "one checkpoint per block": checkpoint_blocks(problem),
        "Chen sqrt(n)": chen_sqrt(problem),
        "recompute all": recompute_all(problem),
    }
