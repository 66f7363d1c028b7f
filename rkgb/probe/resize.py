"""The same graph at other sizes: how its numbers follow from the sizes of the inputs.

Two traces of one model at different sizes differ in numbers only: they have one *skeleton*. The numbers among the
arguments of operations are fitted as functions of the inputs' sizes. For new sizes the module runs once, and then the
program with the fitted numbers. This run shows all other sizes. It must show the same skeleton and give the module's
outputs, bit for bit, and the module must call the operators that it called when it was traced. So a fit may be a guess:
a wrong one costs a run, and never gives a wrong result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.Dtools import probe
from rkgb.errors import GraphError
from rkgb.graphs import B_graph, D_graph, Node, S_graph, S_node, Saved, Storage
from rkgb.probe.check import ModuleRun, run_module, same_as_module
from rkgb.probe.fit import Fit, Sizes
from rkgb.probe.foresee import bytes_of_results
from rkgb.probe.numbers import may_be_size, numbers_of, repeated_in, with_numbers
from rkgb.probe.skeleton import skeleton
from rkgb.sample import Call
from rkgb.trace.guards import GuardFailed
from rkgb.trace.operators import OperatorCount


def sizes_of(inputs: Sequence[torch.Tensor]) -> Sizes:
    """The sizes of all dimensions of all tensors of a call, in order."""
    return tuple(size for t in inputs for size in t.shape)


@dataclass(frozen=True, eq=False)
class Point:
    """A graph, the sizes of the inputs on which it was traced, and the whole ``numbers`` that the call was given.
    ``kind``: of such calls, sizes apart. Calls of other kinds may have run the graph with other rates or temperatures.
    """

    sizes: Sizes
    numbers: Sizes
    s: S_graph
    kind: Hashable = None


def point_of(call: Call, s: S_graph, kind: Hashable = None) -> Point:
    """``s`` was traced on ``call``."""
    return Point(sizes_of(call.tensors), call.numbers, s, kind)


def resized(points: Sequence[Point], expected: Hashable, model: torch.nn.Module, call: Call) -> S_graph | None:
    """The graph of ``points``, whose skeleton is ``expected``, for ``call`` with tensors of other sizes.

    None if a number cannot be fitted, or if the program does not do what ``model`` does. Peak memory is that of
    inference.
    """
    now = point_of(call, points[-1].s)
    if any(len(p.sizes) != len(now.sizes) for p in points):
        return None
    # A graph that TorchDynamo captured for one size is given no numbers, and one for any size its sizes.
    alike = all(len(p.numbers) == len(now.numbers) for p in points)
    *known, here = (p.sizes + p.numbers * alike for p in (*points, now))
    fit = Fit(known, here, len(now.numbers) * alike)
    seen = list(zip(*(numbers_of(p.s.d) for p in points), strict=True))
    every, again = [fit(x) for x in seen], repeated_in(points[-1].s.d)
    run: ModuleRun | None = None
    doubtful = sorted({x[-1] for x, y, twice in zip(seen, every, again, strict=True) if twice and y != x[-1]})
    for constant in ((), *((x,) for x in doubtful[:2]), doubtful) if doubtful else ((),):
        numbers = [x[-1] if twice and x[-1] in constant else y for x, y, twice in zip(seen, every, again, strict=True)]
        if None in numbers:
            continue
        b = _with(points[-1].s.d, numbers)
        run = run or run_module(b, model, call)
        graph = None if run.outputs is None else _given(points[-1].s, b, expected, model, call, run)
        if graph is not None:
            return graph
    return None


def _with(d: D_graph, numbers: Sequence[Any]) -> B_graph:
    """The program of ``d`` with these numbers."""
    left = iter(numbers)
    nodes = tuple(with_numbers(node, left) for node in d.nodes)
    constants = tuple((k, next(left) if may_be_size(c) else c) for k, c in d.structure.output_constants)
    structure = dataclasses.replace(d.structure, output_constants=constants)
    return B_graph(d.names, d.sources, nodes, d.outputs, structure, d.notes)


def _given(
    last: S_graph, b: B_graph, expected: Hashable, model: torch.nn.Module, call: Call, run: ModuleRun
) -> S_graph | None:
    """The graph ``last`` with the numbers of ``b``; None if ``model`` does something else on ``call``, in ``run``.

    A wrong number may ask for more memory than there is, so nothing runs whose result is larger than all of the module.
    """

    def allowed(node: Node, value: Callable[[int], Any]) -> bool:
        return bytes_of_results(node, value) <= run.ran.largest

    try:
        with OperatorCount() as ours:
            probed = probe(b, model, call.tensors, labelled=True, allowed=allowed)
    except (GuardFailed, GraphError, RuntimeError, ValueError, TypeError, LookupError):
        return None
    graph = _with_sizes(last, probed.graph)
    if graph is None or skeleton(graph) != expected or not same_as_module(b, model, call, run, probed, ours):
        return None
    return graph


def _with_sizes(s: S_graph, d: D_graph) -> S_graph | None:
    """``s`` with the numbers and sizes of ``d``, which has the same nodes and may number storages in another order.

    None if other values share memory in ``d``.
    """
    old = s.d
    if len(d.nodes) != len(old.nodes) or d.values.keys() != old.values.keys():
        return None
    number = {d.values[v].storage: old.values[v].storage for v in d.values}
    if any(number[d.values[v].storage] != old.values[v].storage for v in d.values):
        return None
    if len(set(number.values())) != len(number):
        return None

    def known(saved: Saved) -> Saved:
        return Saved(tuple(number[x] for x in saved.storages), saved.private)

    storages = list(old.storages)
    for x, mine in number.items():
        if (d.storages[x].owner, d.storages[x].source) != (storages[mine].owner, storages[mine].source):
            return None
        storages[mine] = Storage(d.storages[x].bytes, storages[mine].owner, storages[mine].source)
    values, facts = d.values, d.facts
    if any(x != mine for x, mine in number.items()):
        values = {v: dataclasses.replace(x, storage=number[x.storage]) for v, x in values.items()}
        facts = tuple(
            dataclasses.replace(
                x, writes=tuple(number[w] for w in x.writes), saved=known(x.saved), context=known(x.context)
            )
            for x in facts
        )
    new = dataclasses.replace(
        old, nodes=d.nodes, structure=d.structure, values=values, storages=tuple(storages), facts=facts
    )
    return dataclasses.replace(s, d=new, nodes=tuple(_with_private(n, new) for n in s.nodes))


def _with_private(node: S_node, d: D_graph) -> S_node:
    """``node`` with the bytes of its private saved tensors in ``d``."""
    mine = {x for op in node.ops for v in d.nodes[op].outputs for x in [d.values[v].storage]}
    known = dict.fromkeys(x for op in node.ops for x in d.facts[op].saved.storages)
    inner = [
        d.storages[x].bytes for x in known if x in mine and x not in node.storages and d.storages[x].owner in node.ops
    ]
    private = tuple(b for op in node.ops for b in d.facts[op].saved.private) + tuple(inner)
    if private == node.saved.private:
        return node
    return dataclasses.replace(node, saved=Saved(node.saved.storages, private))
