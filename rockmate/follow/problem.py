"""The problem of a followed step: its operations, what lives how long, and what the backward reads, as was observed.

Autograd's graph does not depend on what is held, so the memory of gradients at each moment of the backward is what was
observed, less the data that lived. Each moment at which autograd asks for saved tensors is a ``Backward``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rockmate.follow.observed import Mark, Seen, loss_of
from rockmate.follow.plan import eager_peak_of
from rockmate.follow.record import Datum, Op, Outside, needed_for
from solvers import Backward, Block, Data, Node, Problem, Schedule, ScheduleError, walk, with_deletes


@dataclass
class FollowedProblem:
    """``problem``, and what it means. ``datum_of``: the datum of the tape, by data of the problem, -1 for memory before
    it was written. ``ops_of``: the operations of each node. ``step_of``: by number of a slot, the node whose backward
    reads it. ``kept``: data of the tape that no backward read, and another one may: what cannot be made again of these.
    ``early``: the same of those that went before the forward returned, which another way of computing may keep; each
    with the last of these that it is for.
    ``outputs``: data of the problem that somebody outside held when the forward returned.
    """

    problem: Problem
    datum_of: list[int]
    ops_of: list[tuple[int, ...]]
    step_of: dict[int, int]
    kept: frozenset[int]
    early: dict[int, int]
    outputs: frozenset[int]

    @property
    def form(self) -> tuple[object, ...]:
        """What is equal in those that differ in bytes and times only."""
        return self.datum_of, self.ops_of, self.step_of, self.kept, self.early, self.problem.form

    def is_like(self, other: FollowedProblem) -> bool:
        """Whether schedules of one are of the other, too."""
        return self.form == other.form

    def has_nodes_of(self, other: FollowedProblem) -> bool:
        """Whether its nodes are those of ``other``, though a loss may use what forward returned in another way."""
        return (self.datum_of, self.ops_of, self.step_of) == (other.datum_of, other.ops_of, other.step_of)

    def with_runs_of(self, schedule: Schedule) -> Schedule | None:
        """The runs of a ``schedule`` for another loss, as they are for this one; None where they are none for it."""
        found = with_deletes(self.problem, schedule)
        try:
            walk(self.problem, found)
        except ScheduleError:
            return None
        return found

    def with_worst_of(self, other: FollowedProblem) -> FollowedProblem:
        """A problem that a schedule fits in both: ``other`` is of the same forward, with another loss. Where their
        backwards differ, the one of them that takes more.
        """
        mine, theirs = self.problem, other.problem
        if not self.has_nodes_of(other) or any(
            _makes(m) != _makes(n) for m, n in zip(mine.nodes, theirs.nodes, strict=True)
        ):
            return max(self, other, key=lambda found: eager_peak_of(found.problem))
        nodes = tuple(_worst(m, n) for m, n in zip(mine.nodes, theirs.nodes, strict=True))
        held = mine.held | theirs.held
        returned = (mine.returned | theirs.returned) - held
        problem = replace(mine, nodes=nodes, held=held, returned=returned, loss=max(mine.loss, theirs.loss))
        kept, early = self.kept | other.kept, self.early | other.early
        return replace(self, problem=problem, kept=kept, early=early, outputs=self.outputs | other.outputs)


def _makes(node: Node) -> tuple[object, ...]:
    return node.makes, node.rerun, node.within, node.backward is None


def _worst(mine: Node, theirs: Node) -> Node:
    a, b, backward = mine.backward, theirs.backward, mine.backward
    if a is not None and b is not None:
        sizes = max(a.before, b.before), max(a.peak, b.peak), max(a.after, b.after)
        backward = Backward(max(a.time, b.time), tuple(sorted({*a.reads, *b.reads})), *sizes)
    reads = tuple(sorted({*mine.reads, *theirs.reads}))
    return replace(mine, reads=reads, peak=max(mine.peak, theirs.peak), backward=backward)


def _name(op: Op, index: int) -> str:
    return f"{op.func._schema.name.removeprefix('aten::')}_{index}"


@dataclass
class BackwardMoment:
    """One moment of the backward. ``slots``: that it reads. ``gathered``: storages that come and go which are there.
    ``outside``: those of the data that it ``reads`` which somebody outside still holds after it began.
    """

    slots: list[int]
    gathered: frozenset[int]
    reads: frozenset[int]
    outside: frozenset[int]
    before: int
    peak: int
    time: int
    after: int = 0


class _Building:
    """The problem of a step, as it grows with the ``ops`` of the step. ``noted``: the data of the tape."""

    def __init__(self, ops: list[Op], noted: list[Datum], seen: Seen) -> None:
        self.ops, self.noted = ops, noted
        self.marks = {mark.number: mark for mark in seen.marks if mark.what == "op"}
        self.nodes: list[Node] = []
        self.data: list[Data] = []
        self.datum_of: list[int] = []
        self.ops_of: list[tuple[int, ...]] = []
        self.at: dict[int, int] = {}  # data of the problem, by datum; by -1 - datum before it was written
        self.gathered: dict[int, frozenset[int]] = {}  # by node, storages that come and go
        self.outside: int | None = None  # the datum of memory that is not followed, if there is some now

    def datum(self, number: int, name: str, size: int) -> int:
        self.data.append(Data(name, size, len(self.nodes)))
        self.datum_of.append(number)
        return len(self.data) - 1

    def node(self, node: Node, *ops: int) -> None:
        """The next node, which runs ``ops`` again."""
        if gathered := frozenset[int]().union(*(self.ops[index].gathered for index in ops)):
            self.gathered[len(self.nodes)] = gathered
        self.nodes.append(node)
        self.ops_of.append(ops)

    def span(self, name: str, reads: Sequence[int] = (), makes: Sequence[int] = ()) -> None:
        """A node that only says how long data live: of those that it ``makes`` it allocates all."""
        peak = sum(self.data[d].size for d in makes)
        self.node(Node(name, 0, tuple(reads), tuple(makes), peak, None, rerun=False))

    def beside(self, size: int) -> None:
        """From now on there are ``size`` bytes that are not followed, such as parameters that were gathered."""
        before = self.outside
        if size == (0 if before is None else self.data[before].size):
            return
        if before is not None:
            self.span(f"outside_ends{len(self.nodes)}", reads=[before])
        self.outside = self.datum(-1, f"outside{len(self.nodes)}", size) if size else None
        if self.outside is not None:
            self.span(f"outside{len(self.nodes)}", makes=[self.outside])

    def known(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """The data of the problem that stand for those of the tape."""
        return tuple(sorted({self.at[n] for n in numbers if n in self.at}))

    def own(self, index: int) -> int:
        """The most bytes that an operation allocates. Where it runs again, it gets copies of running statistics."""
        mark, op = self.marks[index], self.ops[index]
        given = (x for x in (*op.args, *op.kwargs.values()) if isinstance(x, Outside) and x.copied)
        return mark.moment.peak - max(mark.moment.level, mark.live) + sum(x.tensor.nbytes for x in given)

    def add(self, index: int, unwritten: bool) -> None:
        """A node of one operation; none for one that takes no memory, as views do.

        ``unwritten``: later operations write some of what it makes or writes before anybody reads it. Until then that
        is other data. What else it makes, as the statistics of a norm, it can make again alone.
        """
        op, own = self.ops[index], self.own(index)
        makes = [self.noted[n] for _, n in op.makes]
        if not makes and own <= 0 and not unwritten:
            return
        name, reads, mine = _name(op, index), self.known(op.reads), []
        for datum in makes:
            size, made = datum.size, f"{name}.{datum.number}"
            if datum.is_written_again:
                mine.append(self.datum(-1, f"{made}.unwritten", size))
                self.at[-1 - datum.number] = mine[-1]
            else:
                mine.append(self.datum(datum.number, made, size))
                self.at[datum.number] = mine[-1]
        whole = [datum for datum in makes if not datum.is_written_again]
        again = not unwritten or bool(whole)
        reruns = op.reruns and bool(whole) and not any(datum.pinned for datum in whole)
        peak, time = max(own, sum(datum.size for datum in makes)), op.nanoseconds if again else 0
        name += "_unwritten" if unwritten else ""
        self.node(Node(name, time, reads, tuple(mine), peak, None, rerun=reruns), *((index,) if again else ()))

    def add_group(self, datum: Datum) -> None:
        """The maker of a datum and all that write into it, as one node at the place of the last of them."""
        ops, number = datum.makers, datum.number
        self.span(f"written{ops[-1]}", reads=[self.at[-1 - number]])
        own, *others = map(self.own, ops)
        peak = max(own, sum(self.noted[n].size for _, n in self.ops[ops[0]].makes) + max(others))
        reads = self.known(n for i in ops for n in self.ops[i].reads if n != number)
        name = _name(self.ops[ops[0]], ops[-1])
        self.at[number] = self.datum(number, f"{name}.{number}", datum.size)
        time = sum(self.ops[i].nanoseconds for i in ops)
        self.node(Node(name, time, reads, (self.at[number],), peak, None), *ops)

    def add_backwards(self, steps: list[BackwardMoment]) -> dict[int, int]:
        self._limit(steps)
        step_of: dict[int, int] = {}
        for step in reversed(steps):
            step_of.update(dict.fromkeys(step.slots, len(self.nodes)))
            backward = Backward(step.time, self.known(step.reads), step.before, step.peak, step.after)
            self.node(Node(f"backward{len(self.nodes)}", 0, (), (), 0, backward, rerun=False))
        return step_of

    def _limit(self, steps: list[BackwardMoment]) -> None:
        """Nodes that read what comes and goes may run again at those moments at which it was seen to be there. Those
        that make what somebody outside holds may once that is over: it would be there twice before.
        """
        last = len(self.nodes) + len(steps) - 1  # the node of the first moment
        held = {self.data[d].owner: j for j, step in enumerate(steps) for d in self.known(step.outside)}
        for i in sorted(self.gathered.keys() | held.keys()):
            wanted, since = self.gathered.get(i, frozenset()), held.get(i, -1) + 1
            there = [last - j for j in range(since, len(steps)) if wanted <= steps[j].gathered]
            ends = [k for k in range(len(there)) if there[k] - 1 not in there[k + 1 : k + 2]]
            stretches = [there[a + 1 : b + 1] for a, b in itertools.pairwise([-1, *ends])]
            longest = max(stretches, key=len, default=[])
            within = (longest[0], longest[-1]) if longest else None
            node = self.nodes[i]
            self.nodes[i] = replace(node, rerun=node.rerun and within is not None, within=within)


def problem_of(ops: list[Op], data: list[Datum], seen: Seen) -> FollowedProblem:
    """The problem of a step that is over: its ``ops`` and ``data``, as a ``Tape`` has noted them."""
    building, count = _Building(ops, data, seen), len(ops)
    ends, always = _ends(ops, data, seen), count + len(seen.marks)
    kept = frozenset(d.number for d in needed_for(ops, data, seen.unread()) if d.pinned)
    early: dict[int, int] = {}
    for number, at in seen.discarded.items():
        early.update((d.number, number) for d in needed_for(ops, data, [number]) if d.pinned)
        ends.update((n, max(ends.get(n, 0), at)) for n, last in early.items() if last == number)
    ends.update(dict.fromkeys(kept - seen.freed, always))
    released: dict[int, list[int]] = {}  # data, by the operation at whose end nobody outside holds them any more
    for number, end in ends.items():
        released.setdefault(end, []).append(number)
    groups = {d.writers[-1]: d for d in data if d.is_written_again}
    within = {i for d in groups.values() for i in d.makers}
    for index in range(count):
        mark = building.marks[index]
        building.beside(max(0, mark.moment.level - mark.live))
        if index in groups:
            building.add_group(groups[index])
        else:
            building.add(index, unwritten=index in within)
        if late := building.known(released.get(index, ())):
            building.span(f"release{index}", reads=late)
    building.beside(0)  # the loss counts it from here on
    step_of = building.add_backwards(_moments_of(ops, data, seen, ends))
    end = next(k for k, mark in enumerate(seen.marks) if mark.what == "end")
    loss = loss_of(seen.marks, seen.marks[end].moment.peak)
    held = frozenset(building.known(n for n, at in ends.items() if at == always))
    returned = frozenset(building.known(n for n, at in ends.items() if count <= at < always))
    outputs = frozenset(building.known(n for n, at in ends.items() if count <= at or n in seen.freed))
    blocks = (Block(0, len(building.nodes), 0),) if building.nodes else ()
    problem = Problem(tuple(building.nodes), tuple(building.data), held, loss, blocks, returned - held)
    problem.verify()
    return FollowedProblem(problem, building.datum_of, building.ops_of, step_of, kept, early, outputs)


def _ends(ops: list[Op], data: list[Datum], seen: Seen) -> dict[int, int]:
    """The operation after which nobody outside holds a datum that nothing reads so late; the number of operations, and
    the number of the mark beyond, for what is held after the forward; -1 for what is always held. What goes before the
    backward, as what autocast has cast, counts to the last operation: the loss has the room that it leaves.
    """
    count = len(ops)
    last_read = {d.number: max(d.makers) for d in data}
    for index, op in enumerate(ops):
        for number in op.reads if op.makes else ():
            last_read[number] = max(last_read[number], index)
    ends: dict[int, int] = {}
    for number, read in last_read.items():
        at = seen.released.get(number)
        mark = None if at is None else seen.marks[at]
        if mark is not None and (mark.what in ("op", "end") or number in seen.freed):
            end = (mark.number if mark.what == "op" else count) - 1
            if end > read:
                ends[number] = end
        else:
            ends[number] = count + (len(seen.marks) if at is None else at)
    return ends


def _moments_of(ops: Sequence[Op], data: Sequence[Datum], seen: Seen, ends: dict[int, int]) -> list[BackwardMoment]:
    """The moments of the backward, in order. Where autograd asks for several tensors at once, they are one. So are all
    from one at which it asks for a tensor to the last at which it does so again, as for a hook that differentiates.
    """
    first: dict[int, int] = {}  # the moment that reads it, by slot
    marks, count = seen.marks, len(ops)
    asked = [k for k, mark in enumerate(marks) if mark.what == "asked"]
    steps: list[BackwardMoment] = []
    used_up = any(mark.what == "gone" and mark.data for mark in marks)
    last = _last_needed(ops, data, seen, asked) if used_up else {}
    quiet = False  # nothing was allocated since the moment before was answered

    def bytes_gone(mark: Mark, k: int) -> int:
        """Bytes that went at a mark, and may be there under another schedule: what nobody used, and what autograd did
        use for the moment at mark ``k``, and something is made from again later.
        """
        return mark.number + sum(data[n].size for n in mark.data if last.get(n, k) > k)

    for k, end in itertools.zip_longest(asked, asked[1:], fillvalue=len(marks) - 1):
        mark, after = marks[k], marks[k + 1 : end]  # "answered", and then "gone"
        before = mark.moment.level - mark.live
        gone = itertools.accumulate((bytes_gone(other, k) for other in after[1:]), initial=0)
        peak = max(other.moment.peak + idle for other, idle in zip(after, gone, strict=True)) - after[0].live
        outside = frozenset(n for n, at in ends.items() if count + k < at < count + len(marks))
        reads = mark.data | outside
        time = marks[end].time - after[0].time
        if quiet:
            steps[-1].peak = 0
        steps.append(BackwardMoment([mark.number], mark.gathered, reads, outside, max(0, before), max(0, peak), time))
        at = first.get(mark.number, len(steps) - 1 - quiet)
        steps[at:] = [_joined(steps[at:])]
        first.update(dict.fromkeys(steps[at].slots, at))
        quiet = {x for other in after for x in (other.moment.level, other.moment.peak)} == {marks[end].moment.level}
    final = marks[-1].moment.level - marks[-1].live if steps else 0
    for step, following in itertools.zip_longest(steps, steps[1:]):
        step.after = max(0, following.before if following is not None else final)
        step.peak = max(step.peak, step.before, step.after)
    return steps


def _joined(steps: list[BackwardMoment]) -> BackwardMoment:
    joined, *others = steps
    for step in others:
        joined.slots += step.slots
        joined.reads |= step.reads
        joined.outside |= step.outside
        joined.peak = max(joined.peak, step.peak)
        joined.time += step.time
    return joined


def _last_needed(ops: Sequence[Op], data: Sequence[Datum], seen: Seen, asked: Sequence[int]) -> dict[int, int]:
    """By datum, the last of the marks ``asked`` that needs it: itself, or something that is made again from it."""
    last: dict[int, int] = {}
    for k in reversed(asked):
        number = seen.packs[seen.marks[k].number][1]
        if number is not None:
            needed = needed_for(ops, data, [number], lambda d: d.number in last)
            last.update({d.number: k for d in needed})
    return last
