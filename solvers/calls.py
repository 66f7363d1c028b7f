"""Several calls of one step share its budget: which way each of them runs is chosen for all of them together.

A call keeps bytes from the end of its forward to its backward. Calls that run meanwhile have so much less. ``share``
chooses one way for each call, so that every phase of every call fits beside what the others keep, in the least time:
an integer program with one column for each way of each call, and one row for each phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from solvers.errors import InfeasibleError
from solvers.milp.milp import INFINITY, IntegerProgram, run
from solvers.milp.options import SolverOptions

UNITS = 10**6
"""Of these a budget has at most; sizes are rounded up to whole ones."""

SECONDS = 5.0


class Way(NamedTuple):
    """One way to run a call. Bytes: ``kept`` from the end of its forward to its backward, and so many ``more`` while
    forwards of other calls run; the peaks of its ``forward`` and its ``backward``, the loss included, without other
    calls. ``time``: nanoseconds of what runs again.
    """

    kept: int
    forward: int
    backward: int
    time: int
    more: int = 0

    @property
    def kept_in_forwards(self) -> int:
        """Bytes that are kept while forwards of other calls run."""
        return self.kept + self.more


class Phase(NamedTuple):
    """The forward or the ``backward`` of ``call``, while ``waiting`` calls keep their data.

    ``made``: bytes that calls whose backwards came before have left, of which this call's peak does not know: gradients
    of parameters, and what the caller holds.
    """

    call: int
    backward: bool
    waiting: tuple[int, ...]
    made: int = 0

    def own(self, way: Way) -> int:
        """The peak of its call, which runs in this ``way``."""
        return way.backward if self.backward else way.forward

    def beside(self, way: Way) -> int:
        """What a call keeps that waits, and runs in this ``way``."""
        return way.kept if self.backward else way.kept_in_forwards


def level(phase: Phase, ways: Sequence[Way]) -> int:
    """The peak of ``phase`` in bytes, where call k runs in ``ways[k]``."""
    return phase.own(ways[phase.call]) + phase.made + sum(phase.beside(ways[k]) for k in phase.waiting)


def share(choices: Sequence[Sequence[Way]], phases: Sequence[Phase], budget: int) -> list[Way]:
    """The ways of least time, one of the ``choices`` of each call, in which no phase takes more than ``budget`` bytes.

    Raises ``InfeasibleError``, whose ``min_budget`` is the least that some choice takes, if there is none.
    """
    unit = max(1, budget // UNITS)
    found = _solved(choices, phases, budget // unit, unit)
    if found is not None and max((level(p, found) for p in phases), default=0) <= budget:
        return found
    least = least_of(choices, phases)
    need = max(level(p, least) for p in phases)
    if need <= budget:  # where rounding decided
        return least
    raise InfeasibleError("no ways to run the calls of the step fit", need, "a step of several calls")


def least_of(choices: Sequence[Sequence[Way]], phases: Sequence[Phase]) -> list[Way]:
    """The ways whose worst phase takes the fewest bytes."""
    most = max(sum(max(max(w) for w in ways) for ways in choices) + max((p.made for p in phases), default=0), 1)
    unit = max(1, most // UNITS)
    found = _solved(choices, phases, None, unit)
    return found or [min(ways, key=lambda w: (max(w.forward, w.backward), w.kept)) for ways in choices]


def _solved(
    choices: Sequence[Sequence[Way]], phases: Sequence[Phase], budget: int | None, unit: int
) -> list[Way] | None:
    """The choice of least time within ``budget`` units, or, for None, of the lowest worst phase; None if none is
    found.
    """
    program = IntegerProgram()
    longest = max((w.time for ways in choices for w in ways), default=0) or 1
    columns = [[program.column(w.time / longest if budget is not None else 0.0) for w in ways] for ways in choices]
    for own in columns:
        program.row(((column, 1.0) for column in own), 1.0, 1.0)
    rows = []
    for phase in phases:
        sizes = [(phase.call, phase.own), *((k, phase.beside) for k in phase.waiting)]
        terms = [(c, -(-of(w) // unit)) for k, of in sizes for c, w in zip(columns[k], choices[k], strict=True)]
        rows.append((terms, -(-phase.made // unit)))
    if budget is None:
        most = sum(max(size for _, size in terms) for terms, _ in rows) + sum(made for _, made in rows) or 1
        peak = program.column(1.0, integer=False)
        for terms, made in rows:
            program.row([*terms, (peak, -float(most))], -INFINITY, -float(made))
    else:
        for terms, made in rows:
            program.row(terms, -INFINITY, budget - made + 0.5)
    values = run(program, SolverOptions(time_limit=SECONDS)).values
    if values is None:
        return None
    ways = (zip(own, of_call, strict=True) for own, of_call in zip(columns, choices, strict=True))
    return [max(of_call, key=lambda chosen: values[chosen[0]])[1] for of_call in ways]
