"""The plan of a module: what it keeps and runs again, and the figures promised for it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from rkgb.blocks.fingerprint import describe_inputs
from rkgb.device.allocator import Allocator
from rkgb.Ktools import K_graph
from rockmate.budget import show_bytes
from rockmate.errors import PlanError
from rockmate.planning.artefact import PlanFields, write_plan
from rockmate.planning.kept import LOADED
from rockmate.planning.plot import MemoryPage, Place, plot_memory, save_memory_html
from rockmate.planning.problem import clocks_of, usual_problem
from rockmate.planning.report import block_rows, block_table, facts_of_call, text_of_facts
from rockmate.planning.reserved import predict_reserved
from rockmate.run.watch import MeasuredStep
from solvers import Bwd, Loss, Problem, Run, Schedule, Step, Walk, format_schedule, keep_everything, lower_bound, walk
from solvers.clocks import Clocks
from solvers.tables import html_facts, html_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Plans that are by this fraction of the step above a proven bound, or less, are called the least.
PROVEN = 1e-4

MOST_OUTPUTS = 3
"""Of more outputs without gradient the largest ones are named."""


class ShownPlan:
    """A plan as text, program, figure and page."""

    budget: int
    problem: Problem
    schedule: Schedule
    setup_seconds: dict[str, float]
    predicted_peak: Any
    predicted_overhead: Any

    def problem_with_usual_loss(self) -> Problem:
        """The problem whose walk has the predicted peak."""
        raise NotImplementedError

    def places_of_nodes(self) -> list[Place]:
        """Where each node comes from."""
        raise NotImplementedError

    def _facts(self) -> list[tuple[str, str]]:
        """What is said of it: names and texts, one line each."""
        raise NotImplementedError

    @property
    def recomputed(self) -> int:
        """How many times a node runs again."""
        return sum(isinstance(step, Run) for step in self.schedule) - len(self.problem.nodes)

    def program(self) -> str:
        """The schedule as a program: one step a line, with its memory and the user's source line.

        ``fwd`` and ``bwd`` run the forward and the backward of a node. ``del`` frees a tensor. "recompute" marks second
        runs. ``solvers.parse_schedule(plan.problem, text)`` reads it back.
        """
        return format_schedule(self.problem, self.schedule, [place.line for place in self.places_of_nodes()])

    def plot_memory(self, path: str | Path | None = None, *, measured: MeasuredStep | None = None) -> Figure:
        """Memory over the time of a step as a figure of matplotlib, in MiB and ms, also written to ``path``.

        ``measured``: what ``rockmate.measure_step(step)`` saw of a step under this plan, drawn on the same axes.
        Raises ``ImportError`` where matplotlib is missing, ``InputError`` if ``measured`` is of another plan.
        """
        return plot_memory(self.problem_with_usual_loss(), self.schedule, self.budget, path, measured)

    def save_memory_html(self, path: str | Path) -> MemoryPage:
        """Write memory over the time of a step as one HTML page, which needs no network, for looking at in a browser.
        A notebook shows what is returned.

        Under the mouse, each step says its operation, module path (where it is known) and source line, what is live
        meanwhile, and whether its results are kept or computed again. Raises ``ImportError`` where plotly is missing.
        """
        problem, about = self.problem_with_usual_loss(), repr(self).strip("<>")
        return save_memory_html(problem, self.schedule, self.places_of_nodes(), self.budget, about, path)

    def _overhead(self) -> str:
        return f"{100 * self.predicted_overhead:.1f} %"

    def _set_up(self) -> tuple[str, str]:
        seconds = ", ".join(f"{name} {s:.1f}" for name, s in self.setup_seconds.items())
        return "set-up", f"{sum(self.setup_seconds.values()):.1f} s: {seconds}"

    def __repr__(self) -> str:
        sizes = f"peak {show_bytes(self.predicted_peak)}, budget {show_bytes(self.budget)}"
        return f"<{type(self).__name__}: {sizes}, {self._overhead()} longer>"

    def __str__(self) -> str:
        return text_of_facts(self._facts())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """A notebook without HTML shows the summary."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """A notebook shows the summary as a table."""
        return html_facts(self._facts())


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(ShownPlan, PlanFields):
    """What will be kept and what computed again, with the figures promised for it.

    ``call``: for which call, in a few words for each input, then the mode: ("x float32[8, 64]", "train", "autocast
    bfloat16"). ``predicted_peak``: bytes. ``predicted_overhead``: as a fraction of the step without recomputation.
    ``setup_seconds``: of each phase that made the plan; "capture" is TorchDynamo's, where the call was captured for it.
    ``pieces``: of how many groups of light operations kernels were compiled, and in how many seconds, with a line for
    each class of them; empty if none was to be. ``bound``: see ``lower_bound``, if it is known. ``provable``: bytes for
    ``problem`` within which it is proven when it is asked for. ``walk``: the figures of ``schedule``; ``usual``: those
    with the loss that predictions are for.
    """

    call: tuple[str, ...] = ()
    pieces: str = ""
    predicted_peak: int
    predicted_overhead: float
    schedule: Schedule
    walk: Walk
    usual: Walk
    problem: Problem
    graph: K_graph
    setup_seconds: dict[str, float]
    bound: int | None = None
    provable: int | None = None

    @cached_property
    def lower_bound(self) -> int | None:
        """Nanoseconds, by ``problem``'s figures, that a step takes at least within the budget, whatever runs again.

        Proven for all schedules that ``solvers.walk`` accepts, or for those of ``solvers.whole.whole_graph``'s class
        where that is higher. None for a plan that was loaded, or carried over.
        """
        return self.bound if self.provable is None else lower_bound(self.problem, self.provable)

    @property
    def status(self) -> Literal["optimal", "feasible"]:
        """ "optimal": no schedule within the budget takes less time, which is proven. "feasible": some may.

        This holds for schedules that run operations again in the program's order, each at most once between two
        backwards. ``lower_bound`` may be that of these alone.
        """
        return "optimal" if self.gap is not None and self.gap < PROVEN else "feasible"

    @property
    def gap(self) -> float | None:
        """How much less, as a fraction of the planned step, the best schedule can take at most; 0 if none is better.

        Of the schedules that ``status`` speaks of.
        """
        if self.lower_bound is None:
            return None
        planned = self.walk.time
        return (planned - self.lower_bound) / planned if planned else 0.0

    @cached_property
    def eager_peak(self) -> int:
        """Bytes that the step takes if nothing runs again, predicted as ``predicted_peak`` is."""
        problem = self.problem_with_usual_loss()
        return self.predicted_peak - self.usual.peak + walk(problem, keep_everything(problem)).peak

    @cached_property
    def predicted_reserved(self) -> int:
        """Bytes that CUDA's caching allocator takes from the device for a step, by a simulation of the allocator.

        As ``measure_peak(step, reserved=True)``: above what it holds for parameters, gradients and inputs, with no
        unused blocks to begin with, on one stream and with the default settings. The CPU's allocator reserves nothing:
        there this is what the step would need on a GPU.
        """
        d, missing = self.graph.s.d, self.graph.missing
        allocator = Allocator()
        for storage in d.storages:
            if storage.owner is None:
                allocator.malloc(storage.bytes)
        for v in d.sources:
            if d.values[v].requires_grad and v not in missing:
                allocator.malloc(d.values[v].bytes)
        before = allocator.reserved
        levels = predict_reserved(self.problem_with_usual_loss(), self.schedule, allocator)
        return levels.reserved - before + self.room.predicted_kept

    @cached_property
    def kept(self) -> int:
        """Bytes that a call holds from the end of its forward to its backward, what it returns included."""
        return self.walk.timeline[self.schedule.index(Loss())] - self.problem.loss

    @property
    def rerun_time(self) -> int:
        """Nanoseconds of a step in which nodes run again, predicted."""
        return self.walk.time - self.problem.eager_time

    @cached_property
    def clocks(self) -> Clocks | None:
        """A step of the device, and of the host that launches what it runs; None where nobody has timed launches."""
        return clocks_of(self.graph, self.schedule)

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        """Itself, as nothing in it changes."""
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """A plan is saved for its model, without which its graph means nothing."""
        raise PlanError(
            "a plan is not pickled: plan.save(path) writes it, and Rockmate(model, sample, plan=path) runs it"
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; ``Rockmate(model, sample, plan=path)`` runs it, here or on another machine.

        Raises ``PlanError`` where there is no such file to write to.
        """
        fields = dataclasses.replace(self, solver=self.solver.removesuffix(LOADED))
        promised = {name: getattr(self, name) for name in ("call", "predicted_peak", "predicted_overhead")}
        write_plan(path, fields, self.graph, format_schedule(self.problem, self.schedule), promised)

    def places_of_nodes(self) -> list[Place]:
        s = self.graph.s
        main = [s.main(i) for i in range(len(s.nodes))]
        return [Place(node.name, op.path, op.line) for node, op in zip(s.nodes, main, strict=True)]

    def problem_with_usual_loss(self) -> Problem:
        return usual_problem(self.problem, self.graph, self.room)

    def picture(self) -> Any:
        """What is kept and what runs again, as a ``graphviz.Digraph``, which shows itself in a notebook.

        First the chain of blocks, then the operations of each block that is treated in its own way, in the user's
        words: module paths on the boxes, source lines under the mouse. ``rkgb.print_graph(plan)`` writes it to a file.
        """
        from rockmate.planning.picture import Drawn, draw_plan  # imported where a picture is asked for

        return draw_plan(
            Drawn(self.graph.s, self.problem_with_usual_loss(), self.schedule, self.predicted_overhead),
            f"plan: {show_bytes(self.predicted_peak)} of {show_bytes(self.budget)}, {self._overhead()} longer",
            f"without recomputation {show_bytes(self.eager_peak)} · nodes: {len(self.problem.nodes)}, "
            f"runs again: {self.recomputed}",
        )

    def _proof(self) -> str:
        gap = self.gap
        if gap is None:
            return ""
        proven = ", proven to be" if gap < PROVEN else f", at most {100 * gap:.2f} % of the step above"
        return f"{proven} the least in the program's order"

    def _idle_outputs(self) -> list[tuple[str, str]]:
        """Outputs that get no gradient from outside, and what of them counts."""
        d, usage = self.graph.s.d, self.graph.usage
        idle: dict[bool, list[int]] = {}
        for k, v in enumerate(d.outputs):
            if k not in usage.roots and v not in d.sources and d.values[v].bytes > 0:
                idle.setdefault(k in usage.held, []).append(v)
        until = {
            False: "until forward has returned: what the caller keeps of them is beside the budget",
            True: "to the end of the backward, as the caller keeps them",
        }
        said = [("no gradient for", f"{self._listed(found)}; counted {until[held]}") for held, found in idle.items()]
        return [*said, ("", _NOT_RETURNED)] if said else []

    def _listed(self, values: list[int]) -> str:
        """Names and bytes of some values, of the largest ones if there are many."""
        sizes = {v: self.graph.s.d.values[v].bytes for v in values}
        first = values if len(values) <= MOST_OUTPUTS else sorted(values, key=lambda v: -sizes[v])[:MOST_OUTPUTS]
        names = [f"{self.graph.s.shown[v]} ({show_bytes(sizes[v])})" for v in first]
        if rest := [v for v in values if v not in first]:
            names.append(f"{len(rest)} more ({show_bytes(sum(sizes[v] for v in rest))})")
        return ", ".join(names)

    def _facts(self) -> list[tuple[str, str]]:
        """What is said above the table of blocks: names and texts, one line each."""
        kinds = len({b.kind for b in self.problem.blocks})
        at = _moment(self.problem, self.schedule[self.usual.peak_step])
        facts = [
            *facts_of_call(self.call or describe_inputs(self.graph.s)),
            ("keeping everything" if self.pieces else "eager's peak", show_bytes(self.eager_peak)),
            ("budget", show_bytes(self.budget)),
            ("predicted peak", f"{show_bytes(self.predicted_peak)}, {at}"),
            ("predicted overhead", f"{self._overhead()} more time{'' if self.clocks else self._proof()}"),
            *([("bottleneck", str(self.clocks))] if self.clocks else []),
            ("nodes", f"{len(self.problem.nodes)}; runs again: {self.recomputed}"),
            ("blocks", f"{len(self.problem.blocks)}, of them distinct: {kinds}"),
            *(("" if k else "pieces", line) for k, line in enumerate(self.pieces.splitlines())),
            ("found by", self.solver),
            self._set_up(),
            *self._idle_outputs(),
        ]
        if self.room.seen:
            size = show_bytes(self.room.between + self.room.kept)
            facts.append(("room for the loss", f"{size}, as measured in the steps so far"))
        facts += [("search stopped", self.reason)] if self.reason else []
        return facts + [("note", n) for n in self.graph.s.d.notes]

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{block_table(self.problem, self.schedule, self.predicted_overhead)}"

    def _repr_html_(self) -> str:
        """A notebook shows the summary as tables."""
        rows, left_out = block_rows(self.problem, self.schedule, self.predicted_overhead)
        more = f"<p>{left_out}</p>" if left_out else ""
        return super()._repr_html_() + html_table(rows, left=[len(rows[0]) - 1]) + more


_NOT_RETURNED = "If you do not need them, let forward not return them (in transformers: use_cache=False)"


def _moment(problem: Problem, step: Step) -> str:
    if not isinstance(step, (Run, Bwd)):
        return "at the loss"
    name = problem.nodes[step.node].name
    return f"in the backward of {name}" if isinstance(step, Bwd) else f"in {name}"
