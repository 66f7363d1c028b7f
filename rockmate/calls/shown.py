"""What a captured program is at sizes that did not come before: see ``rkgb.probe.resize``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import torch

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
from rockmate.calls.captured import Captured

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

    def program_is(self, graphs: Graphs) -> bool:
        """Whether the program is the one that ran on these sizes."""
        return self.program is not None and is_same_program(self.program, graphs.B, self.device)

    def graph_is(self, s: S_graph) -> bool:
        """Whether the graph is ``s``, which ran on these sizes, or did not have to."""
        if self.graphs is not None:
            return True
        return self.program is not None and self.graph_of_is(self.program, s)

    def graph_of_is(self, program: B_graph, s: S_graph) -> bool:
        """Whether the graph of ``program`` is ``s``, which has the sizes of the call."""
        d = self.graph_of(program)
        found = None if d is None else resized(s, skeleton(s), d)
        return found is not None and is_same(found, s)
