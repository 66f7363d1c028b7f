"""From graphs to the problem that solvers are given."""

from __future__ import annotations

from dataclasses import replace

from rkgb.device import Cpu, kind_of
from rkgb.Ktools import K_graph
from rkgb.pipeline import Graphs
from rockmate.planning.room import Room
from solvers import Backward, Block, Bwd, Data, Loss, Node, Problem, Run, Schedule
from solvers.clocks import Clocks, Kernels, clocks


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
