"""A schedule over an S graph, made ready to run: what to do after each node, and before each backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from rkgb.blocks.simplify import STATISTICS
from rkgb.graphs import Mode, S_graph, S_node
from rkgb.Ktools import K_graph
from rkgb.randomness import Drawn, drawn_by
from rkgb.trace.guards import Guard, GuardFailed
from rockmate.run.functions import Function, Op, functions_of, needs_no_recording, op_of
from rockmate.run.slots import Place
from rockmate.run.undo import Undo, undo_of
from solvers.schedule import Bwd, Del, Loss, Run, Schedule


@dataclass(frozen=True, slots=True)
class NodeCode:
    """One S node for the executor.

    ``inputs``: (value, data) of what it reads, -1 for what lies in memory of a source; but ``statistics``, source
    values that it changes, which a second run must leave alone. ``made``: (value, data) of results in memory of the
    node's own, of data that are tracked (see ``Program``); ``keeps``: those, and results in memory of another node, of
    data that stay when the forward phase ends; ``known``: values in whose memory what autograd saves may lie, and their
    data, -1 for a source's; ``elsewhere``: the place of what lies in no such memory; ``aliases``: results in memory of
    a source; ``inner``: results that no other node reads; ``gone``: other values that nothing reads any more when it is
    done, in the forward phase.
    ``again``, ``remakes``, ``remade``: what a second run runs, and the
    data and values that it makes, tracked or not (outside the schedule any node may run), with the views that other
    nodes take of its results; but outputs that the caller holds stay the first run's. ``private``: the data of what
    only its backward reads, or None; ``hides``: whether autograd would keep such, tracked or not; ``recorded``: whether
    it records second runs. ``native``: all that
    its backward reads stays from the forward on, so autograd
    keeps it itself. ``dead``: it has no backward, though autograd would keep something for one, as its results are
    detached (a node of outputs that merely get no gradient is not dead: a backward may come after all).
    ``random``: it runs again, from the same random state; what it draws from, empty if it does not.
    """

    ops: tuple[Op, ...]
    reads: tuple[int, ...]
    inputs: tuple[tuple[int, int], ...]
    made: tuple[tuple[int, int], ...]
    keeps: tuple[tuple[int, int], ...]
    known: tuple[tuple[int, int], ...]
    again: tuple[Op, ...]
    remakes: tuple[int, ...]
    remade: tuple[tuple[int, int], ...]
    aliases: tuple[int, ...]
    inner: frozenset[int]
    gone: tuple[int, ...]
    data: tuple[int, ...]
    private: int | None
    elsewhere: Place
    hides: bool
    recorded: bool
    native: bool
    dead: bool
    statistics: tuple[int, ...]
    random: tuple[Drawn, ...]
    rerun: bool


@dataclass(frozen=True, slots=True)
class Give:
    """From here on only backwards read ``data``: what autograd saved of it keeps it, and lets it go."""

    data: int


@dataclass(frozen=True)
class Program:
    """The executable form of one plan.

    ``stages``: nodes before whose backward there are steps to take, in the order of their backwards; ``before[k]``:
    these steps, with the deletions since the stage before, also those that autograd makes by itself (see ``Give``).
    ``kept``: data live when the forward phase ends; ``given``: those that autograd keeps from then on. Only data that
    something but autograd itself will read again are tracked by the executor. ``last_reader``: the node of the last
    backward to read each datum, -1 if none does. ``final``: (stage, node) of each node's last run.
    ``segments``: (native, dead, start, stop) of runs of nodes. ``held``: sources that are attributes of modules, but
    neither parameters nor buffers. ``roots``: positions of the outputs that a backward is planned to start from.
    ``exceeding``: nodes of roots whose leaving out may exceed the budget, the empty set for any; see
    ``rockmate.run.parts.peaks_of_parts``.
    """

    s: S_graph
    nodes: tuple[NodeCode, ...]
    stages: tuple[int, ...]
    before: tuple[tuple[Run | Del | Give, ...], ...]
    given: tuple[int, ...]
    last_reader: tuple[int, ...]
    final: frozenset[tuple[int, int]]
    kept: frozenset[int]
    data_of: dict[int, int]
    owner: tuple[int, ...]
    mode: Mode
    segments: tuple[tuple[bool, bool, int, int], ...]
    undo: Undo
    held: tuple[int, ...]
    roots: tuple[int, ...]
    exceeding: frozenset[frozenset[int]] = frozenset()

    @cached_property
    def stored(self) -> frozenset[int]:
        """Data whose memory the executor itself holds after the forward phase."""
        return self.kept.intersection(datum for n in self.nodes for _, datum in n.keeps)

    @cached_property
    def first(self) -> tuple[tuple[int, Function, NodeCode, bool], ...]:
        """For the forward phase, of each node: its number, a function, its code, and whether more is to be done."""
        outputs = [{v for op in n.ops for v in op.outputs} - n.inner for n in self.nodes]
        functions = functions_of([(n.ops, wanted, True) for n, wanted in zip(self.nodes, outputs, strict=True)])
        return tuple(
            (i, function, n, bool(n.keeps or n.aliases or i in self.stage_of))
            for i, (function, n) in enumerate(zip(functions, self.nodes, strict=True))
        )

    @cached_property
    def again(self) -> tuple[Function, ...]:
        """The nodes as functions, for second runs."""
        return functions_of([(n.again, {v for v, _ in (*n.made, *n.remade)}, n.recorded) for n in self.nodes])

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
        """What autograd saved of each node in a call before, by position. Calls note it, and verify what they find."""
        return tuple({} for _ in self.nodes)

    @cached_property
    def ends(self) -> dict[int, int]:
        """The nodes that make roots, and where in the outputs each has one."""
        place = {v: k for k, v in enumerate(self.s.d.outputs) if k in self.roots}
        return {i: place[v] for i, node in enumerate(self.s.nodes) for v in node.makes if v in place}

    def check_held(self, sources: dict[int, torch.Tensor]) -> None:
        """An attribute may hold another tensor than at planning, but not one of another form, else ``GuardFailed``."""
        d = self.s.d
        for v in self.held:
            t, planned = sources[v], d.values[v]
            form = (tuple(t.shape), tuple(t.stride()), t.dtype, t.device, t.requires_grad)
            expected = (planned.shape, planned.stride, planned.dtype, planned.device, planned.requires_grad)
            if form != expected:
                raise GuardFailed(Guard(t.size, f"form of {d.names[v]}", expected, "planning"), form)

    def read_by(self, i: int) -> list[int]:
        """The data that node i reads."""
        return [self.data_of[v] for v in self.nodes[i].reads if v in self.data_of]


def compile_schedule(k: K_graph, schedule: Schedule) -> Program:
    """Split ``schedule`` into what happens after each node and before each backward."""
    s = k.s
    at_loss = schedule.index(Loss())
    after, live = _forward_phase(k, schedule[:at_loss])
    dropped: set[int] = set(range(len(k.data))) - live  # or made anew, since the forward
    run_on = {d for step in schedule[at_loss + 1 :] if isinstance(step, Run) for d in _touched(k, step)} - set(k.held)
    native: set[int] = {i for i, n in enumerate(k.nodes) if n.backward is None}
    again: set[int] = set()
    for step in schedule[at_loss + 1 :]:
        if isinstance(step, Bwd):
            backward = k.nodes[step.node].backward
            if backward and dropped.isdisjoint(backward.reads) and run_on.isdisjoint(backward.reads):
                native.add(step.node)
        elif isinstance(step, Del):
            dropped.add(step.data)
        elif isinstance(step, Run):
            again.add(step.node)
            dropped.update(k.nodes[step.node].makes)
    tracked = _tracked(k, again, native)
    stages, before, touched = _stages(k, schedule[at_loss + 1 :], tracked)
    last_run = {step.node: stage for stage, steps in enumerate(before) for step in steps if isinstance(step, Run)}
    of_storage = {data.storage: d for d, data in enumerate(k.data) if data.storage is not None}
    data_of = {v: of_storage[x] for n in s.nodes for v in n.makes if (x := s.d.values[v].storage) in of_storage}
    values_of: list[list[int]] = [[] for _ in k.data]
    for v, d in data_of.items():
        values_of[d].append(v)
    views = _views_elsewhere(s)
    usual = _usual_mode(s)
    nodes = tuple(
        _node_code(
            k,
            i,
            usual,
            data_of,
            i in again,
            i in native,
            tracked,
            live,
            views.get(i, []),
            gone=[v for d in after[i] for v in values_of[d]],
        )
        for i in range(len(s.nodes))
    )
    return Program(
        s,
        nodes,
        tuple(stages),
        tuple(before),
        tuple(sorted((live & tracked) - touched)),
        _last_readers(k),
        frozenset((stage, node) for node, stage in last_run.items()),
        frozenset(live),
        data_of,
        tuple(data.owner for data in k.data),
        usual,
        tuple(_segments(k, nodes)),
        undo_of(s),
        tuple(v for v, x in s.d.sources.items() if x.kind == "buffer" and x.key in s.d.structure.written),
        k.usage.roots,
    )


def _forward_phase(k: K_graph, steps: Schedule) -> tuple[list[list[int]], set[int]]:
    """Data dropped after each node, and data live at the end."""
    after: list[list[int]] = [[] for _ in k.nodes]
    live: set[int] = set()
    node = 0
    for step in steps:
        if isinstance(step, Run):
            node = step.node
            live.update(k.nodes[node].makes)
        elif isinstance(step, Del):
            after[node].append(step.data)
            live.discard(step.data)
    return after, live


def _tracked(k: K_graph, again: set[int], native: set[int]) -> set[int]:
    """Data that something but autograd's own graph reads after the forward phase."""
    tracked: set[int] = set()
    for i, n in enumerate(k.nodes):
        if i in again:
            tracked.update(n.reads, n.makes)
        if n.backward and i not in native:
            tracked.update(n.backward.reads)
    return tracked


