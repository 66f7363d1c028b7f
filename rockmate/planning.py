"""From a module to a plan: graphs, problem, schedule. One short function a step; every intermediate kept."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rkgb.capture import drop_saved, preserved
from rkgb.errors import GraphError
from rkgb.guards import is_guard
from rkgb.Ktools import K_graph
from rkgb.pipeline import Graphs, make_all_graphs
from rkgb.sample import Sample, call_of
from rkgb.trees import tensors_of
from rockmate.artefact import SavedPlan, write_plan
from rockmate.budget import show_bytes
from rockmate.compiled import undo_bytes
from rockmate.errors import InfeasibleBudgetError, InputError, PlanError
from rockmate.progress import Report, silent
from rockmate.report import block_table
from rockmate.state import module_key
from solvers import (
    Backward,
    Block,
    ChainPlan,
    ChainPlanner,
    Data,
    Frontier,
    InfeasibleError,
    Node,
    Problem,
    Run,
    Schedule,
    ScheduleError,
    format_schedule,
    improve,
    keep_everything,
    lower_bound,
    solve_chain,
    step_name,
    walk,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Every budget leaves room for the numbers of the loss itself (its value, its gradient, counts), which are
# a few bytes each, but a block of the allocator.
SCALARS = 64

# For the whole-graph program to better a plan and to prove how little is left; mostly it needs a tenth of it.
IMPROVE_SECONDS = 2.0

# Plans that are by this fraction of the step above a proven bound, or less, are called the least.
PROVEN = 1e-4


def problem_of(graphs: Graphs, loss_memory: int | None = None) -> Problem:
    """The solvers' problem of ``graphs``. ``loss_memory``: see ``Rockmate``."""
    k = graphs.K
    nodes = tuple(
        Node(
            n.name,
            n.time,
            n.reads,
            n.makes,
            n.peak,
            Backward(b.time, b.reads, b.before, b.peak, b.after) if (b := n.backward) else None,
            n.rerun,
            n.random_bytes,
        )
        for n in k.nodes
    )
    blocks = tuple(Block(a, b, kind) for (a, b), kind in zip(k.s.blocks, graphs.classes, strict=True))
    loss = k.output_bytes + 3 * _in_float(k) if loss_memory is None else k.output_bytes + loss_memory
    data = tuple(Data(d.name, d.bytes, d.owner) for d in k.data)
    problem = Problem(nodes, data, frozenset(k.outputs), loss, blocks)
    problem.verify()
    return problem


