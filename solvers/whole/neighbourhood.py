"""Large-neighbourhood search: part of a schedule is decided anew by an exact program, the rest stays as it is.

It is for graphs that are too large for one program. A neighbourhood is a set of free operations around a cell that is
nearly full: those whose data live across it, and those that run again. The program is the ``Relaxation`` of the whole
graph with all other reruns fixed. Its positions are generated lazily, as for the whole graph. Many small programs often
find better schedules sooner than one large program. They prove no bound.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np

from solvers.milp.milp import run
from solvers.milp.options import SolverOptions
from solvers.solve import Request
from solvers.whole.columns import Fixed
from solvers.whole.relaxation import Cover, Relaxation
from solvers.whole.relaxation_runs import overstepped, spell, start_values
from solvers.whole.stages import Cell, Reruns, Staged, Timeline, peaks, timeline

ROUNDS = 15
"""Most programs for one neighbourhood."""

NEIGHBOURHOOD = 5.0
"""Most seconds for one neighbourhood."""

FULL = 0.9
"""A cell is nearly full if it uses this part of the budget."""


class Neighbourhoods:
    """The search. ``positions``: cells whose memory decides; it adds those that it finds. ``size``: free operations."""

    def __init__(self, staged: Staged, request: Request, positions: Iterable[Cell]) -> None:
        self.staged, self.request = staged, request
        self.positions = set(positions)
        self.size = 40
        self.draw = random.Random(0)

    def improve(
        self, runs: Reruns, remaining: Callable[[], float], target: int, report: Callable[[Reruns], None]
    ) -> None:
        """Search from ``runs``, which fit, until no seconds remain or the cost is ``target``; report better ones."""
        now, cost = timeline(self.staged, runs), self.staged.cost(runs)
        while remaining() > 0 and cost > target:
            left = remaining()
            better = self._decide(now, cost, self._free(now, runs), min(left, NEIGHBOURHOOD))
            if better is not None:
                runs, now, cost = better, timeline(self.staged, better), self.staged.cost(better)
                report(runs)
            # Keep programs so large that one takes a second or two.
            quick = left - remaining() < NEIGHBOURHOOD / 3
            self.size = min(self.staged.steps, self.size * 9 // 8) if quick else max(8, self.size * 4 // 5)

    def _free(self, now: Timeline, runs: Reruns) -> frozenset[int]:
        """Operations around a random cell that is nearly full."""
        staged = self.staged
        full = np.flatnonzero(now.memory >= FULL * self.request.budget)
        p = int(self.draw.choice(full.tolist() or [int(now.memory.argmax())]))
        crossing = {
            staged.owners[d]
            for d, copies in enumerate(now.copies)
            if staged.sizes[d] and copies and copies[0][0] < p < copies[-1][-1]
        }
        again = {i for stage in runs for i in stage}
        near = sorted(crossing | again)
        if len(near) <= self.size:
            return frozenset(near)
        chosen = set(self.draw.sample(near, self.size // 2))
        # A stretch of neighbours, which mostly read one another.
        at = self.draw.randrange(len(near))
        chosen.update(near[at : at + self.size // 2])
        return frozenset(chosen)

    def _decide(self, now: Timeline, cost: int, free: frozenset[int], seconds: float) -> Reruns | None:
        """The cheapest reruns that differ in ``free`` operations only; None if none cheaper than ``cost`` is found."""
        staged, request = self.staged, self.request
        deadline = request.seconds() + seconds
        covers: list[Cover] = []
        positions = set(self.positions)
        for _ in range(ROUNDS):
            left = deadline - request.seconds()
            if left <= 0:
                return None
            model = Relaxation(staged, request.budget, positions, covers, Fixed(now, free))
            options = SolverOptions(request.milp, 1e-3, left, request.threads)
            outcome = run(model.program, options, start_values(model, now))
            if outcome.values is None:
                return None
            spelled = spell(model, outcome.values)
            if staged.cost(spelled.runs) >= cost:
                return None
            then = timeline(staged, spelled.runs)
            if then.peak <= request.budget:
                return spelled.runs
            cells = peaks(then, request.budget)
            new = {*cells, *spelled.conflicts} - positions
            positions |= new
            self.positions |= new
            over_budget = overstepped(model, outcome.values, cells)
            covers += over_budget
            if not new and not over_budget:
                return None
        return None
