"""Calls that run one graph at different sizes: what shows of them without data (``rkgb.probe.resize``), and what was
learned at one size, which serves the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import torch

from rkgb.cost.layouts import differentiated, layouts_at_other_sizes
from rkgb.cost.measure import Cost, Known
from rkgb.cost.scaled import choosing_anew, growth, scaled_costs
from rkgb.cost.usage import Usage
from rkgb.graphs import B_graph, D_graph, S_graph
from rkgb.pipeline import Graphs
from rkgb.probe.alike import graphs_without_data
from rkgb.probe.resize import (
    graph_of_a_run,
    graph_without_data,
    is_same,
    is_same_program,
    program_of_any_size,
    program_without_data,
    resized,
)
from rkgb.probe.skeleton import skeleton
from rkgb.sample import Call
from rkgb.settings import settings
from rockmate.calls.captured import Captured
from rockmate.planning.finder import CARRIED
from rockmate.planning.plan import Plan
from rockmate.planning.planner import Planner
from rockmate.planning.ways import Asked
from solvers import Options, Schedule

T = TypeVar("T")


class Shown:
    """A call of ``module``, as far as it shows without data. ``inputs``: of the program, without data; None if they are
    no plain memory. ``quick``: a run of it takes less time than the proof that it does what shows.
    """

    def __init__(self, module: Captured, inputs: Sequence[Any] | None, device: torch.device, *, quick: bool) -> None:
        self.module, self.inputs, self.device, self.quick = module, inputs, device, quick

    def _seen(self, what: Callable[[Captured, Call, torch.device], T]) -> T | None:
        """``what`` of the call, without data; None where that cannot be."""
        if self.inputs is None:
            return None
        with self.module.holding(self.inputs):
            return what(self.module, Call(tuple(self.inputs[k] for k in self.module.given), {}), self.device)

    @cached_property
    def graphs(self) -> tuple[B_graph, D_graph] | None:
        """B and D of the call, as they are on the device; None where the call is to run for that."""
        return None if self.quick else self._seen(graphs_without_data)

    @cached_property
    def program(self) -> B_graph | None:
        """The trace of the program; None where that takes data."""
        return self._seen(program_without_data)

    @cached_property
    def graph(self) -> D_graph | None:
        """The graph of the program; None where that takes data."""
        return None if self.program is None else self.graph_of(self.program)

    @cached_property
    def at_all_sizes(self) -> B_graph | None:
        """The program at all sizes; None where Python does otherwise with sizes than pass them on to operations."""
        return self._seen(program_of_any_size)

    def program_of_any_size(self, s: S_graph) -> B_graph | None:
        """The same, if that gives ``s``, which the call runs."""
        program = self.at_all_sizes
        return program if program is not None and self.graph_of_is(program, s) else None

    def graph_of(self, program: B_graph) -> D_graph | None:
        """The graph of ``program``, which is that of the call, or of any size; None where that takes data."""
        return self._seen(partial(graph_without_data, program))

    def graph_of_a_run(self, call: Call) -> D_graph | None:
        """The same from a run on ``call``, which is not without data."""
        return None if self.program is None else graph_of_a_run(self.program, self.module, call, self.device)

    def graph_of_is(self, program: B_graph, s: S_graph) -> bool:
        """Whether the graph of ``program`` is ``s``, which has the sizes of the call."""
        d = self.graph_of(program)
        found = None if d is None else resized(s, skeleton(s), d)
        return found is not None and is_same(found, s)


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
    took for runs again, by the number of its plan. ``ways``: schedules that were found for calls beside others, by what
    was asked for.
    """

    skeleton: Hashable
    measured: Planner
    traced: Graphs
    shown: Shown
    schedules: list[Schedule] = field(default_factory=list)
    options: dict[Usage, Options] = field(default_factory=dict)
    spent: Counter[int] = field(default_factory=Counter)
    ways: dict[Asked, list[Schedule]] = field(default_factory=dict)

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

    def learn_ways(self, asked: Asked, found: list[Schedule]) -> None:
        """Those of the last ``MOST_SCHEDULES`` searches are kept."""
        self.ways[asked] = found
        if len(self.ways) > MOST_SCHEDULES:
            del self.ways[next(iter(self.ways))]

    @cached_property
    def is_shown(self) -> bool:
        """Whether the graph shows without data at the sizes at which it ran, or did not have to. Then it does so at
        others.
        """
        if self.shown.graphs is not None:
            return True
        return self.shown.program is not None and self.shown.graph_of_is(self.shown.program, self.traced.S)

    @cached_property
    def is_traced_without_data(self) -> bool:
        """Whether the program does, and a run shows the rest."""
        program = self.shown.program
        return program is not None and is_same_program(program, self.traced.B, self.shown.device)


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