def _stages(
    k: K_graph, steps: Schedule, tracked: set[int]
) -> tuple[list[int], list[tuple[Run | Del | Give, ...]], set[int]]:
    """Nodes before whose backward there are steps to take; these; data that autograd cannot keep from the forward on.

    A deletion alone is no reason to stop autograd where it makes it by itself: after the last run that reads or makes
    the data, and where none does. Outputs may not be saved by anyone.
    """
    last = {d: at for at, step in enumerate(steps) if isinstance(step, Run) for d in _touched(k, step) if d in tracked}
    last.update(dict.fromkeys(k.held, len(steps)))
    stages: list[int] = []
    before: list[tuple[Run | Del | Give, ...]] = []
    pending: list[Run | Del | Give] = []
    wanted = False
    for at, step in enumerate(steps):
        if isinstance(step, Run):
            wanted = True
            pending.append(step)
            pending += [Give(d) for d in _touched(k, step) if last.get(d) == at]
        elif isinstance(step, Del) and step.data in tracked:
            wanted = wanted or last.get(step.data, -1) > at
            pending.append(step)
        elif isinstance(step, Bwd) and wanted:
            stages.append(step.node)
            before.append(tuple(pending))
            pending, wanted = [], False
    return stages, before, set(last)


def _last_readers(k: K_graph) -> tuple[int, ...]:
    """For each datum the node of the last backward to read it, which is the first such node; -1 if there is none."""
    found = [-1] * len(k.data)
    for i in reversed(range(len(k.nodes))):
        backward = k.nodes[i].backward
        for d in backward.reads if backward else ():
            found[d] = i
    return tuple(found)


