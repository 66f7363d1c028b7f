"""The executable form of a plan: what the executor does with each node, and before each backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rkgb.graphs import Mode, S_graph
from rkgb.randomness import RandomSource
from rockmate.run.functions import Function, Op, Whole, functions_of, whole_of
from rockmate.run.slots import Place
from solvers.schedule import Del, Run

ValueOfDatum = tuple[int, int]
"""(value of the D graph, datum of the K graph that holds its memory); the datum is -1 for memory of a source."""


@dataclass(frozen=True, slots=True)
class FirstRun:
    """What the forward phase does with a node.

    ``ops``: its operations. ``inner``: results that only the node itself reads. ``dead_values``: values that nothing in
    the forward phase reads after the node. ``keeps``: results whose data stay when the forward phase ends. ``aliases``:
    results in memory of a source. ``known``: values whose memory autograd may save. ``private``: the place of what
    autograd saves in any other memory. ``native``: autograd keeps all that it saves, since nothing of it is dropped.
    """

    ops: tuple[Op, ...]
    inner: frozenset[int]
    dead_values: tuple[int, ...]
    keeps: tuple[ValueOfDatum, ...]
    aliases: tuple[int, ...]
    known: tuple[ValueOfDatum, ...]
    private: Place
    native: bool


@dataclass(frozen=True, slots=True)
class SecondRun:
    """How a node is recomputed.

    ``ops``: its operations, and views that other nodes take of its results. ``possible``: whether its operations may
    run twice. ``inputs``: what it reads, without ``statistics``: sources that it changes, of which it gets a copy.
    ``data``, ``values``: what it makes anew. They include data that the schedule does not track, since a backward
    outside of the schedule may need any node; they exclude outputs, which stay those of the first run. ``recorded``:
    whether autograd must record the operations for them to compute the same.
    """

    ops: tuple[Op, ...]
    possible: bool
    inputs: tuple[ValueOfDatum, ...]
    statistics: tuple[int, ...]
    data: tuple[int, ...]
    values: tuple[ValueOfDatum, ...]
    recorded: bool


@dataclass(frozen=True, slots=True)
class NodeCode:
    """One S node for the executor.

    ``data``: what the node makes of the data that the executor tracks (see ``Program``), ``made``:
    the values among it. ``private``: the datum of what only its own backward reads, or None. ``random``: the generators
    whose states a second run needs; empty where the schedule has none.
    """

    data: tuple[int, ...]
    made: tuple[ValueOfDatum, ...]
    private: int | None
    random: tuple[RandomSource, ...]
    first: FirstRun
    again: SecondRun


@dataclass(frozen=True, slots=True)
class HandOver:
    """From here on only backwards read ``data``: the slots that autograd saved for it hold it, and let it go."""

    data: int


Step = Run | Del | HandOver
"""What the executor does before a backward."""


@dataclass(frozen=True)
class Program:
    """The executable form of one plan.

    Forward: ``segments`` are (native, no_backward, start, stop) of consecutive nodes. ``kept``: data live when the
    forward phase ends; ``handed_over``: those that only backwards read from then on.

    Backward: ``stages`` are the nodes before whose backward there are steps to take, in the order of their backwards;
    ``before[k]`` are the steps of stage k. ``last_reader``: the node of the last backward to read each datum, -1 if
    none does. ``final``: (stage, node) of each node's last run.

    The executor tracks only data that something other than autograd reads again. ``roots``: positions of the outputs
    that a backward is planned to start from. ``exceeding``: nodes of roots whose omission from the loss may exceed the
    budget, the empty set for any; see ``rockmate.run.parts.peaks_of_parts``.
    """

    s: S_graph
    nodes: tuple[NodeCode, ...]
    stages: tuple[int, ...]
    before: tuple[tuple[Step, ...], ...]
    handed_over: tuple[int, ...]
    last_reader: tuple[int, ...]
    final: frozenset[tuple[int, int]]
    kept: frozenset[int]
    data_of: dict[int, int]
    owner: tuple[int, ...]
    mode: Mode
    segments: tuple[tuple[bool, bool, int, int], ...]
    roots: tuple[int, ...]
    exceeding: frozenset[frozenset[int]] = frozenset()

    @cached_property
    def stored(self) -> frozenset[int]:
        """Data whose memory the executor itself holds after the forward phase."""
        return self.kept.intersection(datum for n in self.nodes for _, datum in n.first.keeps)

    @cached_property
    def forward(self) -> tuple[tuple[int, Function, NodeCode, bool], ...]:
        """For each node: its number, its operations as a function, its code, and whether results are to be kept."""
        outputs = [{v for op in n.first.ops for v in op.outputs} - n.first.inner for n in self.nodes]
        functions = functions_of([(n.first.ops, wanted, True) for n, wanted in zip(self.nodes, outputs, strict=True)])
        return tuple(
            (i, function, n, bool(n.first.keeps or n.first.aliases or i in self.stage_of))
            for i, (function, n) in enumerate(zip(functions, self.nodes, strict=True))
        )

    @cached_property
    def whole(self) -> Whole | None:
        """The forward phase as one function, where autograd alone holds what backwards read, and nothing is done before
        one of them; else None.
        """
        native = all(native for native, *_ in self.segments) and not any(n.first.keeps for n in self.nodes)
        if not native or self.stages:
            return None
        segments = ((unsaved, self.nodes[start:stop]) for _, unsaved, start, stop in self.segments)
        return whole_of(
            (
                (unsaved, [(n.first.ops, n.first.inner.union(n.first.dead_values)) for n in nodes])
                for unsaved, nodes in segments
            ),
            self.s.d.outputs,
        )

    @cached_property
    def reruns(self) -> tuple[Function, ...]:
        """The nodes as functions, for second runs."""
        return functions_of(
            [(n.again.ops, {v for v, _ in (*n.made, *n.again.values)}, n.again.recorded) for n in self.nodes]
        )

    @cached_property
    def read_again(self) -> frozenset[int]:
        """The sources that second runs of the schedule read."""
        again = {step.node for steps in self.before for step in steps if isinstance(step, Run)}
        return frozenset(v for i in again for v, datum in self.nodes[i].again.inputs if datum < 0)

    @cached_property
    def stage_of(self) -> dict[int, int]:
        """The number of each stage, by its node."""
        return {node: k for k, node in enumerate(self.stages)}

    @cached_property
    def differentiable(self) -> frozenset[int]:
        """The values that require grad."""
        return frozenset(v for v, x in self.s.d.values.items() if x.requires_grad)

    @cached_property
    def places(self) -> tuple[dict[int, Place], ...]:
        """What autograd saved of each node in a call before, by position. Each call verifies it, and searches for what
        is not as it was.
        """
        return tuple({} for _ in self.nodes)

    @cached_property
    def ends(self) -> dict[int, int]:
        """The nodes that make roots, and where in the outputs each has one."""
        place = {v: k for k, v in enumerate(self.s.d.outputs) if k in self.roots}
        return {i: place[v] for i, node in enumerate(self.s.nodes) for v in node.makes if v in place}

    def read_by(self, i: int) -> list[int]:
        """The data that node i reads."""
        return [self.data_of[v] for v in self.s.nodes[i].reads if v in self.data_of]
