"""The plans of one module, one for each kind of call, and how many are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from rkgb.cost.measure import Known
from rkgb.cost.usage import differentiable
from rkgb.errors import MeasureError
from rkgb.warn import warn
from rockmate.calls.families import Family
from rockmate.calls.observe import Observer
from rockmate.errors import InfeasibleBudgetError, PlanningWarning
from rockmate.planning.plan import Plan
from rockmate.planning.planner import Planner
from rockmate.run.compiled import compile_schedule
from rockmate.run.draws import draw_whole
from rockmate.run.parts import peaks_of_parts
from rockmate.run.program import Program

ROOM_TO_KEEP = 4
"""A budget that is so many times a step's peak is taken to hold for a backward of its backward."""

MAX_PLANS = 128
"""Plans kept, of all kinds of calls together."""


@dataclass(frozen=True, eq=False)
class Runnable:
    """The plan for one kind of call, ready to run.

    ``observer``: watches what the caller does with the outputs; None for a plan from a file, which stays as it is.
    ``family``: the calls of other sizes that run the same graph. ``number``: rises from one kind of call to the next.
    """

    planner: Planner
    plan: Plan
    program: Program
    observer: Observer | None
    family: Family | None = None
    number: int = 0
    derived: dict[str, Any] = field(default_factory=dict, init=False)  # from this one, for steps of several calls

    @cached_property
    def is_provisional(self) -> bool:
        """Whether nodes run again by costs that were scaled from another size: a better plan may be found."""
        return self.planner.scaled and self.plan.recomputed > 0

    @cached_property
    def is_tight(self) -> bool:
        """Whether a backward that keeps the graph may exceed the budget: a second one takes about as much again."""
        return self.plan.budget < ROOM_TO_KEEP * self.plan.predicted_peak

    @property
    def wanted(self) -> Planner:
        """For all that was seen of such calls, also where no plan for that fits the budget."""
        return (self.observer and self.observer.refused) or self.planner


def make_runnable(planner: Planner, budget: int, observer: Observer | None = None) -> Runnable:
    """The plan for ``budget``, ready to run; ``observer``: of an earlier plan for the same kind of call."""
    plan = planner.plan(budget)
    if planner.saved is None:
        observer = observer or Observer(plan.graph, planner.options.loss_memory is not None)
    return Runnable(planner, plan, program_of(plan), observer)


def carried_runnable(planner: Planner, budget: int, like: Runnable) -> Runnable:
    """The plan for another size of the graph of ``like``: a schedule of its family if one fits, else a new one.

    Where keeping everything fits, that is the plan.
    """
    assert like.family is not None
    planner.options_of_blocks = like.family.options_for
    plan = None
    if planner.eager_peak > budget:
        plan = planner.carried_plan(budget, (like.plan.schedule, *like.family.schedules))
    plan = plan or planner.plan(budget)
    like.family.learn(planner, plan)
    observer = None
    if like.observer is not None:
        observer = Observer(plan.graph, planner.options.loss_memory is not None)
        observer.as_seen_by(like.observer, planner.room)
    return dataclasses.replace(like, planner=planner, plan=plan, program=program_of(plan), observer=observer)


def solved_again(runnable: Runnable, known: Known, model: torch.nn.Module, inputs: list[torch.Tensor]) -> Runnable:
    """``runnable``, whose costs were scaled, measured and solved for its own sizes. ``known``: costs, if any are."""
    budget = runnable.plan.budget
    try:
        planner = runnable.planner.measured_anew(model, inputs, known)
    except MeasureError:  # the caller measures this very call: at the next one
        return runnable
    found = [planner.carried_plan(budget, [runnable.plan.schedule])]
    with contextlib.suppress(InfeasibleBudgetError):
        found.append(planner.plan(budget))
    plans = [plan for plan in found if plan is not None]
    if not plans:  # the bounds that were scaled do not hold
        return dataclasses.replace(runnable, planner=dataclasses.replace(runnable.planner, scaled=False))
    plan = min(plans, key=lambda p: p.rerun_time)
    assert runnable.family is not None
    runnable.family.learn(planner, plan)
    return dataclasses.replace(runnable, planner=planner, plan=plan, program=program_of(plan))


def program_of(plan: Plan) -> Program:
    """The plan's schedule as a program, which draws masks whole where it can, and knows what exceeds the budget."""
    problem = plan.problem_with_usual_loss()
    levels = plan.usual.timeline
    program = draw_whole(compile_schedule(plan.graph, plan.schedule), problem, plan.schedule, levels)
    beside = plan.predicted_peak - plan.room.predicted_kept - max(levels) + plan.room.kept
    peaks = peaks_of_parts(program, problem, plan.schedule, levels)
    exceeding = frozenset(left for left, peak in peaks.items() if beside + peak > plan.budget)
    return dataclasses.replace(program, exceeding=exceeding)


