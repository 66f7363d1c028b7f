"""From a schedule to a program: what is to be done after each node, and before each backward."""

from __future__ import annotations

from collections import Counter

from rkgb.blocks.simplify import statistics_of
from rkgb.graphs import Mode, S_graph, S_node
from rkgb.Ktools import K_graph
from rkgb.randomness import drawn_by
from rockmate.run.functions import needs_no_recording, op_of
from rockmate.run.program import FirstRun, HandOver, NodeCode, Program, SecondRun, Step, ValueOfDatum
from rockmate.run.slots import Place
from solvers.schedule import Bwd, Del, Loss, Run, Schedule


def compile_schedule(k: K_graph, schedule: Schedule) -> Program:
    """Split ``schedule`` into what happens after each node and before each backward."""
    s, at_loss = k.s, schedule.index(Loss())
    forward, backward = schedule[:at_loss], schedule[at_loss + 1 :]
    dropped_after, live = _forward_phase(k, forward)
    lowering = _Lowering(k, backward, live)
    stages, before, touched = _stages(k, backward, lowering.tracked)
    last_run = {step.node: stage for stage, steps in enumerate(before) for step in steps if isinstance(step, Run)}
    nodes = tuple(lowering.node(i, dropped_after[i]) for i in range(len(s.nodes)))
    return Program(
        s=s,
        nodes=nodes,
        stages=tuple(stages),
        before=tuple(before),
        handed_over=tuple(sorted((live & lowering.tracked) - touched)),
        last_reader=_last_readers(k),
        final=frozenset((stage, node) for node, stage in last_run.items()),
        kept=frozenset(live),
        data_of=lowering.data_of,
        owner=tuple(data.owner for data in k.data),
        mode=lowering.mode,
        segments=tuple(_segments(k, nodes)),
        roots=k.usage.roots,
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


def _native(k: K_graph, backward: Schedule, live: set[int]) -> set[int]:
    """Nodes without a backward, and those whose backward reads nothing that is dropped, made anew or read by a run."""
    absent = set(range(len(k.data))) - live  # dropped, or made anew since the forward
    in_runs = {d for step in backward if isinstance(step, Run) for d in _touched(k, step)} - set(k.held)
    native = {i for i, n in enumerate(k.nodes) if n.backward is None}
    for step in backward:
        if isinstance(step, Bwd):
            own = k.nodes[step.node].backward
            if own and absent.isdisjoint(own.reads) and in_runs.isdisjoint(own.reads):
                native.add(step.node)
        elif isinstance(step, Del):
            absent.add(step.data)
        elif isinstance(step, Run):
            absent.update(k.nodes[step.node].makes)
    return native


def _stages(k: K_graph, steps: Schedule, tracked: set[int]) -> tuple[list[int], list[tuple[Step, ...]], set[int]]:
    """Nodes before whose backward there are steps to take; these steps; data that a run or the caller still reads.

    Where only deletions are due, autograd makes them by itself: after the last run that reads or makes the data, and
    where no run does. Outputs cannot be left to autograd, since it may not have saved them.
    """
    last = {d: at for at, step in enumerate(steps) if isinstance(step, Run) for d in _touched(k, step) if d in tracked}
    last.update(dict.fromkeys(k.held, len(steps)))
    stages: list[int] = []
    before: list[tuple[Step, ...]] = []
    pending: list[Step] = []
    wanted = False
    for at, step in enumerate(steps):
        if isinstance(step, Run):
            wanted = True
            pending.append(step)
            pending += [HandOver(d) for d in _touched(k, step) if last.get(d) == at]
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
    """Consecutive nodes of one kind. A node of which autograd saves nothing but sources joins any kind of segment.

    Results of a dead end are detached, so that nothing needs to be saved. (A node whose outputs merely get no gradient
    is different: its backward may run after all.)
    """
    found: list[tuple[bool, bool, int, int]] = []
    for i, code in enumerate(nodes):
        kind, backward, node = (code.first.native, k.is_dead_end(i)), k.nodes[i].backward, k.s.nodes[i]
        any_will_do = not node.requires_grad
        if found and not found[-1][1] and backward is not None and not backward.reads and not node.saved.private:
            any_will_do = True
        if found and (found[-1][:2] == kind or any_will_do):
            native, no_backward, start, _ = found.pop()
            found.append((native, no_backward, start, i + 1))
        else:
            found.append((*kind, i, i + 1))
    return found


class _Lowering:
    """Makes the code of each node for a schedule with the steps ``backward`` after the loss, when the data ``live`` are
    there.

    ``again``: nodes that run again. ``native``: nodes whose backward reads only data that stay from the forward phase
    on. ``tracked``: data that something other than autograd reads after the forward phase. ``data_of``: the datum of
    each value. ``mode``: that of most operations, which the executor sets once. ``views``: for nodes whose results
    other nodes take views of, these nodes.
    """

    def __init__(self, k: K_graph, backward: Schedule, live: set[int]) -> None:
        s = k.s
        of_storage = {data.storage: d for d, data in enumerate(k.data) if data.storage is not None}
        self.k, self.live = k, live
        self.again = {step.node for step in backward if isinstance(step, Run)}
        self.native = _native(k, backward, live)
        self.tracked: set[int] = set()
        for i, n in enumerate(k.nodes):
            if i in self.again:
                self.tracked.update(n.reads, n.makes)
            if n.backward and i not in self.native:
                self.tracked.update(n.backward.reads)
        self.data_of = {
            v: of_storage[x] for n in s.nodes for v in n.makes if (x := s.d.values[v].storage) in of_storage
        }
        self.values_of: list[list[int]] = [[] for _ in k.data]
        for v, d in self.data_of.items():
            self.values_of[d].append(v)
        modes = Counter(node.mode for node in s.d.nodes)
        self.mode = max(modes, key=modes.__getitem__, default=Mode())
        self.views = _views_elsewhere(s)

    def node(self, i: int, dropped: list[int]) -> NodeCode:
        """The code of node i, after which the data ``dropped`` go in the forward phase."""
        k, tracked = self.k, self.tracked
        makes = k.nodes[i].makes
        private = next((d for d in makes if k.data[d].storage is None and d in tracked), None)
        return NodeCode(
            data=tuple(d for d in makes if d in tracked),
            made=tuple((v, d) for v, d in self._tracked_results(i) if d in makes),
            private=private,
            random=drawn_by(k.s, i) if i in self.again else (),
            first=self._first(i, private, dropped),
            again=self._again(i, private),
        )

    def _tracked_results(self, i: int) -> list[ValueOfDatum]:
        data_of, tracked = self.data_of, self.tracked
        return [(v, data_of[v]) for v in self.k.s.nodes[i].makes if v in data_of and data_of[v] in tracked]

    def _first(self, i: int, private: int | None, dropped: list[int]) -> FirstRun:
        s, data_of, node = self.k.s, self.data_of, self.k.s.nodes[i]
        ops = [s.d.nodes[op] for op in node.ops]
        results = self._tracked_results(i)
        read = [(v, data_of.get(v, -1)) for v in node.reads]
        return FirstRun(
            ops=tuple(op_of(op, self.mode) for op in ops),
            inner=frozenset(v for op in ops for v in op.outputs if v not in node.makes),
            dead_values=tuple(v for d in dropped for v in self.values_of[d]),
            keeps=tuple((v, d) for v, d in results if d in self.live),
            aliases=tuple(v for v in node.makes if v not in data_of),
            known=(*((v, d) for v, d in read if d < 0 or d in self.tracked), *results),
            private=Place() if private is None else Place(data=private),
            native=i in self.native,
        )

    def _again(self, i: int, private: int | None) -> SecondRun:
        k, s, data_of, node = self.k, self.k.s, self.data_of, self.k.s.nodes[i]
        nodes = (node, *self.views.get(i, []))
        ops = [s.d.nodes[op] for n in nodes for op in n.ops]
        made = {v for op in ops for v in op.outputs}
        reads = dict.fromkeys(v for n in nodes for v in n.reads if v not in made)
        statistics = statistics_of(s.d, node)
        data = tuple(d for d in k.nodes[i].makes if d not in k.held)
        return SecondRun(
            ops=tuple(op_of(op, self.mode) for op in ops),
            possible=k.nodes[i].rerun,
            inputs=tuple((v, data_of.get(v, -1)) for v in reads if v not in statistics),
            statistics=statistics,
            data=data,
            values=tuple((v, data_of[v]) for n in nodes for v in n.makes if data_of.get(v) in data),
            recorded=private is not None or not all(map(needs_no_recording, ops)),
        )


def _views_elsewhere(s: S_graph) -> dict[int, list[S_node]]:
    """For a node that others only look at the results of, these others."""
    maker = {x: i for i, n in enumerate(s.nodes) for x in n.storages}
    found: dict[int, list[S_node]] = {}
    for i, n in enumerate(s.nodes):
        if n.makes and not n.storages:
            made = [v for v in (*n.makes, *n.reads) if v not in s.d.sources]
            makers = {maker.get(s.d.values[v].storage, i) for v in made}
            if len(makers) == 1 and i not in makers:
                found.setdefault(makers.pop(), []).append(n)
    return found
