"""Plans made again for what a step has shown: what its loss reads and takes, and what the caller holds."""

from __future__ import annotations

import contextlib
import dataclasses

import torch

from rkgb.cost.usage import Usage, supposed
from rkgb.errors import MeasureError
from rkgb.warn import warn
from rockmate.budget import show_at_least
from rockmate.calls.observe import Observer
from rockmate.calls.runnable import Runnable, as_before, make_first, program_of
from rockmate.calls.terms import Terms
from rockmate.errors import BudgetWarning, InfeasibleBudgetError
from rockmate.planning.least import least_share
from rockmate.planning.plan import Plan
from rockmate.planning.planner import Planner
from rockmate.planning.problem import Room


def adapted(
    runnable: Runnable, last: Runnable | None, model: torch.nn.Module, inputs: list[torch.Tensor], terms: Terms
) -> Runnable:
    """``runnable``, or one for what its observer has seen.

    A plan of least memory, which no plan within the budget was found for, ran for what was supposed: now one for the
    budget of ``terms`` may be found. If none fits what the loss was seen to take, raises ``InfeasibleBudgetError``; if
    the terms want the least, it is said. What the caller holds longer than planned for counts where that fits, and is
    beside the budget otherwise, which is said.
    """
    planner, plan, observer = runnable.planner, runnable.plan, runnable.observer
    if observer is None:
        return runnable
    if not observer.news:
        with contextlib.suppress(MeasureError):
            planners = [as_before(planner, last, model, inputs), planner]
            found = make_first(planners, plan.budget, observer)
            return dataclasses.replace(found, number=runnable.number, family=runnable.family)
        return runnable
    observer.news = False
    try:
        found = _as_observed(runnable, observer, model, inputs, terms)
    except Warning:  # where warnings are errors, each is raised once
        raise
    except BaseException:  # Ctrl-C, too: what was seen must not be lost
        observer.news = True
        raise
    if found is not runnable and found.family is not None:
        found.family.learn(found.planner, found.plan)
    return found


def _as_observed(
    runnable: Runnable,
    observer: Observer,
    model: torch.nn.Module,
    inputs: list[torch.Tensor],
    terms: Terms,
    *,
    settles: bool = True,
) -> Runnable:
    """See ``adapted``. ``settles``: a share becomes one of what was seen, if it can be planned for."""
    planner, plan = runnable.planner, runnable.plan
    observer.refused = None
    before = terms.budget, terms.settled
    budget = terms.of_now(plan.budget)
    wanted = observer.planned_for(supposed(planner.graphs.S.d))
    now = plan.graph.usage
    fewer = dataclasses.replace(wanted, held=wanted.held & now.held, attached=wanted.attached & now.attached)
    failed: list[tuple[InfeasibleBudgetError, Planner]] = []
    for usage in dict.fromkeys((wanted, fewer)):
        try:
            seen = planner.for_usage(model, inputs, usage, observer.room, observer.unsure)
        except MeasureError:  # the caller measures this very call: plan at the next one
            observer.news = True
            return runnable
        if settles and usage is wanted and not observer.unsure and set(wanted.roots) < set(now.roots):
            terms.settle_again(planner, seen)
            budget = terms.of_now(plan.budget)
        try:
            found = _plan_for(seen, plan, budget)
        except InfeasibleBudgetError as error:
            failed.append((error, seen))
            continue
        if failed and not observer.unsure:
            problem, observer.refused = failed[0]
            warn(f"{_HELD}{problem}", BudgetWarning)
        if found is None:
            return runnable
        return dataclasses.replace(runnable, planner=seen, plan=found, program=program_of(found))
    problem, refused = failed[0]
    if (terms.budget, terms.settled) != before:
        terms.budget, terms.settled = before
        return _as_observed(runnable, observer, model, inputs, terms, settles=False)
    if observer.unsure or not (budget < plan.budget or _asks_for_more(wanted, observer.room, plan)):
        return runnable  # that more is taken is not known yet, and the next call is looked at; or the plan suffices
    if _share_has_grown(plan, planner, refused, terms):
        return _as_observed(runnable, observer, model, inputs, terms, settles=False)
    if budget < plan.budget:
        return _least_of(runnable, observer, refused, problem, terms)
    observer.refused = refused
    said = f"{_OTHERWISE}{problem}"
    if not terms.least:
        raise InfeasibleBudgetError(said, problem.min_budget)
    warn(said, BudgetWarning)
    return runnable


def _least_of(
    runnable: Runnable, observer: Observer, refused: Planner, problem: InfeasibleBudgetError, terms: Terms
) -> Runnable:
    """A budget has become less than any plan of ``refused`` takes: raise ``problem``, or the plan of least memory."""
    if not terms.least:
        observer.refused, first = refused, runnable.plan.budget
        more = _FIRST.format(show_at_least(first)) if first > problem.min_budget and not runnable.plan.room.seen else ""
        supposed, seen = runnable.planner.eager_peak, refused.eager_peak
        if not runnable.plan.room.seen and terms.settled and terms.settled[1] in (supposed, seen):
            needed = (first, supposed), (problem.min_budget, seen)  # a share is one of each in turn
            least, eager = max(needed, key=lambda pair: pair[0] / max(1, pair[1]))
            more += f' As a share of eager\'s peak, given from the start, "{least_share(least, eager)}" has a plan.'
        raise InfeasibleBudgetError(f"{problem}{more}", problem.min_budget)
    found = refused.with_auto_solver().plan(problem.min_budget)
    return dataclasses.replace(runnable, planner=refused, plan=found, program=program_of(found))


def _share_has_grown(plan: Plan, planner: Planner, seen: Planner, terms: Terms) -> bool:
    """Until now the loss of ``plan`` was supposed: a share of that step becomes one of the step as it was ``seen``."""
    before = terms.budget
    if not plan.room.seen and seen.eager_peak > planner.eager_peak:
        terms.settle_again(planner, seen)
    return terms.budget != before


def _plan_for(seen: Planner, plan: Plan, budget: int) -> Plan | None:
    """A plan for what was ``seen``; None where ``plan`` is one."""
    if (seen.graphs.K.usage, seen.room, budget) == (plan.graph.usage, plan.room, plan.budget):
        return None
    return (seen.kept_plan(plan) if budget == plan.budget else None) or seen.plan(budget)


_OTHERWISE = "the last step took more than the budget, as its loss used the outputs otherwise than planned for: "

_FIRST = " Given from the start, before a step has shown what its loss takes, a budget of {} has a plan."

_HELD = (
    "the last step held outputs until its backward was over that the budget has no room for, so that it may exceed the "
    "budget by these. Let go of them before the backward, or let forward not return them. With them, "
)


def _asks_for_more(usage: Usage, room: Room | None, plan: Plan) -> bool:
    """Whether a loss took more than ``plan`` has room for: other gradients, gradients that lie otherwise, or bytes."""
    now = plan.graph.usage
    roots = not set(usage.roots) <= set(now.roots)
    turned = now.turned is not None and not (usage.turned or frozenset()) <= now.turned
    return roots or turned or (room is not None and room.between + room.kept > plan.room.between + plan.room.kept)