def make_first(planners: list[Planner], budget: int, observer: Observer | None = None) -> Runnable:
    """The plan of the first planner that has one for ``budget``; raises what the last raises."""
    for planner in planners[:-1]:
        with contextlib.suppress(InfeasibleBudgetError):
            return make_runnable(planner, budget, observer)
    return make_runnable(planners[-1], budget, observer)


def reads_more(last: Runnable | None, runnable: Runnable) -> bool:
    """Whether the loss of the calls of ``last`` reads outputs that ``runnable``, not observed yet, is not for."""
    if last is None or last.observer is None or runnable.observer is None or runnable.observer.usage is not None:
        return False
    known, now = last.observer.usage, set(runnable.plan.graph.usage.roots)
    return known is not None and now < now.union(known.roots) <= now.union(runnable.observer.places)


def as_before(planner: Planner, last: Runnable | None, model: torch.nn.Module, inputs: list[torch.Tensor]) -> Planner:
    """``planner`` for a new kind of call, whose loss may read the outputs that it read in the calls of ``last``."""
    known = last.observer.usage if last is not None and last.observer is not None else None
    usage = planner.graphs.K.usage
    if known is None or planner.saved is not None or set(known.roots) <= set(usage.roots):
        return planner
    if not set(known.roots) <= set(differentiable(planner.graphs.S.d)):
        return planner  # it returns something else
    wanted = dataclasses.replace(usage, roots=tuple(sorted({*usage.roots, *known.roots})))
    return planner.for_usage(model, inputs, wanted, None, True)


_Entry = tuple[Hashable, frozenset[str], Runnable]


class PlanCache:
    """Plans by what they are for: the key of the call and the parameters without gradient; last used first.

    The least recently used goes when there are more than ``MAX_PLANS``; that is said once. ``dropped`` counts.

    Threads may call all methods at any time. What is read is a tuple that never changes; writers, one at a time, put
    another one in its place.
    """

    def __init__(self) -> None:
        self._entries: tuple[_Entry, ...] = ()
        self._before: tuple[_Entry, ...] = ()  # for other budgets
        self._lock = threading.Lock()
        self.dropped = 0
        self.numbers = itertools.count()  # see Runnable.number

    def find(self, key: Hashable, missing: frozenset[str]) -> Runnable | None:
        """The plan for such a call, if there is one. One for more missing gradients will do: those need no memory."""
        return next((v for known, planned, v in self._entries if missing <= planned and known == key), None)

    def plans(self) -> list[Runnable]:
        """All, last used first."""
        return [v for _, _, v in self._entries]

    def clear(self) -> None:
        with self._lock:
            self._entries = self._before = ()

    def add(self, key: Hashable, missing: frozenset[str], runnable: Runnable) -> None:
        """Keep a new plan, as the last one used."""
        with self._lock:
            entries = ((key, missing, runnable), *self._entries)
            self._entries = entries[:MAX_PLANS]
            over = len(entries) - len(self._entries)
            first = over > 0 and not self.dropped
            self.dropped += over
        if first:
            warn(
                f"more than {MAX_PLANS} kinds of calls (shapes, constants, modes) were planned: the plan that was not "
                "used for longest is dropped, and made again when it is needed. Pad inputs to a few shapes, and keep "
                "what changes at every step in tensors.",
                PlanningWarning,
            )

    def used(self, runnable: Runnable) -> None:
        if self._entries and self._entries[0][2] is not runnable:
            with self._lock:
                self._entries = tuple(sorted(self._entries, key=lambda entry: entry[2] is not runnable))

    def adapt(self, old: Runnable, new: Runnable) -> None:
        """Keep ``new`` in the place of ``old``, beside all others."""
        with self._lock:
            self._entries = tuple((key, missing, new if v is old else v) for key, missing, v in self._entries)

    def replace(self, old: Runnable, new: Runnable) -> None:
        """Keep ``new`` in the place of ``old``; all others are for another budget."""
        with self._lock:
            others = tuple(entry for entry in self._entries if entry[2] is not old)
            self._before = (*others, *self._before)[:MAX_PLANS]
            self._entries = tuple((key, missing, new) for key, missing, v in self._entries if v is old)

    def for_another_budget(self, key: Hashable, missing: frozenset[str]) -> Runnable | None:
        """What was planned for such calls, and observed of them, when the budget was another one."""
        found = [v for known, planned, v in self._before if planned == missing and known == key]
        with self._lock:
            self._before = tuple(entry for entry in self._before if entry[2] not in found)
        return found[0] if found else None
