"""What the nodes of a graph cost: time and memory of each forward and backward, measured on the sample's values.

Of equal nodes one is measured, alone (``rkgb/cost/alone.py``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rkgb.blocks.classes import nodes_key
from rkgb.cost.alone import NodeRun, gradients_watched, on_zeros
from rkgb.cost.costs import Cost, InputGradient, Kept, Known, check_costs
from rkgb.cost.layouts import differentiated, gradient_layouts
from rkgb.cost.memory import refuse_within_measurements
from rkgb.cost.node import measure_node, times_by, warm
from rkgb.cost.piece import Layouts
from rkgb.cost.usage import Usage, supposed, turned_strides
from rkgb.errors import TraceError, UnsupportedError
from rkgb.graphs import S_graph, S_node
from rkgb.nodes import kept_bytes
from rkgb.program import run_node, source_values
from rkgb.trace.guards import is_guard
from rkgb.trace.preserved import drop_saved, preserved

__all__ = ["Cost", "InputGradient", "Kept", "Known", "check_costs", "measure_nodes"]


def measure_nodes(
    s: S_graph,
    model: torch.nn.Module,
    inputs: list[torch.Tensor],
    costs: str = "measured",
    usage: Usage | None = None,
    known: Known | None = None,
    report: Callable[[float], None] = lambda _: None,
) -> list[Cost]:
    """The cost of every node of ``s``, in order; times in nanoseconds, memory in bytes.

    ``costs``: "measured" times each distinct node; "flops" computes times from counted operations and bytes, the same
    on every run. ``usage``: what the caller does with the outputs, by default ``supposed``; where it leaves the layouts
    of gradients open, they are contiguous. ``known``: costs that need no measuring; what is measured is added to it.
    ``report`` gets the fraction of the nodes that is done.
    """
    usage = usage or supposed(s.d)
    known = Known() if known is None else known
    if usage not in known.of:
        task = _Task(s, model, inputs, costs, usage, known, report)
        like = known.like(usage)
        known.of[usage] = _stored_or_measured(task) if like is None else _with_memory_of(known.anew, like, task)
    return known.of[usage]


@dataclass(frozen=True, slots=True)
class _Task:
    """What ``measure_nodes`` was asked for."""

    s: S_graph
    model: torch.nn.Module
    inputs: list[torch.Tensor]
    costs: str
    usage: Usage
    known: Known
    report: Callable[[float], None]


class _Key(NamedTuple):
    """What decides the costs of a node.

    ``same``: equal for equal nodes. ``fed``: positions in ``makes`` that get gradients, ``layouts`` these gradients'
    strides. ``given``: which of its inputs have a ``.grad``. ``held``: positions in ``makes`` that the caller holds and
    the node's own backward would otherwise release.
    """

    same: Hashable
    fed: tuple[int, ...]
    given: tuple[bool, ...]
    layouts: Layouts
    held: tuple[int, ...]


def _stored_or_measured(task: _Task) -> list[Cost]:
    """The costs of this very graph: stored by an earlier process, or else measured."""
    known = task.known
    sources = source_values(task.s.d.sources, task.model, task.inputs)
    if known.given is None:
        known.given = _given(sources)
    costs = known.kept.get(task.usage, known.given)
    if costs is None:
        costs = _measured(task, sources, known.given)
        known.measurings += 1
        costs = known.kept.put(task.usage, known.given, costs)
    elif not known.own:
        warm(task.s, task.model, task.inputs)
    known.own = True
    return costs


def _given(sources: dict[int, torch.Tensor]) -> frozenset[int]:
    return frozenset(v for v, t in sources.items() if t.is_leaf and t.grad is not None)


def _with_memory_of(anew: frozenset[int], costs: list[Cost], task: _Task) -> list[Cost]:
    """``costs``, with the memory of the nodes ``anew`` as it is on zeros. An operation that refuses zeros keeps its."""
    if not anew:
        return costs
    refuse_within_measurements()
    s, known = task.s, task.known
    sources = source_values(s.d.sources, task.model, task.inputs)
    given, times_of = _given(sources), times_by(task.costs, task.model)
    keys, found = _keys(task, given), list(costs)
    with preserved(task.model, task.inputs, s.d.structure.written), torch.enable_grad():
        for i in anew:
            node, key = s.nodes[i], keys[i]
            if key not in known.costs:
                values = on_zeros(s, node, task.model, task.inputs)
                run = NodeRun(s.d, node, values, key.fed, key.layouts, given, guarded=False)
                try:
                    with gradients_watched(task.model, s.d, node):
                        known.costs[key] = measure_node(run, key.held, costs[i].times, times_of)[0]
                except Exception:  # noqa: BLE001 - each operation refuses in its own way
                    known.costs[key] = costs[i]
            found[i] = known.costs[key]
    return found


def _measured(task: _Task, sources: dict[int, torch.Tensor], given: frozenset[int]) -> list[Cost]:
    """Measure each distinct node, if possible on results of equal nodes in place of its own inputs.

    Operations may refuse such stand-ins, each in its own way; then every node runs on the values of a whole run.
    A measured backward may give other strides than its run on the meta device: then the gradients of the nodes before
    it are followed again, and those that get others are measured.
    """
    known, keys = task.known, _keys(task, given)
    while not known.costs.keys() >= set(keys):
        refuse_within_measurements()  # here, since what follows runs nodes, and takes any error for a stand-in's
        before, strides = set(known.costs), dict(known.outgoing)
        try:
            _run_and_measure(task, keys, sources, given)
        except Exception:
            if not known.stand_ins:
                raise
            known.stand_ins = False
            for key in known.costs.keys() - before:
                del known.costs[key]
        if known.outgoing != strides:
            keys = _keys(task, given)
    known.layouts[task.usage] = [key.layouts for key in keys]
    return [known.costs[key] for key in keys]


def _keys(task: _Task, given: frozenset[int]) -> list[_Key]:
    s, usage = task.s, task.usage
    fed = differentiated(s, usage.root_values(s.d))
    number: dict[Hashable, int] = {}
    same: list[Hashable] = [number.setdefault(nodes_key(s.d, [node]), len(number)) for node in s.nodes]
    layouts = task.known.layouts.get(usage)
    if layouts is None:
        turned = {v: turned_strides(s.d.values[v]) for v in (s.d.outputs[k] for k in usage.turned or ())}
        strides = dict.fromkeys(usage.root_values(s.d)) | turned
        layouts = gradient_layouts(s, task.model, task.inputs, fed, same, strides, task.known.outgoing)
    caller = usage.held_storages(s.d)
    return [
        _Key(same[i], fed[i], tuple(v in given for v in n.reads), layouts[i], _held_and_saved(s, n, caller))
        for i, n in enumerate(s.nodes)
    ]


def _run_and_measure(
    task: _Task, keys: Sequence[_Key], sources: dict[int, torch.Tensor], given: frozenset[int]
) -> None:
    """Run the nodes whose results are needed, and measure each distinct node when its inputs are there."""
    s, costs, stand_ins = task.s, task.known.costs, task.known.stand_ins
    plan = runs(s, keys, stand_ins)
    times_of = times_by(task.costs, task.model, beside_measured(s))
    env = dict(sources)
    with preserved(task.model, task.inputs, s.d.structure.written), torch.enable_grad():
        for done, i in enumerate(sorted(plan.reads), 1):
            node, key = s.nodes[i], keys[i]
            values = dict(zip(node.reads, (env[v] for v in plan.reads[i]), strict=True))
            if i in plan.measured and key not in costs:
                run = NodeRun(s.d, node, values, key.fed, key.layouts, given, guarded=stand_ins)
                with gradients_watched(task.model, s.d, node), _derivatives_named(s, node):
                    costs[key], strides = measure_node(run, key.held, task.known.times(key), times_of)
                task.known.outgoing[key.same, key.fed, key.layouts] = strides
                del run
            if i in plan.needed:
                env.update(_results(s, i, values))
            for v in (*plan.reads[i], *node.makes):
                if plan.last.get(v, i) <= i and v not in sources:
                    env.pop(v, None)
            del values
            task.report(done / len(plan.reads))


@dataclass(frozen=True, slots=True)
class _Runs:
    """Which nodes must run so that each distinct node can be measured on real values.

    ``measured``: nodes that are the first of their key. ``needed``: nodes whose results a measured or needed node
    reads. ``reads``: for each of these nodes, the values in place of ``S_node.reads``. ``last``: for each value, the
    last node that reads it.
    """

    measured: frozenset[int]
    needed: frozenset[int]
    reads: dict[int, tuple[int, ...]]
    last: dict[int, int]


def runs(s: S_graph, keys: Sequence[Hashable], stand_ins: bool) -> _Runs:
    """Which nodes to run and to measure. ``keys``: one for each node, equal for equal nodes.

    ``stand_ins``: results of the first of equal nodes, which have the same form, stand in for those of the others. The
    norm after forty-eight equal layers is measured on the output of the first layer, and the other layers need not run.
    Only values that require grad have stand-ins. Indices, masks and numbers that Python reads are not replaced.
    """
    first: dict[Hashable, int] = {}
    stands: dict[int, int] = {}
    maker: dict[int, int] = {}
    for i, (node, key) in enumerate(zip(s.nodes, keys, strict=True)):
        maker.update(dict.fromkeys(node.makes, i))
        of = s.nodes[first.setdefault(key, i)]
        if stand_ins and of is not node:
            stands.update((v, w) for v, w in zip(node.makes, of.makes, strict=True) if s.d.values[v].requires_grad)
    measured = frozenset(first.values())
    needed: set[int] = set() if stand_ins else set(range(len(s.nodes)))
    reads: dict[int, tuple[int, ...]] = {}
    last: dict[int, int] = {}
    for i in reversed(range(len(s.nodes))):
        if i in measured or i in needed:
            reads[i] = tuple(stands.get(v, v) for v in s.nodes[i].reads)
            for v in reads[i]:
                last.setdefault(v, i)
                if v in maker:
                    needed.add(maker[v])
    return _Runs(measured, frozenset(needed), reads, last)


def beside_measured(s: S_graph) -> int:
    """Bytes that a step keeps beside what measuring one node takes: its values, its gradients, and both once more while
    these are made. So measuring takes no more memory than a step that keeps everything.
    """
    values, storages = s.d.values, s.d.storages
    kept = kept_bytes((node.saved for node in s.nodes), storages)
    largest = max(
        (sum(values[v].bytes for v in {*n.reads, *n.makes}) + sum(n.saved.private) for n in s.nodes), default=0
    )
    return max(0, kept - 3 * largest)


@contextlib.contextmanager
def _derivatives_named(s: S_graph, node: S_node) -> Iterator[None]:
    """Errors say which operation has no derivative, and what to do."""
    try:
        yield
    except RuntimeError as error:
        if not _NO_DERIVATIVE.match(str(error)):
            raise
        op = s.d.nodes[node.ops[0]]
        raise UnsupportedError(
            f"{op.name} at {op.line} has no derivative, and its result may get a gradient, as far as a plan knows. "
            "Compute it from x.detach(), or under torch.no_grad()."
        ) from error


_NO_DERIVATIVE = re.compile(r"derivative for \S+ is not implemented")


def _held_and_saved(s: S_graph, node: S_node, caller: frozenset[int]) -> tuple[int, ...]:
    """Positions in ``makes`` of the results that the ``caller`` holds and the node's backward saves."""
    storages = [s.d.values[v].storage for v in node.makes]
    return tuple(k for k, x in enumerate(storages) if x in caller and x in node.saved.storages)


def _results(s: S_graph, i: int, values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The results of node ``i`` for ``values``. Guards are left out: draws differ from those of the trace."""
    env = dict(values)
    with drop_saved():
        for op in (s.d.nodes[k] for k in s.nodes[i].ops if not is_guard(s.d.nodes[k])):
            env.update(zip(op.outputs, run_node(op, env.__getitem__), strict=True))
    for v in s.nodes[i].makes:
        if env[v].shape != s.d.values[v].shape:
            raise TraceError(f"{s.d.names[v]} has the shape {list(env[v].shape)}, not {list(s.d.values[v].shape)}")
    return {v: env[v] for v in s.nodes[i].makes}