def _touched(k: K_graph, step: Run) -> dict[int, None]:
    """The data that a run reads or makes."""
    return dict.fromkeys((*k.nodes[step.node].reads, *k.nodes[step.node].makes))


def _segments(k: K_graph, nodes: tuple[NodeCode, ...]) -> list[tuple[bool, bool, int, int]]:
    """Nodes of which autograd saves no more than sources lie in the segment that is there."""
    found: list[tuple[bool, bool, int, int]] = []
    for i, code in enumerate(nodes):
        kind, backward = (code.native, code.dead), k.nodes[i].backward
        any_will_do = not k.s.nodes[i].requires_grad
        if found and not found[-1][1] and backward is not None and not backward.reads and not code.hides:
            any_will_do = True
        if found and (found[-1][:2] == kind or any_will_do):
            native, dead, start, _ = found.pop()
            found.append((native, dead, start, i + 1))
        else:
            found.append((*kind, i, i + 1))
    return found


def _node_code(
    k: K_graph,
    i: int,
    usual: Mode,
    data_of: dict[int, int],
    again: bool,
    native: bool,
    tracked: set[int],
    live: set[int],
    views: list[S_node],
    *,
    gone: list[int],
) -> NodeCode:
    s, node = k.s, k.s.nodes[i]
    ops = tuple(s.d.nodes[op] for op in node.ops)
    again_ops = (*ops, *(s.d.nodes[op] for n in views for op in n.ops))
    written = {x for op in node.ops if s.d.nodes[op].name in STATISTICS for x in s.d.facts[op].writes}
    makes = k.nodes[i].makes
    kept = tuple((v, data_of[v]) for v in node.makes if v in data_of and data_of[v] in tracked)
    private = next((d for d in makes if k.data[d].storage is None and d in tracked), None)
    statistics = tuple(v for v in node.reads if s.d.values[v].storage in written)
    remade = tuple((v, data_of[v]) for n in (node, *views) for v in n.makes if data_of.get(v) in makes)
    return NodeCode(
        ops=tuple(op_of(op, usual) for op in ops),
        reads=node.reads,
        inputs=tuple((v, data_of.get(v, -1)) for v in node.reads if v not in statistics),
        made=tuple((v, datum) for v, datum in kept if datum in makes),
        keeps=tuple((v, datum) for v, datum in kept if datum in live),
        known=(*((v, d) for v in node.reads if (d := data_of.get(v, -1)) < 0 or d in tracked), *kept),
        again=tuple(op_of(op, usual) for op in again_ops),
        remakes=tuple(d for d in makes if d not in k.held),
        remade=tuple((v, datum) for v, datum in remade if datum not in k.held),
        aliases=tuple(v for v in node.makes if v not in data_of),
        inner=frozenset(v for op in ops for v in op.outputs if v not in node.makes),
        gone=tuple(gone),
        data=tuple(d for d in makes if d in tracked),
        private=private,
        elsewhere=Place() if private is None else Place(data=private),
        hides=bool(node.saved.private),
        recorded=private is not None or not all(map(needs_no_recording, again_ops)),
        native=native,
        dead=node.requires_grad and k.nodes[i].backward is None and i not in k.idle,
        statistics=statistics,
        random=drawn_by(s, i) if again else (),
        rerun=k.nodes[i].rerun,
    )


def _views_elsewhere(s: S_graph) -> dict[int, list[S_node]]:
    """For a node that others only look at the results of, these others."""
    maker = {x: i for i, n in enumerate(s.nodes) for x in n.storages}
    found: dict[int, list[S_node]] = {}
    for i, n in enumerate(s.nodes):
        if n.makes and not n.storages:
            makers = {maker.get(s.d.values[v].storage, i) for v in (*n.makes, *n.reads)}
            if len(makers) == 1 and i not in makers:
                found.setdefault(makers.pop(), []).append(n)
    return found


def _usual_mode(s: S_graph) -> Mode:
    """The mode in which most operations run; the executor sets it once."""
    modes: dict[Any, int] = {}
    for node in s.d.nodes:
        modes[node.mode] = modes.get(node.mode, 0) + 1
    return max(modes, key=lambda m: modes[m], default=Mode())
