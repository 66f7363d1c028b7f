"""From graphs to the problem that solvers are given, and the memory that a plan leaves for the caller's loss: by a rule
before the first step, as it was seen from then on.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace

import torch

from rkgb.device import Cpu, kind_of
from rkgb.graphs import D_graph
from rkgb.Ktools import K_graph
from rkgb.pipeline import Graphs
from solvers import Backward, Block, Bwd, Data, Loss, Node, Problem, Run, Schedule
from solvers.clocks import Clocks, Kernels, clocks


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes for the loss, beside the outputs themselves.

    ``between``: the most that it allocates between forward and backward. It includes the gradients of the outputs, and
    excludes ``kept``: what stays allocated through the backward, and is subtracted from the budget. ``usual``: what
    ``plan.predicted_peak`` counts in place of ``between``. ``scalars``: for the numbers of the loss itself (its value,
    its gradient, counts), subtracted from every budget. ``outputs``: the bytes of the outputs of the step in which the
    figures were measured, or to which they were scaled; None for the rule before the first step.
    """

    between: int
    kept: int
    usual: int
    scalars: int
    outputs: int | None = None

    @property
    def seen(self) -> bool:
        """Whether the figures were measured in a step."""
        return self.outputs is not None

    @property
    def total(self) -> int:
        """Of the loss, when the backward begins."""
        return self.between + self.kept

    @property
    def predicted_kept(self) -> int:
        """What ``plan.predicted_peak`` counts in place of ``kept``: the usual losses keep nothing."""
        return self.kept if self.seen else 0


