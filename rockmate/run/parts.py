"""What of a schedule holds when a backward leaves a part of the graph out."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence

from rkgb.graphs import S_graph
from rockmate.run.program import HandOver, Program, Step
from rockmate.run.slots import Slot
from solvers import Problem, Schedule
from solvers.schedule import Bwd, Del, Loss, Run

_FEW = 4  # outputs, of which every selection is looked at


def steps_between(program: Program, at: int, k: int, i: int) -> Sequence[Step]:
    """The steps of stages ``at`` to ``k`` for the backwards from node i on; what only others need is not run."""
    steps: list[Step] = []
    gone: set[int] = set()  # data that nothing needs before the steps chosen so far
    for step in reversed([step for j in range(at, k + 1) for step in program.before[j]]):
        if isinstance(step, Del) or (isinstance(step, HandOver) and not 0 <= program.last_reader[step.data] <= i):
            gone.add(step.data)
        elif isinstance(step, Run):
            made = set(program.nodes[step.node].data)
            if made <= gone:
                continue
            gone |= made
            gone -= set(program.read_by(step.node))
        steps.append(step)
    return steps[::-1]


def left_out(slots: list[weakref.ref[Slot]], i: int) -> bool:
    """Whether a backward before that of node i has not taken what it saved, which ``slots`` stand for.

    ``slots`` are in the order of the nodes. Dead ones at their end are removed.
    """
    while slots:
        last = slots[-1]()
        if last is not None:
            return last.node > i
        slots.pop()
    return False


def staying_after(program: Program, i: int, slots: Iterable[weakref.ref[Slot]]) -> set[int]:
    """What the forward kept and a backward later than that of node i may need, by the living ``slots``."""
    living = (slot for ref in slots if (slot := ref()) is not None)
    return _kept_behind(program, [slot.data for slot in living if slot.node > i and slot.data >= 0])


def peaks_of_parts(
    program: Program, problem: Problem, schedule: Schedule, levels: Sequence[int]
) -> dict[frozenset[int], int]:
    """Bytes that a step takes at most where its loss leaves outputs out, by the nodes of those; ``levels``: its walk's.

    What the forward kept for the backwards that are left out then stays to the end, and so do generator states.
    Gradients are counted as if none were left out. Of many outputs there is one figure for whichever are, under the
    empty set.
    """
    s, ends = program.s, program.ends
    makers = {v: i for i, node in enumerate(s.nodes) for v in node.makes}
    reached = [_reached(s, makers, end) for end in ends]
    every: set[int] = set().union(*reached)

    def peak_without(skipped: set[int]) -> int:
        read = [d for i in skipped if (backward := problem.nodes[i].backward) for d in backward.reads]
        return _peak(problem, schedule, levels, _kept_behind(program, read))

    if len(ends) > _FEW:
        return {frozenset(): peak_without(every - every.intersection(*reached))}
    found: dict[frozenset[int], int] = {}
    for count in range(1, len(ends)):
        for some in itertools.combinations(reached, count):
            skipped = every.difference(*some)
            left = skipped.intersection(ends)
            if left:
                found[frozenset(left)] = peak_without(skipped)
    return found


def _peak(problem: Problem, schedule: Schedule, levels: Sequence[int], stays: set[int]) -> int:
    """The peak behind the loss where the data ``stays`` are not deleted, nor let go while a backward runs."""
    last = {step.node: at for at, step in enumerate(schedule) if isinstance(step, Run)}
    extra = peak = 0
    for at in range(schedule.index(Loss()) + 1, len(schedule)):
        step = schedule[at]
        if isinstance(step, Del) and step.data in stays:
            extra += problem.data[step.data].size
            stays.discard(step.data)
        own = problem.nodes[step.node].makes if isinstance(step, Bwd) else ()
        peak = max(peak, levels[at] + extra + sum(problem.data[d].size for d in stays.intersection(own)))
        if isinstance(step, Run) and last[step.node] == at:
            extra += problem.nodes[step.node].rng
    return peak


def _kept_behind(program: Program, data: list[int]) -> set[int]:
    """What the forward kept of ``data``, and of what the others of them are computed again from."""
    found: set[int] = set()
    left = data
    while left:
        d = left.pop()
        if d not in found:
            found.add(d)
            if d not in program.kept:
                left += program.read_by(program.owner[d])
    return found & program.kept


def _reached(s: S_graph, makers: dict[int, int], end: int) -> set[int]:
    """The nodes whose backwards run from that of ``end``."""
    found: set[int] = set()
    left = [end]
    while left:
        i = left.pop()
        if i not in found:
            found.add(i)
            left += [makers[v] for v in s.nodes[i].reads if v in makers and s.d.values[v].requires_grad]
    return found
