"""The graphs: B (basic), D (data flow), S (simplified), as immutable values.

Each says in ``made_by`` which passes made it, in order.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from rkgb.listing import annotation, format_program, header
from rkgb.nodes import (
    Facts,
    Mode,
    Node,
    Ref,
    S_node,
    Saved,
    Source,
    Storage,
    Value,
    refs,
    substitute,
)
from rkgb.notebook import Displayed

__all__ = [
    "B_graph",
    "D_graph",
    "Facts",
    "Mode",
    "Node",
    "Ref",
    "S_graph",
    "S_node",
    "Saved",
    "Source",
    "Storage",
    "Structure",
    "Value",
    "format_program",
    "refs",
    "substitute",
]


@dataclass(frozen=True)
class Structure:
    """What the module returns, and what its forward does to the module.

    ``outputs``: a pytree spec. ``output_constants``: (position, value) of the leaves that are no tensors.
    ``assigned``: qualified names of the buffers that forward replaces; their values follow the outputs.
    ``written``: parameters that forward changes in place, and attributes with tensors, which it may change.
    """

    outputs: Any
    output_constants: tuple[tuple[int, Any], ...]
    assigned: tuple[str, ...] = ()
    written: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class B_graph(Displayed):
    """The traced program as it was recorded.

    Invariants: its nodes, run in order, give the module's outputs; each value is defined once, by a source or by one
    node before its first use; ``outputs`` lists the values that the module returns.

    ``shapes`` and ``strides``: of the tensors that nodes make on the sample.
    """

    names: tuple[str, ...]
    sources: dict[int, Source]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    structure: Structure
    shapes: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    strides: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    made_by: tuple[str, ...] = field(default=(), compare=False)

    def verify(self) -> None:
        """Assert the invariants."""
        defined = set(self.sources)
        for node in self.nodes:
            missing = set(node.reads()) - defined
            assert not missing, f"{node.name} reads {[self.names[v] for v in missing]} before they are defined"
            assert not defined & set(node.outputs), f"{node.name} defines a value again"
            defined |= set(node.outputs)
        assert set(self.outputs) <= defined, "an output is never defined"

    def __str__(self) -> str:
        return f"{header('B', self.made_by)}\n{format_program(self.names, self.nodes, self.outputs)}"


@dataclass(frozen=True, repr=False)
class D_graph(Displayed):
    """The data-flow graph: B without dead nodes, with sizes as numbers, and with what one run showed.

    Invariants: those of B. Every node makes an output or a value that a later node reads, or changes a buffer, draws
    random numbers or is a guard. Every tensor has its ``Value``, every node its ``Facts``.

    ``notes``: sentences for the user about how the module was traced. ``storage_names``: the display names of the
    storages.
    """

    names: tuple[str, ...]
    sources: dict[int, Source]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    structure: Structure
    values: dict[int, Value]
    storages: tuple[Storage, ...]
    facts: tuple[Facts, ...]
    notes: tuple[str, ...] = ()
    storage_names: tuple[str, ...] = ()
    made_by: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def spoilt(self) -> frozenset[int]:
        """The values from which a backward raises an error: it would come to a node that is ``Facts.spoilt``."""
        found: set[int] = set()
        for node, facts in zip(self.nodes, self.facts, strict=True):
            if facts.spoilt or any(v in found for v in node.reads() if self.values[v].requires_grad):
                found.update(v for v in node.outputs if self.values[v].requires_grad)
        return frozenset(found)

    def verify(self) -> None:
        """Assert the invariants."""
        B_graph(self.names, self.sources, self.nodes, self.outputs, self.structure).verify()
        assert len(self.facts) == len(self.nodes)
        read = set(self.outputs).union(*(n.reads() for n in self.nodes))
        for node, facts in zip(self.nodes, self.facts, strict=True):
            used = set(node.outputs) & read or facts.writes or facts.random
            assert used or node.name == "guard", f"{node.name} is dead"

    def __str__(self) -> str:
        return f"{header('D', self.made_by)}\n{format_program(self.names, self.nodes, self.outputs, self.values)}"


@dataclass(frozen=True, repr=False)
class S_graph(Displayed):
    """The simplified graph: the nodes of D in groups that run, and are recomputed, together.

    Invariants: each D node is in exactly one S node; a node reads values of earlier nodes or of sources; no node
    changes memory that another node allocated; ``blocks``, as (first, behind the last), partition the nodes in order,
    and are one block until ``cut``; labels of nodes are unique.
    """

    d: D_graph
    nodes: tuple[S_node, ...]
    blocks: tuple[tuple[int, int], ...] = ()
    made_by: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def device(self) -> torch.device:
        """Where the graph runs. A model on another device than the CPU may have numbers there, too."""
        return next((v.device for v in self.d.values.values() if v.device.type != "cpu"), torch.device("cpu"))

    def verify(self) -> None:
        """Assert the invariants."""
        assert sorted(i for n in self.nodes for i in n.ops) == list(range(len(self.d.nodes)))
        owner: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            for v in node.reads:
                assert v in owner or v in self.d.sources, f"{node.name} reads {self.d.names[v]} too early"
            for op in node.ops:
                owner.update(dict.fromkeys(self.d.nodes[op].outputs, index))
            mine = {self.d.values[v].storage for op in node.ops for v in self.d.nodes[op].outputs if v in self.d.values}
            for op in node.ops:
                for s in self.d.facts[op].writes:
                    assert s in mine or self.d.storages[s].owner is None, f"{node.name} writes another node's memory"
        ends = [0, *(stop for _, stop in self.blocks)]
        assert list(itertools.pairwise(ends)) == list(self.blocks)
        assert not self.blocks or ends[-1] == len(self.nodes)
        assert len({node.label for node in self.nodes}) == len(self.nodes), "two nodes have one label"

    @cached_property
    def shown(self) -> dict[int, str]:
        """The display names of sources and of values that nodes make.

        A value that is the only one that its node makes in a storage has the storage's name.
        """
        names = {v: self.d.names[v] for v in self.d.sources}
        for node in self.nodes:
            of_storage = [self.d.values[v].storage for v in node.makes]
            for v, storage in zip(node.makes, of_storage, strict=True):
                alone = of_storage.count(storage) == 1 and storage in node.storages
                names[v] = self.d.storage_names[storage] if alone else self.d.names[v]
        return names

    def with_blocks(self, blocks: tuple[tuple[int, int], ...]) -> S_graph:
        """The same graph, cut into ``blocks``."""
        return dataclasses.replace(self, blocks=blocks)

    def usual_label(self, i: int) -> str:
        """The label that most nodes have: the name of what node i makes; empty if it makes nothing."""
        node = self.nodes[i]
        if node.storages:
            return self.d.storage_names[node.storages[0]]
        return self.shown[node.makes[0]] if node.makes else ""

    def main(self, i: int) -> Node:
        """The operation that node i is named after."""
        ops = [self.d.nodes[op] for op in self.nodes[i].ops]
        return next((op for op in ops if op.label == self.nodes[i].label), ops[0])

    def __str__(self) -> str:
        """The graph as text, which ``rkgb.Stools.parse_S`` reads back."""
        return "\n".join(_text_of_S(self))


def _text_of_S(s: S_graph) -> Iterator[str]:
    devices = Counter(value.device for value in s.d.values.values())
    device = devices.most_common(1)[0][0] if devices else torch.device("cpu")
    yield header("S", s.made_by) + (f", on {device}" if device.type != "cpu" else "")
    told: set[int] = set()  # storages that the text has named

    def defined(v: int, grad: bool) -> str:
        value, name = s.d.values[v], s.shown[v]
        storage, memory = s.d.storage_names[value.storage], s.d.storages[value.storage]
        new = value.storage not in told
        told.add(value.storage)
        size = memory.bytes if new and memory.bytes != value.bytes else None
        grad = grad and (value.dtype.is_floating_point or value.dtype.is_complex)
        return f"{name}: {annotation(value, grad, storage if storage != name else '', size, device)}"

    for v, source in sorted(s.d.sources.items()):
        given = f" {source.key}" if source.kind == "input" else ""
        yield f"{defined(v, source.kind == 'parameter')} = {source.kind}{given}"
    starts = {start: f"# block {b}" for b, (start, _) in enumerate(s.blocks)}
    for i, node in enumerate(s.nodes):
        if i in starts:
            yield starts[i]
        makes = ", ".join(defined(v, node.requires_grad) for v in node.makes) or "()"
        label = "" if node.label == s.usual_label(i) else f"{node.label}: "
        comment = "; ".join(_facts_of(s, i))
        reads = ", ".join(s.shown[v] for v in node.reads)
        yield f"{makes} = {label}{node.name}({reads})" + (f"  # {comment}" if comment else "")
    yield f"return {', '.join(s.shown[v] for v in s.d.outputs)}"


def _facts_of(s: S_graph, i: int) -> Iterator[str]:
    """The comment on node i in the text."""
    node = s.nodes[i]
    facts = [s.d.facts[op] for op in node.ops]

    def memory(storages: Iterable[int], private: Iterable[int]) -> str:
        return ", ".join([*(s.d.storage_names[x] for x in storages), *(f"{size} bytes" for size in private)])

    yield from filter(None, [s.main(i).line])
    if saved := memory(node.saved.storages, node.saved.private):
        yield f"saves {saved}"
    contexts = [f.context for f in facts]
    if kept := memory((x for c in contexts for x in c.storages), (size for c in contexts for size in c.private)):
        yield f"keeps {kept}"
    written = dict.fromkeys(x for f in facts for x in f.writes if s.d.storages[x].owner is None)
    if written:
        yield f"writes {memory(written, ())}"
    spoilt = any(f.spoilt for f in facts)
    flags = {"random": node.random, "fixed": node.fixed, "no grad": not node.requires_grad, "spoilt": spoilt}
    yield from (flag for flag, holds in flags.items() if holds)
