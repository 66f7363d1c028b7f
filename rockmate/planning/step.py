"""The plan of a step whose forward is several graphs, with other code between them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rockmate.budget import show_bytes
from rockmate.errors import PlanError
from rockmate.planning.plan import Plan, text_of_facts
from solvers.sequence import Stage, fastest, overhead_of, peak_of
from solvers.tables import html_facts, html_table, text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def graphs_of(count: int) -> str:
    """So many graphs, in words."""
    return f"{count} graphs with other code between them" if count > 1 else "one graph with other code around it"


@dataclass(frozen=True, repr=False)
class StepPlan:
    """What each graph of a step keeps and runs again, in the order of the forward.

    ``budget``: bytes that one forward and its backward may allocate. ``parts``: the plan of each graph, and ``names``
    what it is called. ``stages`` and ``chosen``: the problem that was solved, and the choice of each graph in it.
    ``small``: how many graphs run as they are, most since they are small.
    """

    budget: int
    names: tuple[str, ...]
    parts: tuple[Plan, ...]
    stages: tuple[Stage, ...]
    chosen: tuple[int, ...]
    small: int

    @property
    def predicted_peak(self) -> int:
        """Bytes at the worst moment of a step."""
        return peak_of(self.stages, self.chosen)

    @property
    def eager_peak(self) -> int:
        """Bytes that the step takes if nothing runs again."""
        return peak_of(self.stages, fastest(self.stages))

    @property
    def predicted_overhead(self) -> float:
        """Time that runs again, as a fraction of the graphs' time without recomputation."""
        return overhead_of(self.stages, self.chosen)

    @property
    def recomputed(self) -> int:
        """How many times a node runs again."""
        return sum(part.recomputed for part in self.parts)

    def program(self) -> str:
        """The schedules as readable programs, one after the other."""
        return "\n".join(f"# {name}\n{part.program()}" for name, part in zip(self.names, self.parts, strict=True))

    def save(self, path: object) -> None:
        """Such plans cannot be saved: raises ``PlanError``. ``cache=`` keeps what was measured and solved."""
        raise PlanError(
            "the plan of a step of several graphs cannot be saved, since TorchDynamo cuts the forward anew in each "
            "process. What was measured and solved is kept on disk without it (cache=)"
        )

    def picture(self) -> Any:
        """The blocks of each graph, what of them is kept and runs again, as a ``graphviz.Digraph``.

        ``rkgb.print_graph(plan)`` writes it to a file. ``parts`` have pictures of their own, with all operations.
        """
        from rockmate.planning.picture import Drawn, draw_step  # imported where a picture is asked for

        graphs = [
            Drawn(part.graph, part.problem, part.schedule, f"graph{number}_", f"graph {number}")
            for number, part in enumerate(self.parts, 1)
        ]
        overhead = f"{100 * self.predicted_overhead:.1f} % longer"
        title = f"plan: {show_bytes(self.predicted_peak)} of {show_bytes(self.budget)}, {overhead}"
        return draw_step(graphs, title, f"graphs: {self._count()}")

    def plot_memory(self, path: str | Path | None = None) -> Figure:
        """Predicted memory over the time of a step as a figure of matplotlib, in MiB and ms, also written to ``path``.

        What the code between graphs takes is drawn as lines: its time is not known. Steps of several graphs cannot be
        measured operation by operation, so there is no ``measured=``. Raises ``ImportError`` where matplotlib is
        missing.
        """
        from rockmate.planning.plot import Part, plot_step

        chosen = (stage.choices[k] for stage, k in zip(self.stages, self.chosen, strict=True))
        parts = [
            Part(part.problem, part.schedule, stage, choice)
            for part, stage, choice in zip(self.parts, self.stages, chosen, strict=True)
        ]
        return plot_step(parts, self.budget, self.eager_peak, path)

    def __repr__(self) -> str:
        return (
            f"<StepPlan: graphs {len(self.parts)}, peak {show_bytes(self.predicted_peak)}, "
            f"budget {show_bytes(self.budget)}, {100 * self.predicted_overhead:.1f} % longer>"
        )

    def _facts(self) -> list[tuple[str, str]]:
        return [
            ("eager's peak", show_bytes(self.eager_peak)),
            ("budget", show_bytes(self.budget)),
            ("predicted peak", show_bytes(self.predicted_peak)),
            ("predicted overhead", f"{100 * self.predicted_overhead:.1f} % more time"),
            ("graphs", self._count()),
        ]

    def _count(self) -> str:
        return f"{len(self.parts)}" + (f"; that run as they are: {self.small}" if self.small else "")

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("graph", "nodes", "runs again", "keeps", "keeps at most", "called with")]
        parts = zip(self.names, self.parts, self.stages, self.chosen, strict=True)
        for number, (name, part, stage, k) in enumerate(parts, 1):
            sizes = stage.choices[k].kept, max(c.kept for c in stage.choices)
            counts = str(number), str(len(part.problem.nodes)), str(part.recomputed)
            rows.append((*counts, *map(show_bytes, sizes), shorten(name, 60, placeholder=" …")))
        return rows

    def __str__(self) -> str:
        return f"{text_of_facts(self._facts())}\n\n{text_table(self._rows(), left=[5])}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """A notebook without HTML shows the summary."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """A notebook shows the summary as tables."""
        return html_facts(self._facts()) + html_table(self._rows(), left=[5])
