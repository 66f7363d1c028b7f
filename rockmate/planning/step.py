"""The plan of a step whose forward is several graphs, with other code between them."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import shorten

from rockmate.budget import show_bytes
from rockmate.planning.plan import Plan
from solvers.sequence import Stage, overhead_of, peak_of


@dataclass(frozen=True, repr=False)
class StepPlan:
    """What each graph of a step keeps and runs again, in the order of the forward.

    ``budget``: bytes that one forward and its backward may allocate. ``parts``: the plan of each graph, and ``names``
    what it is called. ``stages`` and ``chosen``: the problem that was solved, and the choice of each graph in it.
    ``small``: how many graphs were so small that they run as they are.
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

    def __repr__(self) -> str:
        return (
            f"<StepPlan: {len(self.parts)} graphs, {show_bytes(self.predicted_peak)} of {show_bytes(self.budget)}, "
            f"{100 * self.predicted_overhead:.1f} % longer>"
        )

    def __str__(self) -> str:
        lines = [
            f"budget              {show_bytes(self.budget)}",
            f"predicted peak      {show_bytes(self.predicted_peak)}",
            f"predicted overhead  {100 * self.predicted_overhead:.1f} %",
            f"graphs              {len(self.parts)}, and {self.small} small ones that run as they are",
            "",
            "graph  nodes  runs again       keeps   keeps at most   of",
        ]
        for number, (name, part, stage, k) in enumerate(
            zip(self.names, self.parts, self.stages, self.chosen, strict=True), 1
        ):
            kept, most = stage.choices[k].kept, max(c.kept for c in stage.choices)
            inputs = shorten(name, 60, placeholder=" …")
            lines.append(
                f"{number:>5}  {len(part.problem.nodes):>5}  {part.recomputed:>10}  {show_bytes(kept):>10}  "
                f"{show_bytes(most):>14}   {inputs}"
            )
        return "\n".join(lines)
