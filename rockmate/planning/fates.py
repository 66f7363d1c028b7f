"""What a schedule does with each node: keeps what it makes, runs it again, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from solvers import Bwd, Del, Loss, Problem, Run, Schedule


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one node's results.

    ``made``: bytes of all that it makes. ``kept``: of these, bytes that are there when the forward phase is over.
    ``again``: for each second run, the node before whose backward it takes place.
    """

    made: int
    kept: int
    again: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """ "kept", "again" (dropped, and run again once), "often" (more than once), or "free": not needed later."""
        if self.again:
            return "again" if len(self.again) == 1 else "often"
        return "kept" if self.kept else "free"


def fates(problem: Problem, schedule: Schedule) -> tuple[Fate, ...]:
    """One fate a node, in order."""
    turn = schedule.index(Loss())
    live: set[int] = set()
    for step in schedule[:turn]:
        if isinstance(step, Run):
            live.update(problem.nodes[step.node].makes)
        elif isinstance(step, Del):
            live.discard(step.data)
    again: dict[int, list[int]] = {}
    pending: list[int] = []
    for step in schedule[turn:]:
        if isinstance(step, Run):
            pending.append(step.node)
        elif isinstance(step, Bwd):
            for i in pending:
                again.setdefault(i, []).append(step.node)
            pending.clear()
    return tuple(
        Fate(_bytes(problem, node.makes), _bytes(problem, live.intersection(node.makes)), tuple(again.get(i, ())))
        for i, node in enumerate(problem.nodes)
    )


def _bytes(problem: Problem, data: Sequence[int] | set[int]) -> int:
    return sum(problem.data[d].size for d in set(data))
