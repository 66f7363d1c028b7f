"""Calls that run one graph at different sizes: what was learned at one size serves the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from rkgb.cost.layouts import differentiated, layouts_at_other_sizes
from rkgb.cost.measure import Cost, Known
from rkgb.cost.scaled import choosing_anew, growth, scaled_costs
from rkgb.cost.usage import Usage
from rkgb.graphs import S_graph
from rkgb.probe.resize import Point
from rkgb.probe.skeleton import skeleton
from rkgb.settings import settings
from rockmate.planning.plan import Plan
from rockmate.planning.planner import CARRIED, Planner
from solvers import Options, Schedule

MUCH = 4
"""Values that are so many times larger are a reason to measure: scaled bounds grow as fast as the fastest value."""

MOST_POINTS = 6
"""Traced sizes that a fit looks at, all of one kind of call."""

MOST_IN_ALL = 64
"""Traced sizes that are remembered."""

MOST_TRIED = 2
"""Graphs that are tried for a call."""

MOST_SCHEDULES = 8
"""Schedules that are tried for another size."""


@dataclass(eq=False)
class Family:
    """One graph, by its ``skeleton``.

    ``measured``: the planner of the size at which costs were measured. ``points``: sizes that were traced.
    ``schedules``: those with recomputation that a solver found, the last one first. ``options``: of the graph's blocks,
    as they were last solved for, by what the caller does with the outputs. ``spent``: nanoseconds that steps of a size
    took for runs again, by the number of its plan.
    """

    skeleton: Hashable
    measured: Planner
    points: list[Point]
    schedules: list[Schedule] = field(default_factory=list)
    options: dict[Usage, Options] = field(default_factory=dict)
    spent: Counter[int] = field(default_factory=Counter)

    def known_of(self, s: S_graph) -> Known:
        """The costs of ``s``, which is of this family: those that were measured, scaled, unless it is much larger."""
        graphs = self.measured.graphs
        if self.is_much_larger(s):
            return Known()

        def like(usage: Usage) -> list[Cost] | None:
            costs = graphs.known.of.get(usage)
            return None if costs is None else scaled_costs(graphs.S, s, costs)

        known = Known(like, choosing_anew(graphs.S, s))
        for usage, layouts in graphs.known.layouts.items() if known.anew else ():
            fed = differentiated(s, usage.root_values(s.d))
            here = layouts_at_other_sizes(graphs.S, s, fed, layouts)
            if here is not None:
                known.layouts[usage] = here
        return known

    def is_much_larger(self, s: S_graph) -> bool:
        """Whether the costs of ``s`` are to be measured."""
        return growth(self.measured.graphs.S, s) > MUCH

    def is_worth_solving(self, number: int) -> bool:
        """Whether the steps of a size have run nodes again for as long as it took to plan for the measured size.

        Then a better plan pays: together they take at most twice what is the least, however often the size comes (the
        rule of renting skis: Karlin et al., Competitive snoopy caching, 1988).
        """
        return self.spent[number] >= 1e9 * sum(self.measured.seconds.values())

    def learn(self, planner: Planner, plan: Plan) -> None:
        """``planner`` has made a plan."""
        if not planner.scaled:
            self.measured = planner
        if planner.solved_options is not None:
            self.options[planner.graphs.K.usage] = planner.solved_options
        if plan.recomputed and plan.solver != CARRIED:
            self.schedules = [plan.schedule, *self.schedules][:MOST_SCHEDULES]

    def add(self, point: Point) -> None:
        """Another size was traced."""
        others = [p for p in self.points if p.kind != point.kind]
        self.points = [*others, *[*self.points_of(point.kind), point][-MOST_POINTS:]][-MOST_IN_ALL:]

    def points_of(self, kind: Hashable) -> list[Point]:
        """Traced sizes of such calls."""
        return [p for p in self.points if p.kind == kind]


class Families:
    """All graphs of one model."""

    def __init__(self) -> None:
        self._of: dict[Hashable, Family] = {}

    def running(self, kind: Hashable) -> list[Family]:
        """The graphs that calls of this kind ran, the last few."""
        return [f for f in reversed(self._of.values()) if f.points_of(kind)][:MOST_TRIED]

    def of(self, s: S_graph) -> Family | None:
        """The family of a graph, under the settings of now."""
        return self._of.get((skeleton(s), settings()))

    def new(self, planner: Planner) -> Family:
        """A graph that was measured for ``planner``."""
        family = Family(skeleton(planner.graphs.S), planner, [])
        self._of[family.skeleton, settings()] = family
        return family

    def clear(self) -> None:
        """Forget all."""
        self._of.clear()
