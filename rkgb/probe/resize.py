"""The graph of a captured program at other sizes.

What TorchDynamo captured holds for all sizes that its guards let pass. At other sizes it is traced on the meta device,
where nothing is computed, and probed there: shapes, strides, storages and what autograd saves are known there, too.
What data alone shows (random draws) is that of the sizes at which the program ran, which is the same graph.

Kernels of a device may save or allocate otherwise. So both are compared once with the graph at sizes at which it ran.
Where only the trace is the same, a run of the program, without the module's, shows the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from rkgb.blocks.simplify import saved_by
from rkgb.Btools import trace_of_any_size, trace_without_data
from rkgb.Dtools import probe_again
from rkgb.graphs import B_graph, D_graph, Facts, Node, Ref, S_graph, Saved, Value, substitute
from rkgb.probe.skeleton import content, skeleton, source_form
from rkgb.sample import Call
from rkgb.trace.distinct import DistinctCalls
from rkgb.trace.meta import node_on
from rkgb.trees import map_tensors

_Graph = TypeVar("_Graph", B_graph, D_graph)


def program_without_data(
    model: torch.nn.Module, call: Call, device: torch.device, calls: DistinctCalls | None = None
) -> B_graph | None:
    """B of ``call`` of a program ``model``, both on the meta device, which stands for ``device``. ``calls``: where to
    note what is called.

    None where that takes data: operators that have no rule for sizes alone, and sizes that follow from values.
    """
    return _unless_refused(lambda: trace_without_data(model, call, device, calls))


def _unless_refused(make: Callable[[], _Graph]) -> _Graph | None:
    try:
        return make()
    except Exception:  # noqa: BLE001 - torch's rules for sizes, and functions of the user's, may raise anything
        return None


def program_of_any_size(model: torch.nn.Module, call: Call, device: torch.device) -> B_graph | None:
    """The same, which serves for calls of all sizes. None where Python does otherwise with sizes than pass them on to
    operations, so that the program has those of now.
    """
    return _unless_refused(lambda: trace_of_any_size(model, call, device))


def graph_without_data(b: B_graph, model: torch.nn.Module, call: Call, device: torch.device) -> D_graph | None:
    """D of ``b``, which ``program_without_data`` returned for the same ``call``, or ``program_of_any_size`` for one of
    another size; None where that takes data.
    """
    return _unless_refused(lambda: probe_again(b, model, call.tensors, device, call.numbers))


def graph_of_a_run(b: B_graph, model: torch.nn.Module, call: Call, device: torch.device) -> D_graph:
    """D of ``b``, which ``program_without_data`` returned, from a run on ``call`` on ``device``."""
    return probe_again(on_device(b, device), model, call.tensors)


def on_device(b: B_graph, device: torch.device) -> B_graph:
    """``b``, a trace on the meta device, with ``device`` in its place."""
    return dataclasses.replace(b, nodes=tuple(node_on(n, device) for n in b.nodes))


def is_same_program(meta: B_graph, b: B_graph, device: torch.device) -> bool:
    """Whether ``meta``, a trace on the meta device that stands for ``device``, is ``b``; numbers of values aside."""
    if len(meta.nodes) != len(b.nodes) or len(meta.sources) != len(b.sources):
        return False
    value = dict(zip(sorted(meta.sources), sorted(b.sources), strict=True))
    for m, n in zip(on_device(meta, device).nodes, b.nodes, strict=True):
        if (m.name, m.several, len(m.outputs), m.mode) != (n.name, n.several, len(n.outputs), n.mode):
            return False
        if _given(m, value) != _given(n, {v: v for v in n.reads()}):
            return False
        value.update(zip(m.outputs, n.outputs, strict=True))
    return tuple(value[v] for v in meta.outputs) == b.outputs


def _given(node: Node, value: dict[int, int]) -> Any:
    """The arguments of a node, with these numbers for the values that it reads."""
    arguments = substitute((node.args, node.kwargs), lambda v: Ref(value[v]))
    return map_tensors(arguments, content)


def resized(s: S_graph, expected: Hashable, d: D_graph) -> S_graph | None:
    """``s``, whose skeleton is ``expected``, with the numbers and sizes of ``d``; None if ``d`` is another graph."""
    found = _with_sizes(s, d) if has_operations_of(s, d) else None
    return found if found is not None and skeleton(found) == expected else None


def has_operations_of(s: S_graph, d: D_graph) -> bool:
    """Whether ``d`` calls the operations of ``s`` and starts from as many values, so that it may be the same graph."""
    return len(d.sources) == len(s.d.sources) and has_names_of(d, s.d)


def has_names_of(a: B_graph | D_graph, b: B_graph | D_graph) -> bool:
    """Whether two graphs call the same operations, in order."""
    return [node.name for node in a.nodes] == [node.name for node in b.nodes]


def is_same(a: S_graph, b: S_graph) -> bool:
    """Whether two graphs of one skeleton have the same sizes, and give operations the same arguments."""
    return (
        same_constants(a, b)
        and a.d.values == b.d.values
        and a.d.storages == b.d.storages
        and [f.saved for f in a.d.facts] == [f.saved for f in b.d.facts]
    )


def same_constants(a: S_graph, b: S_graph) -> bool:
    """Whether two sizes of a graph run the very same operations: no constant depends on the sizes that differ."""

    pairs = zip(a.d.nodes, b.d.nodes, strict=True)
    return all(map_tensors((m.args, m.kwargs), content) == map_tensors((n.args, n.kwargs), content) for m, n in pairs)


def _with_sizes(s: S_graph, d: D_graph) -> S_graph | None:
    """``s`` with the numbers and sizes of ``d``, which has as many nodes and may number values and storages otherwise.

    None if it starts from other parameters, buffers or inputs, or other values share memory in it.
    """
    old = s.d
    value = _numbers_of_values(old, d)
    if value is None or any(source_form(x) != source_form(old.sources[value[v]]) for v, x in d.sources.items()):
        return None
    number = {x.storage: old.values[value[v]].storage for v, x in d.values.items()}
    if any(number[x.storage] != old.values[value[v]].storage for v, x in d.values.items()):
        return None
    if len(set(number.values())) != len(number):
        return None
    storages = list(old.storages)
    for x, mine in number.items():
        if d.storages[x].owner != storages[mine].owner:
            return None
        storages[mine] = dataclasses.replace(storages[mine], bytes=d.storages[x].bytes)

    def known(saved: Saved) -> Saved:
        return Saved(tuple(number.get(x, -1) for x in saved.storages), saved.private)

    def with_saved(facts: Facts, saved: Saved, context: Saved) -> Facts:
        same = saved == facts.saved and context == facts.context
        return facts if same else dataclasses.replace(facts, saved=saved, context=context)

    def in_storage(x: Value, mine: int) -> Value:
        return x if x.storage == mine else dataclasses.replace(x, storage=mine)

    new = dataclasses.replace(
        old,
        nodes=tuple(b.with_values(lambda v: Ref(value[v]), a) for a, b in zip(old.nodes, d.nodes, strict=True)),
        outputs=tuple(value[v] for v in d.outputs),
        structure=dataclasses.replace(old.structure, output_constants=d.structure.output_constants),
        values={value[v]: in_storage(x, number[x.storage]) for v, x in d.values.items()},
        storages=tuple(storages),
        facts=tuple(
            with_saved(before, known(x.saved), known(x.context)) for x, before in zip(d.facts, old.facts, strict=True)
        ),
    )
    saved = (Saved(n.saved.storages, saved_by(new, n.ops, n.storages).private) for n in s.nodes)
    nodes = tuple(dataclasses.replace(n, saved=x) for n, x in zip(s.nodes, saved, strict=True))
    return dataclasses.replace(s, d=new, nodes=nodes)


def _numbers_of_values(old: D_graph, d: D_graph) -> dict[int, int] | None:
    """The numbers in ``old`` of the values of ``d``; None if others are made."""
    made = [(a.outputs, b.outputs) for a, b in zip(d.nodes, old.nodes, strict=True)]
    made.append((tuple(sorted(d.sources)), tuple(sorted(old.sources))))
    if any(len(theirs) != len(ours) for theirs, ours in made):
        return None
    value = {v: w for theirs, ours in made for v, w in zip(theirs, ours, strict=True)}
    return value if d.values.keys() <= value.keys() and len(d.values) == len(old.values) else None
