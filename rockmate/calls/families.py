"""Calls that run one graph at different sizes: what was learned at one size serves the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rkgb.cost.layouts import differentiated, layouts_at_other_sizes
from rkgb.cost.measure import Cost, Known
from rkgb.cost.scaled import choosing_anew, growth, scaled_costs
from rkgb.cost.usage import Usage
from rkgb.graphs import D_graph, S_graph
from rkgb.pipeline import Graphs
from rkgb.probe.resize import resized
from rkgb.probe.skeleton import skeleton
from rkgb.settings import settings
from rockmate.calls.shown import Shown
from rockmate.planning.finder import CARRIED
from rockmate.planning.plan import Plan
from rockmate.planning.planner import Planner
from solvers import Options, Schedule

MUCH = 4
"""Values that are so many times larger are a reason to measure: scaled bounds grow as fast as the fastest value."""

MOST_SCHEDULES = 8
"""Schedules that are tried for another size."""


@dataclass(eq=False)
class Family:
    """One graph, by its ``skeleton``.

    ``measured``: the planner of the size at which costs were measured. ``traced``: the graphs of the
    sizes at which it was traced, of which ``shown`` is what shows without data.
    ``schedules``: those with recomputation that a solver found, the last one first. ``options``: of the graph's blocks,
    as they were last solved for, by what the caller does with the outputs. ``spent``: nanoseconds that steps of a size
    took for runs again, by the number of its plan.
    """

    skeleton: Hashable
    measured: Planner
    traced: Graphs
    shown: Shown
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

    def options_for(self, usage: Usage) -> Options | None:
        """What blocks of the graph may run where the caller uses the outputs so, as last solved for, or else for the
        measured size.
        """
        if usage not in self.options and usage == self.measured.graphs.K.usage:
            self.options[usage] = self.measured.solve_options()
        return self.options.get(usage)

    def learn(self, planner: Planner, plan: Plan) -> None:
        if not planner.scaled:
            self.measured = planner
        if planner.solved_options is not None:
            self.options[planner.graphs.K.usage] = planner.solved_options
        if plan.recomputed and plan.solver != CARRIED:
            self.schedules = [plan.schedule, *self.schedules][:MOST_SCHEDULES]

    @cached_property
    def is_shown(self) -> bool:
        """Whether the graph shows without data at the sizes at which it ran. Then it does so at others."""
        return self.shown.graph_is(self.traced.S)

    @cached_property
    def is_traced_without_data(self) -> bool:
        """Whether the program does, and a run shows the rest."""
        return self.shown.program_is(self.traced)


class Families(dict[tuple[Hashable, Hashable], Family]):
    """All graphs of one model, by their skeletons and the settings under which they came."""

    def known(self) -> list[Family]:
        """The graphs that came under the settings of now, the last one first."""
        now = settings()
        return [family for key, family in reversed(self.items()) if key[1] == now]

    def of(self, s: S_graph) -> Family | None:
        """The family of a graph, under the settings of now."""
        return self.get((skeleton(s), settings()))

    def new(self, planner: Planner, shown: Shown) -> Family:
        """A graph that was measured for ``planner``; ``shown``: see ``Family``."""
        family = Family(skeleton(planner.graphs.S), planner, planner.graphs, shown)
        self[family.skeleton, settings()] = family
        return family


def resized_in(known: Sequence[Family], d: D_graph | None) -> tuple[Family, S_graph] | None:
    """The first of ``known`` that ``d`` is of, and its graph with the sizes of ``d``."""
    if d is None:
        return None
    found = ((family, resized(family.measured.graphs.S, family.skeleton, d)) for family in known)
    return next(((family, s) for family, s in found if s is not None), None)
