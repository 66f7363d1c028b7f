"""The problem of a followed step: its operations, what lives how long, and what the backward reads, as was observed.

Autograd's graph does not depend on what is held, so the memory of gradients at each moment of the backward is what was
observed, less the data that lived. Each moment at which autograd asks for saved tensors is a ``Backward``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from rockmate.follow.moments import BackwardMoment, Forward, moments_of
from rockmate.follow.observed import Seen
from rockmate.follow.record import Datum, Op, needed_for
from solvers import Backward, Block, Data, Node, Problem, keep_everything, walk


@dataclass
class FollowedProblem:
    """``problem``, and what it means. ``datum_of``: the datum of the tape, by data of the problem, -1 for memory before
    it was written. ``ops_of``: the operations of each node. ``step_of``: by number of a slot, the node whose backward
    reads it. ``kept``: data of the tape that no backward read, and another one may: what cannot be made again of these.
    ``outputs``: data of the problem that somebody outside held when the forward returned.
    """

    problem: Problem
    datum_of: list[int]
    ops_of: list[tuple[int, ...]]
    step_of: dict[int, int]
    kept: frozenset[int]
    outputs: frozenset[int]

    def with_outputs_held(self) -> Problem:
        """``problem``, for callers that hold what the forward returned through the backward."""
        held = self.problem.held | self.outputs
        return replace(self.problem, held=held, returned=self.problem.returned - held)

    def is_like(self, other: FollowedProblem) -> bool:
        """Whether it differs from ``other`` in bytes and times only, so that schedules of one are of the other, too."""
        mine, theirs = self.problem, other.problem
        parts = ((f.datum_of, f.ops_of, f.step_of, f.kept, f.problem.held, f.problem.returned) for f in (self, other))
        if next(parts) != next(parts):
            return False
        return all(_shape(m) == _shape(n) for m, n in zip(mine.nodes, theirs.nodes, strict=True))

    def with_worst_of(self, other: FollowedProblem) -> FollowedProblem:
        """A problem that a schedule fits in both: ``other`` is of the same forward, with another loss. Where their
        backwards differ, the one of them that takes more.
        """
        mine, theirs = self.problem, other.problem
        same = (self.datum_of, self.ops_of, self.step_of) == (other.datum_of, other.ops_of, other.step_of)
        if not same or any(_makes(m) != _makes(n) for m, n in zip(mine.nodes, theirs.nodes, strict=True)):
            peaks = [walk(p, keep_everything(p)).peak for p in (mine, theirs)]
            return self if peaks[0] >= peaks[1] else other
        nodes = tuple(_worst(m, n) for m, n in zip(mine.nodes, theirs.nodes, strict=True))
        held = mine.held | theirs.held
        returned = (mine.returned | theirs.returned) - held
        problem = replace(mine, nodes=nodes, held=held, returned=returned, loss=max(mine.loss, theirs.loss))
        return replace(self, problem=problem, kept=self.kept | other.kept, outputs=self.outputs | other.outputs)


def _makes(node: Node) -> tuple[object, ...]:
    return node.makes, node.rerun, node.within, node.backward is None


def _worst(mine: Node, theirs: Node) -> Node:
    reads, peak = tuple(sorted({*mine.reads, *theirs.reads})), max(mine.peak, theirs.peak)
    a, b = mine.backward, theirs.backward
    if a is None or b is None:
        return replace(mine, reads=reads, peak=peak)
    read = tuple(sorted({*a.reads, *b.reads}))
    sizes = max(a.before, b.before), max(a.peak, b.peak), max(a.after, b.after)
    return replace(mine, reads=reads, peak=peak, backward=Backward(max(a.time, b.time), read, *sizes))


def _shape(node: Node) -> tuple[object, ...]:
    return node.reads, node.makes, node.rerun, None if node.backward is None else node.backward.reads


@dataclass
class _Building:
    nodes: list[Node] = field(default_factory=list)
    data: list[Data] = field(default_factory=list)
    datum_of: list[int] = field(default_factory=list)
    ops_of: list[tuple[int, ...]] = field(default_factory=list)
    at: dict[int, int] = field(default_factory=dict)  # data of the problem, by datum
    gathered: dict[int, frozenset[int]] = field(default_factory=dict)  # by node, storages that come and go
    outside: int | None = None  # the datum of memory that is not followed, if there is some now

    def datum(self, number: int, name: str, size: int) -> int:
        """New data of the node that comes next."""
        self.data.append(Data(name, size, len(self.nodes)))
        self.datum_of.append(number)
        return len(self.data) - 1

    def node(self, node: Node, ops: tuple[int, ...] = (), gathered: frozenset[int] = frozenset()) -> None:
        """The next node. ``gathered``: see ``Op``."""
        if gathered:
            self.gathered[len(self.nodes)] = gathered
        self.nodes.append(node)
        self.ops_of.append(ops)

    def beside(self, size: int) -> None:
        """From now on there are ``size`` bytes that are not followed, such as parameters that were gathered."""
        before = self.outside
        if size == (0 if before is None else self.data[before].size):
            return
        if before is not None:
            self.node(Node(f"outside_ends{len(self.nodes)}", 0, (before,), (), 0, None, rerun=False))
        self.outside = self.datum(-1, f"outside{len(self.nodes)}", size) if size else None
        if self.outside is not None:
            self.node(Node(f"outside{len(self.nodes)}", 0, (), (self.outside,), size, None, rerun=False))


def problem_of(ops: list[Op], data: list[Datum], seen: Seen) -> FollowedProblem:
    """The problem of a step that is over: its ``ops`` and ``data``, as a ``Tape`` has noted them."""
    building, tape = _Building(), Forward(ops, data)
    ends = _ends(tape, seen)
    kept = frozenset(n for n in needed_for(ops, data, seen.unread()) if data[n].pinned)
    ends.update(dict.fromkeys(kept - seen.freed, len(seen.marks) + len(ops)))
    marks = {mark.number: k for k, mark in enumerate(seen.marks) if mark.what == "op"}
    released: dict[int, list[int]] = {}  # data, by the operation at whose end nobody outside holds them any more
    for number, end in ends.items():
        if end < len(tape.ops):
            released.setdefault(end, []).append(number)
    groups = {d.writers[-1]: d.number for d in tape.data if d.writers and not d.pinned}
    within = {i for d in tape.data if d.writers and not d.pinned for i in (d.maker, *d.writers)}
    for index, op in enumerate(tape.ops):
        k = marks[index]
        building.beside(max(0, seen.moments[k].level - seen.marks[k].live))
        own = _own(seen, k)
        if index in groups:
            _add_group(building, tape, seen, marks, groups[index])
        elif index in within:
            _add_unwritten(building, tape, index, own)
        else:
            _add(building, tape, index, op, own)
        late = [building.at[n] for n in released.get(index, ()) if n in building.at]
        if late:
            building.node(Node(f"release{index}", 0, tuple(sorted(late)), (), 0, None, rerun=False))
    building.beside(0)  # the loss counts it from here on
    return _with_backwards(building, tape, seen, ends, kept)


def _own(seen: Seen, k: int) -> int:
    """The most bytes that the operation at mark ``k`` allocates."""
    moment = seen.moments[k]
    return moment.peak - max(moment.level, seen.marks[k].live)


def _name(op: Op, index: int) -> str:
    return f"{op.func._schema.name[6:] if op.func.namespace == 'aten' else op.func._schema.name}_{index}"


def _add(building: _Building, tape: Forward, index: int, op: Op, own: int) -> None:
    """A node of one operation; none for one that takes no memory, as views do."""
    makes = [tape.data[n] for _, n in op.makes]
    if not makes and own <= 0:
        return
    reads = sorted({building.at[n] for n in op.reads if n in building.at})
    mine = []
    for datum in makes:
        building.at[datum.number] = building.datum(datum.number, f"{_name(op, index)}.{datum.number}", datum.size)
        mine.append(building.at[datum.number])
    reruns = op.reruns and bool(makes) and not any(d.pinned for d in makes)
    peak = max(own, sum(d.size for d in makes))
    node = Node(_name(op, index), op.nanoseconds, tuple(reads), tuple(mine), peak, None, rerun=reruns)
    building.node(node, (index,), op.gathered)


def _add_unwritten(building: _Building, tape: Forward, index: int, own: int) -> None:
    """The maker of memory that later operations write before anybody reads it: until then it is other data.

    What else it makes, as the statistics of a norm, it can make again alone.
    """
    op = tape.ops[index]
    mine, others = [], []
    for _, number in op.makes:
        datum = tape.data[number]
        name = f"{_name(op, index)}.{number}"
        if datum.writers and not datum.pinned:
            mine.append(building.datum(-1, f"{name}.unwritten", datum.size))
            building.at[-1 - number] = mine[-1]
        else:
            mine.append(building.datum(number, name, datum.size))
            building.at[number] = mine[-1]
            others.append(datum)
    reads = sorted({building.at[n] for n in op.reads if n in building.at})
    peak = max(own, sum(building.data[d].size for d in mine))
    reruns = op.reruns and bool(others) and not any(d.pinned for d in others)
    name, time = f"{_name(op, index)}_unwritten", op.nanoseconds if others else 0
    node = Node(name, time, tuple(reads), tuple(mine), peak, None, rerun=reruns)
    building.node(node, (index,) if others else (), op.gathered)


def _add_group(building: _Building, tape: Forward, seen: Seen, marks: dict[int, int], number: int) -> None:
    """The maker of a datum and all that write into it, as one node at the place of the last of them."""
    datum = tape.data[number]
    ops = (datum.maker, *datum.writers)
    unwritten = building.at[-1 - number]
    building.node(Node(f"written{ops[-1]}", 0, (unwritten,), (), 0, None, rerun=False))
    own, *others = (_own(seen, marks[i]) for i in ops)
    peak = max(own, sum(tape.data[n].size for _, n in tape.ops[ops[0]].makes) + max(others))
    reads = {building.at[n] for i in ops for n in tape.ops[i].reads if n != number and n in building.at}
    name = _name(tape.ops[ops[0]], ops[-1])
    building.at[number] = building.datum(number, f"{name}.{number}", datum.size)
    time = sum(tape.ops[i].nanoseconds for i in ops)
    node = Node(name, time, tuple(sorted(reads)), (building.at[number],), peak, None)
    building.node(node, ops, frozenset().union(*(tape.ops[i].gathered for i in ops)))


def _ends(tape: Forward, seen: Seen) -> dict[int, int]:
    """The operation after which nobody outside holds a datum that nothing reads so late; the number of operations, and
    the number of the mark beyond, for what is held after the forward; -1 for what is always held. What goes before the
    backward, as what autocast has cast, counts to the last operation: the loss has the room that it leaves.
    """
    count = len(tape.ops)
    last_read = {d.number: max((d.maker, *d.writers)) for d in tape.data}
    for index, op in enumerate(tape.ops):
        for number in op.reads if op.makes else ():
            last_read[number] = max(last_read[number], index)
    ends: dict[int, int] = {}
    for datum in tape.data:
        at = seen.released.get(datum.number)
        if at is None:
            ends[datum.number] = len(seen.marks) + count
            continue
        mark = seen.marks[at]
        if mark.what == "op":
            if mark.number - 1 > last_read[datum.number]:
                ends[datum.number] = mark.number - 1
        elif mark.what == "end" or datum.number in seen.freed:
            if count - 1 > last_read[datum.number]:
                ends[datum.number] = count - 1
        else:
            ends[datum.number] = count + at
    return ends


def _limit(building: _Building, steps: list[BackwardMoment]) -> None:
    """Nodes that read what comes and goes may run again at those moments at which it was seen to be there."""
    last = len(building.nodes) + len(steps) - 1  # the node of the first moment
    for i, wanted in building.gathered.items():
        there = [last - j for j, step in enumerate(steps) if wanted <= step.gathered]
        ends = [k for k in range(len(there)) if there[k] - 1 not in there[k + 1 : k + 2]]
        stretches = [there[a + 1 : b + 1] for a, b in itertools.pairwise([-1, *ends])]
        longest = max(stretches, key=len, default=[])
        within = (longest[0], longest[-1]) if longest else None
        node = building.nodes[i]
        building.nodes[i] = replace(node, rerun=node.rerun and within is not None, within=within)


def _with_backwards(
    building: _Building, tape: Forward, seen: Seen, ends: dict[int, int], kept: frozenset[int]
) -> FollowedProblem:
    steps, count = moments_of(tape, seen, ends), len(tape.ops)
    step_of: dict[int, int] = {}
    _limit(building, steps)
    for step in reversed(steps):
        step_of.update(dict.fromkeys(step.slots, len(building.nodes)))
        reads = tuple(sorted(building.at[n] for n in step.reads if n in building.at))
        backward = Backward(step.time, reads, step.before, step.peak, step.after)
        building.node(Node(f"backward{len(building.nodes)}", 0, (), (), 0, backward, rerun=False))
    end = next(k for k, mark in enumerate(seen.marks) if mark.what == "end")
    loss = max(0, seen.moments[end].peak - min(mark.live for mark in seen.marks[end : end + 2]))
    always = len(seen.marks) + count
    held = frozenset(building.at[n] for n, at in ends.items() if at == always and n in building.at)
    returned = frozenset(building.at[n] for n, at in ends.items() if count <= at < always and n in building.at)
    outputs = {n for n, at in ends.items() if count <= at or n in seen.freed}
    blocks = (Block(0, len(building.nodes), 0),) if building.nodes else ()
    problem = Problem(tuple(building.nodes), tuple(building.data), held, loss, blocks, returned - held)
    problem.verify()
    found = frozenset(building.at[n] for n in outputs if n in building.at)
    return FollowedProblem(problem, building.datum_of, building.ops_of, step_of, kept, found)
