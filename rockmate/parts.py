"""What of a schedule holds when a backward leaves a part of the graph out."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from rockmate.compiled import Give, Program
from rockmate.slots import Slot
from solvers.schedule import Del, Run


def steps_between(program: Program, at: int, k: int) -> Sequence[Run | Del | Give]:
    """The steps of stages ``at`` to ``k``; what only the backwards that are left out need is not run."""
    steps: list[Run | Del | Give] = []
    gone: set[int] = set()  # data that nothing needs before the steps chosen so far
    for step in reversed([step for j in range(at, k + 1) for step in program.before[j]]):
        if isinstance(step, Del):
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

    ``slots`` are in the order of the nodes; dead ones at the end are removed.
    """
    while slots:
        last = slots[-1]()
        if last is not None:
            return last.node > i
        slots.pop()
    return False


def staying_after(program: Program, i: int, slots: Iterable[weakref.ref[Slot]]) -> set[int]:
    """What the forward kept and a backward later than that of node i may need, by the living ``slots``."""
    needed: set[int] = set()
    living = (slot for ref in slots if (slot := ref()) is not None)
    left = [slot.data for slot in living if slot.node > i and slot.data >= 0]
    while left:
        datum = left.pop()
        if datum not in needed:
            needed.add(datum)
            if datum not in program.kept:
                left += program.read_by(program.owner[datum])
    return needed & program.kept
