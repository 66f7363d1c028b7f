"""In which ways a planned call can run beside others: what it keeps for its backward, and its peaks, against time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from rockmate.planning.planner import Planner
from solvers import ChainPlan, ChainPlanner, Loss, Problem, Schedule, keep_everything, walk
from solvers.calls import Way

PEAKS = (0.3, 0.45, 0.6, 0.75, 0.9, 1.0)
"""Parts of the budget that are tried as the peak of such a call."""

TIGHT = 4
"""Peaks that are tried between the least and ``PEAKS[0]`` of the budget."""

KEPT = 6
"""Amounts to keep that are tried for each of ``PARTS``."""

PARTS = (1.0, 0.7)
"""Parts of the budget that such a call may take."""

NEAR = 0.05
"""Budgets that differ by this part of them need no search each."""

Solve = Callable[[Problem, int], Schedule | None]
"""The schedule of a problem within so many bytes; None if none is found."""

Asked = tuple[int, bool]
"""A budget in bytes for which ways were looked for, and whether those of least memory were among them."""


def serving(asked: Iterable[Asked], budget: int, tight: bool) -> Asked | None:
    """What was looked for that serves for ``budget``, too, from which other calls of the step may take a little."""
    return next((a for a in asked if abs(a[0] - budget) <= NEAR * budget and (a[1] or not tight)), None)


def way_of(problem: Problem, schedule: Schedule, beside: int, waits: tuple[int, int]) -> Way:
    """The figures of a schedule. Bytes ``beside`` it are there at every moment, and those of ``waits`` while forwards
    of other calls run, and backwards.
    """
    walked, at = walk(problem, schedule), schedule.index(Loss())
    forward, backward = max(walked.timeline[:at], default=0), max(walked.timeline[at:], default=0)
    kept = walked.timeline[at] - problem.loss + beside + waits[1]
    return Way(kept, forward + beside, backward + beside, walked.recompute, max(0, waits[0] - waits[1]))


def plans_of(planner: Planner, budget: int, tight: bool) -> list[ChainPlan]:
    """Ways to run a call of ``planner`` in at most ``budget`` bytes; ``tight``: also those of least memory."""
    known = _FOUND.setdefault(planner, {})
    if (found := serving(known, budget, tight)) is None:
        found = budget, tight
        known[found] = _plans_of(planner, budget, tight)
    return known[found]


_FOUND: weakref.WeakKeyDictionary[Planner, dict[Asked, list[ChainPlan]]]
_FOUND = weakref.WeakKeyDictionary()
"""By budgets, and whether the plans of least memory are among them: the calls of a step may have one planner."""


def _plans_of(planner: Planner, budget: int, tight: bool) -> list[ChainPlan]:
    problem, beside = planner.problem, planner.reserved
    chain = planner.chain()

    def solve(wanted: Problem, limit: int) -> Schedule | None:
        chosen = chain if wanted is problem else ChainPlanner(wanted, solved=planner.solved)
        found = chosen.found(limit)
        return None if found is None else found.schedule

    least = planner.frontier().min_budget - beside if tight else None
    found = dict.fromkeys(schedules_of(problem, budget - beside, least, solve))
    return [ChainPlan(schedule, walk(problem, schedule), "for several calls") for schedule in found]


def schedules_of(problem: Problem, budget: int, least: int | None, solve: Solve) -> Iterator[Schedule]:
    """Schedules within ``budget`` bytes: for smaller peaks, down to the ``least`` if it is given; for amounts to keep.

    To keep no more than so much is to have so much more for the loss.
    """
    keep = keep_everything(problem)
    walked = walk(problem, keep)
    if walked.peak <= budget:
        yield keep
    kept = walked.timeline[keep.index(Loss())] - problem.loss
    asked = [(problem, int(part * budget)) for part in PEAKS if part * budget < walked.peak]
    if least is not None:
        more = max(0, int(PEAKS[0] * budget) - least)
        asked += [(problem, least + more * k // TIGHT) for k in range(TIGHT)]
    for limit in (int(part * budget) for part in PARTS):
        asked += [(replace(problem, loss=max(problem.loss, limit - kept * k // KEPT)), limit) for k in range(KEPT)]
    for wanted, limit in asked:
        schedule = solve(wanted, limit)
        if schedule is not None:
            yield schedule
