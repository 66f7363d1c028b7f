"""Plans of one problem, for any number of budgets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import torch

from rkgb.cost.usage import Usage
from rkgb.pipeline import Graphs
from rkgb.probe.contexts import context_bytes
from rockmate.budget import show_bytes
from rockmate.errors import InfeasibleBudgetError, PlanError
from rockmate.planning.artefact import SavedPlan
from rockmate.planning.disk import places_of
from rockmate.planning.kept import LOADED, Bounded, kept_or_made
from rockmate.planning.least import too_small
from rockmate.planning.options import PlanOptions
from rockmate.planning.plan import Plan
from rockmate.planning.problem import Room, clocks_of, clocks_without_reruns, usual_problem
from rockmate.planning.ways import Asked
from rockmate.progress import Report, silent
from solvers import (
    ChainPlan,
    ChainPlanner,
    Frontier,
    InfeasibleError,
    Options,
    Problem,
    Schedule,
    ScheduleError,
    SolvedViews,
    SolverOptions,
    improve,
    keep_everything,
    lower_bound,
    solve,
    walk,
)

# For the whole-graph program to better a plan and to prove how little is left. Of eleven plans (GPTs, ResNet-50, an
# encoder with its decoder) none was better after two seconds than after one.
IMPROVE_SECONDS = 1.0

# For a solver that was asked for by name, unless the caller says how long.
SOLVER_SECONDS = 60.0

# A schedule that leaves no more of the budget than this is not solved again when a step has shown what its loss takes.
LITTLE = 0.01

CARRIED = "carried over from another size"
"""What a plan is found by whose schedule is that of another size of the graph."""


@dataclass(eq=False)
class PlanFinder:
    """Graphs and problem of one module on one sample; plans for any number of budgets.

    ``room``: for the loss. ``missing``: parameters whose gradients the backward makes. ``saved``: the file that the
    figures are from. ``seconds``: what each phase took. ``scaled``: costs are those of another size, scaled, so that
    there is nothing to gain from a long search, and nothing to prove. ``options_of_blocks``: what blocks may run at
    another size, by what the caller does with the outputs. ``solved``: views of blocks that were solved. ``ways``:
    schedules that calls may run beside others. ``call``: what plans say that they are for.
    """

    graphs: Graphs
    problem: Problem
    room: Room
    options: PlanOptions
    missing: frozenset[str]
    saved: SavedPlan | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    report: Report = silent
    scaled: bool = False
    options_of_blocks: Callable[[Usage], Options | None] = lambda _: None
    solved: SolvedViews = field(default_factory=dict)
    ways: dict[Asked, list[Schedule]] = field(default_factory=dict, init=False)
    call: tuple[str, ...] = ()
    pieces: str = ""
    _chain: ChainPlanner | None = None
    _end: float = inf

    @property
    def reserved(self) -> int:
        """Bytes taken off every budget: for the numbers of the loss, for what it keeps through the backward, and for
        what is ``beside`` the problem.
        """
        return self.room.scalars + self.room.kept + self.beside

    @cached_property
    def beside(self) -> int:
        """Bytes for what functions keep in their ``ctx``."""
        return context_bytes(self.graphs.S)

    @cached_property
    def everything(self) -> ChainPlan:
        """The step that runs nothing again."""
        schedule = keep_everything(self.problem)
        return ChainPlan(schedule, walk(self.problem, schedule), "keep everything")

    @property
    def eager_peak(self) -> int:
        """The budget of that step."""
        return self.everything.peak + self.reserved

    @property
    def device(self) -> torch.device:
        return self.graphs.S.device

    def chain(self) -> ChainPlanner:
        """The solver of the problem; it works when it is first asked, and keeps what it found."""
        if self._chain is None:
            self._chain = ChainPlanner(
                self.problem,
                report=lambda doing, part: self.report(f"solve {doing}", part),
                remaining=self._remaining,
                solved=self.solved,
            )
        return self._chain

    def _remaining(self) -> float:
        return max(0.0, self._end - time.perf_counter())

    def _reason(self) -> str:
        """What cut the search for the last plan short, if anything did."""
        stopped = self._chain.stopped if self._chain else 0
        if not stopped:
            return ""
        each = SolverOptions().time_limit
        limit = f"of {each:g} s a program" if self.options.time_limit == inf else f"of {self.options.time_limit:g} s"
        return f"at the time limit {limit}, with {stopped} integer programs not solved to the end"

    def solve(self, budget: int) -> ChainPlan:
        """The cheapest schedule found within ``budget`` bytes."""
        return self.bounded(budget, prove=False).plan

    def bounded(self, budget: int, prove: bool = True) -> Bounded:
        """The cheapest schedule found within ``budget`` bytes, and, to ``prove`` it, what none can be below."""
        start = time.perf_counter()
        self._end = start + self.options.time_limit
        try:
            return self._bounded(budget, prove)
        finally:
            self.seconds["solve"] = time.perf_counter() - start

    def _bounded(self, budget: int, prove: bool) -> Bounded:
        """Keeping everything needs no solver.

        What the whole-graph program makes of the chain's plan depends on the time it has, so on the machine: where
        plans must be the same everywhere, with ``costs="flops"``, it is left out.
        """
        room = budget - self.reserved
        if self.eager_peak <= budget:
            return Bounded(self.everything, self.problem.eager_time)
        if self.options.solver != "auto":
            return self._by_name(budget, room)
        try:
            if self.scaled:
                return Bounded(self._solved_as_before(room) or self.chain().solve(room), None, self._reason())
            found = self.chain().solve(room)
            reason = self._reason()
            seconds = min(IMPROVE_SECONDS, self._remaining())
            if self.options.costs == "flops" or not seconds:
                return Bounded(found, lower_bound(self.problem, room) if prove else None, reason)
            self.report("solve whole", 0.0)
            return Bounded(*improve(self.problem, found, room, seconds), reason)
        except InfeasibleError as error:
            least = error.min_budget + self.reserved
            declared = 0 if self.room.seen else self.options.loss_memory
            kept = self.room.kept if declared is None else 0
            figures = budget, least, self.eager_peak, error.at
            message = too_small(self.graphs.K, self.problem, *figures, kept, self._reason(), declared)
            raise InfeasibleBudgetError(message, least) from None

    def _solved_as_before(self, room: int) -> ChainPlan | None:
        """The cheapest schedule whose blocks run as at another size; None if none fits."""
        options = self.options_of_blocks(self.graphs.K.usage)
        if options is None:
            return None
        try:
            return ChainPlanner(self.problem, options).solve(room)
        except InfeasibleError:
            return None

    def _by_name(self, budget: int, room: int) -> Bounded:
        seconds = min(self.options.time_limit, SOLVER_SECONDS)
        found = solve(self.problem, max(0, room), self.options.solver, time_limit=seconds)
        if found.schedule is None:
            least = self.chain().frontier().min_budget + self.reserved
            message = (
                f"solver={self.options.solver!r} has no plan for a budget of {show_bytes(budget)}: {found.reason}. The "
                f'smallest budget that solver="auto" plans for is {show_bytes(least)}.'
            )
            raise InfeasibleBudgetError(message, least)
        return Bounded(ChainPlan(found.schedule, walk(self.problem, found.schedule), found.solver), found.bound)

    def frontier(self) -> Frontier:
        """Time against memory, with room for the loss in every budget."""
        self._end = time.perf_counter() + self.options.time_limit
        found = self.chain().frontier()
        more = self.reserved
        return Frontier(
            found.min_budget + more,
            found.max_budget + more,
            tuple((budget + more, overhead) for budget, overhead in found.points),
            baselines=tuple(b._replace(peak=b.peak + more) for b in found.baselines),
        )

    def plan(self, budget: int) -> Plan:
        """The plan for ``budget`` bytes: the saved one, if it is for this budget; or that of an earlier process."""
        if self.saved and self.saved.budget == budget:
            return self._plan(budget, Bounded(self._from_file(self.saved), None, self.saved.reason))
        if self.eager_peak <= budget or self.options.solver != "auto":  # solvers of the caller's may have changed
            return self._plan(budget, self.bounded(budget))
        asked = "solve", self.options.costs == "flops", self.scaled, self.options.time_limit
        return self._plan(budget, self._kept_or_made(budget, asked, lambda: self.bounded(budget)))

    def _kept_or_made(self, budget: int, asked: tuple[object, ...], make: Callable[[], Bounded]) -> Bounded:
        start = time.perf_counter()
        found = kept_or_made(places_of(self.options.disk), self.problem, budget - self.reserved, asked, make)
        if found.plan.source.endswith(LOADED):
            self.seconds.pop("solve", None)
            self.seconds["load"] = self.seconds.get("load", 0.0) + time.perf_counter() - start
        return found

    def _plan(self, budget: int, bounded: Bounded, provable: int | None = None) -> Plan:
        """``provable``: as in ``Plan``."""
        found, bound, reason = bounded
        usual = found.walk
        if (problem := self.usual_problem) != self.problem:
            usual = walk(problem, found.schedule)
        return Plan(
            budget=budget,
            costs=self.options.costs,
            loss_memory=self.options.loss_memory,
            missing=self.missing,
            room=self.room,
            solver=found.source,
            reason=reason,
            call=self.call,
            pieces=self.pieces,
            predicted_peak=usual.peak + self.beside_predicted,
            predicted_overhead=self._overhead(found),
            schedule=found.schedule,
            walk=found.walk,
            usual=usual,
            problem=self.problem,
            graph=self.graphs.K,
            setup_seconds=dict(self.seconds),
            bound=bound,
            provable=provable,
        )

    def _overhead(self, found: ChainPlan) -> float:
        """How much longer the step is than without recomputation, as a fraction; by two clocks where there are two."""
        kept, ours = clocks_without_reruns(self.graphs.K), clocks_of(self.graphs.K, found.schedule)
        return found.overhead if kept is None or ours is None else ours.time / max(1, kept.time) - 1

    def described(self, budget: int, found: ChainPlan) -> Plan:
        """A schedule that was found elsewhere, as a plan."""
        return self._plan(budget, Bounded(found, None))

    def _from_file(self, saved: SavedPlan) -> ChainPlan:
        """The saved schedule, walked here. Raises ``PlanError`` if it does not keep what the file promises."""
        schedule = saved.schedule(self.problem)
        try:
            found = ChainPlan(schedule, walk(self.problem, schedule), saved.solver)
        except ScheduleError as error:
            raise PlanError(f"the program in {saved.path} is not valid: {error}") from error
        if found.peak + self.reserved > saved.budget:
            raise PlanError(
                f"the program in {saved.path} takes {found.peak + self.reserved} bytes, its budget is {saved.budget}"
            )
        return found

    @property
    def usual_problem(self) -> Problem:
        """The problem with the loss that predictions are for."""
        return usual_problem(self.problem, self.graphs.K, self.room)

    @property
    def beside_predicted(self) -> int:
        """Bytes of predictions beside that problem. A loss that the module returns has a gradient of its own, which
        the caller's ``backward()`` makes.
        """
        d, usage = self.graphs.D, self.graphs.K.usage
        losses = sum(d.values[v].bytes for v in usage.root_values(d) if not d.values[v].shape)
        return losses + self.room.predicted_kept + self.beside