def usual_room(k: K_graph, loss_memory: int | None) -> Room:
    """Before the first step. ``loss_memory``: see ``Rockmate``; None for three times the bytes of the roots.

    Of the three, cross entropy takes two, and a copy cast to float32 one. As many bytes as the roots have may be kept:
    ``F.mse_loss`` and ``F.smooth_l1_loss`` return one number in storage as large as their input, and loops hold
    differences, probabilities and the like.
    """
    roots = [k.s.d.values[v] for v in k.usage.root_values(k.s.d)]
    floats = sum(v.bytes * max(1, 4 // v.dtype.itemsize) for v in roots)  # in single precision, as losses compute
    scalars = kind_of(device_of_outputs(k.s.d)).scalars
    if loss_memory is not None:
        kept = min(floats, loss_memory)
        return Room(k.output_bytes + loss_memory - kept, kept, k.output_bytes + loss_memory, scalars)
    return Room(2 * floats + max(floats, k.output_bytes), floats, 3 * floats, scalars)


def seen_room(peak: int, kept: int, scalars: int, outputs: int) -> Room:
    """From steps in which a loss allocated ``peak`` bytes at most, of which ``kept`` stayed through the backward.

    ``outputs``: see ``Room``. Its numbers are among these, and have ``scalars`` bytes of their own.
    """
    kept = max(0, kept - scalars)
    between = max(0, peak - kept - scalars)
    return Room(between, kept, between, scalars, outputs)


def declared_room(k: K_graph, loss_memory: int, seen: Room | None) -> Room:
    """For a loss that was declared, or for what was ``seen``, where that is more."""
    room = usual_room(k, loss_memory)
    if seen is None or (seen.total <= room.total and seen.kept <= room.kept):
        return room
    kept = seen.kept
    return seen if seen.total > room.total else dataclasses.replace(room, between=room.total - kept, kept=kept)


def wider(room: Room, seen: Room | None) -> Room:
    """``room``, or more where more was seen."""
    if seen is None:
        return room
    between, kept = max(room.between, seen.between), max(room.kept, seen.kept)
    return dataclasses.replace(room, between=between, kept=kept, usual=max(room.usual, seen.usual + seen.kept))


def grown(room: Room, now: int) -> Room:
    """``room``, that was seen, for ``now`` bytes of outputs: in proportion, and never less than was seen.

    What was taken for the loss's numbers may have been tensors, which grow. A smaller step after a larger one has the
    larger one's room, so that no order of sizes multiplies it.
    """
    if room.outputs is None or now <= room.outputs:
        return room
    between, kept = (scaled(x + room.scalars, room.outputs, now) for x in (room.between, room.kept))
    return dataclasses.replace(room, between=between, kept=kept, usual=between, outputs=now)


def scaled(size: int, before: int, now: int) -> int:
    """``size`` bytes with ``before`` bytes of outputs, for ``now``, which are no fewer."""
    return -(-size * now // max(1, before))


def bytes_of_outputs(d: D_graph) -> int:
    """The bytes of all outputs."""
    return sum(d.values[v].bytes for v in dict.fromkeys(d.outputs))


def device_of_outputs(d: D_graph) -> torch.device:
    """Where the loss is computed."""
    return next((d.values[v].device for v in d.outputs), torch.device("cpu"))


def usual_problem(problem: Problem, k: K_graph, room: Room) -> Problem:
    """``problem`` with the usual loss, or the one that was seen or given; its gradients are contiguous unless they are
    known not to be.
    """
    extra = (n.backward.extra if n.backward else 0 for n in k.nodes)
    nodes = (
        dataclasses.replace(n, backward=dataclasses.replace(n.backward, peak=n.backward.peak - more))
        if more and n.backward
        else n
        for n, more in zip(problem.nodes, extra, strict=True)
    )
    return dataclasses.replace(problem, nodes=tuple(nodes), loss=room.usual)


def problem_of(graphs: Graphs, room: Room, costs: str) -> Problem:
    """The solvers' problem of ``graphs``, with ``room`` for the loss but for what is kept of it.

    ``costs``: how times were found. Where they were measured, a node's time is that of a second run with the Python
    around it. What first runs take less is taken off all backwards, so that a step without recomputation takes what was
    measured. Right after the run that made its inputs, code and inputs are in the caches (``Node.warm``). Where the
    device mostly waits for the host, times are the host's.
    """
    k = graphs.K
    beside = beside_warm = 0  # nanoseconds of the executor's Python for a node that runs again, and right after another
    if costs == "measured":
        kind = kind_of(graphs.S.device)
        beside, beside_warm = kind.beside_a_rerun(sum(x.bytes for x in graphs.D.storages)), kind.beside_a_rerun(0)
    kept = clocks_without_reruns(k)
    if kept is not None and kept.host > kept.device:
        k = _with_times_of_the_host(k)
        beside = beside_warm = _again()
    backward = sum(n.backward.time for n in k.nodes if n.backward)
    left = max(0.0, 1 - beside * sum(n.rerun for n in k.nodes) / backward) if backward else 1.0
    nodes = tuple(
        Node(
            n.name,
            n.time + beside * n.rerun,
            n.reads,
            n.makes,
            n.peak,
            Backward(int(b.time * left), b.reads, b.before, b.peak + b.extra, b.after) if (b := n.backward) else None,
            n.rerun,
            n.random_bytes,
            n.warm + beside_warm if n.rerun and n.warm + beside_warm < n.time + beside else None,
        )
        for n in k.nodes
    )
    kinds: dict[tuple[int, tuple[bool, ...]], int] = {}  # of two heads of one class, the loss may read one alone
    blocks = tuple(
        Block(a, b, kinds.setdefault((of_class, tuple(n.backward is not None for n in nodes[a:b])), len(kinds)))
        for (a, b), of_class in zip(k.s.blocks, graphs.classes, strict=True)
    )
    data = tuple(Data(d.name, d.bytes, d.owner) for d in k.data)
    problem = Problem(nodes, data, frozenset(k.held), room.between, blocks, frozenset(k.returned))
    problem.verify()
    return problem


def _again() -> int:
    """Nanoseconds of the host for each node that runs again, beside its launch."""
    return Cpu().beside_a_rerun(0)


def clocks_of(k: K_graph, schedule: Schedule) -> Clocks | None:
    """A step of the device, and of the host that launches what it runs; None where nobody has timed launches."""
    if not any(n.launch for n in k.nodes):
        return None
    forward = tuple((n.launch, n.time) for n in k.nodes)
    backward = tuple((n.backward.launch, n.backward.time) if n.backward else (0, 0) for n in k.nodes)
    return clocks(schedule, Kernels(forward, backward, _again()))


def clocks_without_reruns(k: K_graph) -> Clocks | None:
    """Those of the step in which no node runs again."""
    backwards = (Bwd(i) for i in reversed(range(len(k.nodes))) if k.nodes[i].backward)
    return clocks_of(k, (*map(Run, range(len(k.nodes))), Loss(), *backwards))


def _with_times_of_the_host(k: K_graph) -> K_graph:
    """``k``, in which each node takes what the host does to launch it."""
    nodes = []
    for n in k.nodes:
        backward = n.backward and replace(n.backward, time=n.backward.launch)
        nodes.append(replace(n, time=n.launch, warm=n.launch, backward=backward))
    return replace(k, nodes=tuple(nodes))