def _in_float(k: K_graph) -> int:
    """Bytes of the outputs that carry gradients, in single precision at least, as losses compute with them."""
    carried = [k.s.d.values[v] for v in dict.fromkeys(k.s.d.outputs) if k.s.d.values[v].requires_grad]
    return sum(v.bytes * max(1, 4 // v.dtype.itemsize) for v in carried)


class Bounded(NamedTuple):
    """A plan, and nanoseconds that a step takes at least within its budget, if they are known."""

    plan: ChainPlan
    bound: int | None


@dataclass
class Planner:
    """Graphs and problem of one module on one sample; plans for any number of budgets."""

    graphs: Graphs
    problem: Problem
    usual_loss: int
    costs: str
    loss_memory: int | None
    missing: frozenset[str]
    saved: SavedPlan | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    report: Report = silent
    _chain: ChainPlanner | None = None

    @property
    def reserved(self) -> int:
        """Bytes taken off every budget: for the numbers of the loss, and for what a failing guard must put back."""
        return SCALARS + undo_bytes(self.graphs.S)

    def chain(self) -> ChainPlanner:
        """The solver of the problem; it works when it is first asked, and keeps what it found."""
        if self._chain is None:
            self._chain = ChainPlanner(self.problem, report=lambda doing, part: self.report(f"solve {doing}", part))
        return self._chain

    def solve(self, budget: int) -> ChainPlan:
        """The cheapest schedule found within ``budget`` bytes."""
        return self.bounded(budget, prove=False).plan

    def bounded(self, budget: int, prove: bool = True) -> Bounded:
        """The cheapest schedule found within ``budget`` bytes, and, to ``prove`` it, what none can be below."""
        start = time.perf_counter()
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
        if walk(self.problem, keep_everything(self.problem)).peak <= room:
            return Bounded(solve_chain(self.problem, room), self.problem.eager_time)
        try:
            found = self.chain().solve(room)
            if self.costs == "flops":
                return Bounded(found, lower_bound(self.problem, room) if prove else None)
            self.report("solve whole", 0.0)
            return Bounded(*improve(self.problem, found, room, IMPROVE_SECONDS))
        except InfeasibleError as error:
            least = error.min_budget + self.reserved
            message = (
                f"a budget of {show_bytes(budget)} is too small: the smallest that can be planned is "
                f"{show_bytes(least)} ({least} bytes), set by {error.step}. "
                "Raise the budget or make the batch smaller."
            )
            raise InfeasibleBudgetError(message, least) from error

    def frontier(self) -> Frontier:
        """Time against memory, with room for the loss in every budget."""
        found = self.chain().frontier()
        points = tuple((budget + self.reserved, overhead) for budget, overhead in found.points)
        return Frontier(found.min_budget + self.reserved, found.max_budget + self.reserved, points)

    def plan(self, budget: int) -> Plan:
        """The plan for ``budget`` bytes: the saved one, if there is one and it is for this budget."""
        saved = self.saved if self.saved and self.saved.budget == budget else None
        found, bound = self.bounded(budget) if saved is None else Bounded(self._from_file(saved), None)
        return Plan(
            budget,
            self.predicted_peak(found),
            found.overhead,
            found.schedule,
            self.problem,
            self.graphs.K,
            found.source,
            dict(self.seconds),
            self.usual_loss,
            self.costs,
            self.loss_memory,
            self.missing,
            bound,
        )

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

    def predicted_peak(self, solution: ChainPlan) -> int:
        """The peak of ``solution`` with the usual loss (or the one given)."""
        peak = walk(dataclasses.replace(self.problem, loss=self.usual_loss), solution.schedule).peak
        return peak + undo_bytes(self.graphs.S)


def make_planner(
    model: torch.nn.Module,
    sample: Sample,
    sample_kwargs: dict[str, Any] | None,
    costs: str,
    loss_memory: int | None,
    report: Report = silent,
    saved: SavedPlan | None = None,
) -> Planner:
    """Trace and measure ``model`` on ``sample``; with a ``saved`` plan, the figures are those of its file.

    ``report``: who is told of the progress, then and when it solves.
    """
    if costs not in ("measured", "flops"):
        raise InputError(f'costs={costs!r}: choose "measured" (time every operation) or "flops" (same on every run)')
    seconds: dict[str, float] = {}
    marks: list[tuple[str, float]] = []

    def phase(name: str, part: float) -> None:
        report(name, part)
        if marks and marks[-1][0] == name:
            return
        now = time.perf_counter()
        if marks:
            seconds[marks[-1][0]] = now - marks[-1][1]
        marks.append((name, now))

    try:
        if saved is None:
            graphs = make_all_graphs(model, sample, sample_kwargs, costs=costs, report=phase)
        else:
            phase("load", 0.0)
            graphs = saved.graphs(model, sample, sample_kwargs)
    except (GraphError, RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        if not isinstance(error, GraphError) or error.__cause__ is not None:  # else it says what is wrong
            _check_call(model, sample, sample_kwargs, error)
        raise
    if not graphs.S.nodes:
        raise InputError(
            "the model returns no tensor that it computes from this sample, so there is nothing to plan: check what "
            "its forward returns, and the mode that it is in"
        )
    phase("solve", 0.0)
    problem = problem_of(graphs, loss_memory)
    usual = 3 * _in_float(graphs.K) if loss_memory is None else problem.loss
    missing = missing_gradients(model)
    if saved is not None and not missing <= saved.missing:
        raise PlanError(
            f"the plan in {saved.path} was made when {', '.join(sorted(missing - saved.missing))} had gradients, which "
            "now have none: their gradients would not fit. Make a plan anew, or zero_grad(set_to_none=False) first."
        )
    planned = saved.missing if saved else missing
    return Planner(graphs, problem, usual, costs, loss_memory, planned, saved, seconds, report)


def missing_gradients(model: torch.nn.Module) -> frozenset[str]:
    """Parameters whose gradients would be new memory that stays."""
    return module_key(model)[1]


def _check_call(model: torch.nn.Module, sample: Sample, sample_kwargs: dict[str, Any] | None, error: Exception) -> None:
    """After tracing failed: ``InputError`` if the model itself cannot be called with the sample."""
    args, kwargs = call_of(sample, sample_kwargs)
    try:
        with torch.enable_grad(), drop_saved(), preserved(model, tensors_of((args, kwargs))):
            model(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as own:
        raise InputError(
            f"the model cannot be called with this sample: {type(own).__name__}: {own}. "
            f"The sample was passed as {len(args)} positional and {len(kwargs)} keyword arguments."
        ) from error


@dataclass(frozen=True, repr=False)
class Plan:
    """What will be kept and what computed again, with the figures promised for it.

    ``usual_loss``: the bytes of the loss that ``predicted_peak`` counts; ``problem.loss`` leaves room for a larger one.
    ``lower_bound``: nanoseconds, by ``problem``'s figures, that a step takes at least within the budget, whatever runs
    again (proven for all schedules that ``solvers.walk`` accepts, or for those of ``solvers.whole_graph``'s
    class where that is higher); None for a plan that was loaded.
    """

    budget: int
    predicted_peak: int
    predicted_overhead: float
    schedule: Schedule
    problem: Problem
    graph: K_graph
    solver: str
    setup_seconds: dict[str, float]
    usual_loss: int
    costs: str = "measured"
    loss_memory: int | None = None
    missing: frozenset[str] = frozenset()
    lower_bound: int | None = None

    @property
    def gap(self) -> float | None:
        """How much less, as a fraction of the planned step, the best schedule can take at most; 0 if none is better."""
        if self.lower_bound is None:
            return None
        planned = walk(self.problem, self.schedule).time
        return (planned - self.lower_bound) / planned if planned else 0.0

    @property
    def guards(self) -> tuple[str, ...]:
        """Values that the module's Python read from tensors; a call that finds others is planned anew."""
        return tuple(f"{n.op} at {n.line}" for n in self.graph.s.d.nodes if is_guard(n))

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know of how the module was read."""
        return self.graph.s.d.notes

    @property
    def recomputed(self) -> int:
        """How many times a node runs again."""
        return sum(isinstance(step, Run) for step in self.schedule) - len(self.problem.nodes)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; ``Rockmate(model, sample, plan=path)`` runs it, here or on another machine."""
        write_plan(
            path,
            self.graph,
            self.problem,
            self.schedule,
            budget=self.budget,
            predicted_peak=self.predicted_peak,
            predicted_overhead=self.predicted_overhead,
            solver=self.solver,
            costs=self.costs,
            loss_memory=self.loss_memory,
            missing=sorted(self.missing),
        )

    def program(self) -> str:
        """The schedule as a readable program."""
        return format_schedule(self.problem, self.schedule)

    def problem_with_usual_loss(self) -> Problem:
        """The problem whose walk has the predicted peak."""
        return dataclasses.replace(self.problem, loss=self.usual_loss)

    def plot_memory(self, path: str | Path | None = None) -> Figure:
        """Memory over the time of a step as a figure, also written to ``path``; see ``rockmate.plot.plot_memory``."""
        from rockmate.plot import plot_memory

        return plot_memory(self, path)

    def __repr__(self) -> str:
        return f"<Plan: {show_bytes(self.predicted_peak)} of {show_bytes(self.budget)}, {self._overhead()} longer>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """A notebook shows the summary."""
        printer.text(str(self))

    def _overhead(self) -> str:
        return f"{100 * self.predicted_overhead:.1f} %"

    def _proof(self) -> str:
        gap = self.gap
        if gap is None:
            return ""
        return (
            ", proven to be the least" if gap < PROVEN else f", at most {100 * gap:.2f} % of the step above the least"
        )

    def __str__(self) -> str:
        seconds = ", ".join(f"{name} {s:.1f}" for name, s in self.setup_seconds.items())
        kinds = len({b.kind for b in self.problem.blocks})
        walked = walk(self.problem_with_usual_loss(), self.schedule)
        at = step_name(self.problem, self.schedule[walked.peak_step])
        notes = [f"guard               {g}" for g in self.guards] + [f"note                {n}" for n in self.notes]
        return "\n".join(
            [
                f"budget              {show_bytes(self.budget)}",
                f"predicted peak      {show_bytes(self.predicted_peak)}, at {at}",
                f"predicted overhead  {self._overhead()}{self._proof()}",
                f"nodes               {len(self.problem.nodes)}; runs again: {self.recomputed}",
                f"blocks              {len(self.problem.blocks)}, of them distinct: {kinds}",
                f"found by            {self.solver}",
                f"set-up              {sum(self.setup_seconds.values()):.1f} s: {seconds}",
                *notes,
                "",
                block_table(self.problem, self.schedule),
            ]
        )
