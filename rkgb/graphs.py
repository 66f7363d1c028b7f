"""The graphs: B (basic), D (data flow), S (simplified), as immutable values.

A *value* is what one assignment of the traced program defines; it is referred to by its index,
written ``Ref(i)``. Node arguments are constants, ``Ref``s, or lists and tuples of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from rkgb.notebook import Drawn
from rkgb.trace.code import Code


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of value ``index``."""

    index: int


@dataclass(frozen=True, slots=True)
class Mode:
    """The state of PyTorch that an operation runs in: grad mode, autocast per device type, kernels of attention.

    ``autocast`` is a tuple of (device type, dtype) of the device types for which it is on. ``attention`` is what
    ``torch.nn.attention.sdpa_kernel`` sets (see ``rkgb/trace/capture.py``), empty for what it was when rkgb was
    imported.
    """

    grad: bool = True
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    attention: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value comes from that no operation makes.

    ``kind`` is "input" (``key``: position among the flattened tensor inputs), "parameter" or "buffer" (``key``:
    qualified name; other attributes that hold a tensor count as buffers), or "constant" (``key``: the tensor itself).
    """

    kind: str
    key: Any


@dataclass(frozen=True, slots=True)
class Node:
    """One assignment: ``outputs = op(*args, **kwargs)``.

    ``several``: the operation returns a list or tuple, whose elements are the outputs.
    ``line``: the user's source line, "file.py:12". ``path``: the qualified name of the submodule that runs it, empty
    for the module itself. ``label``: the display name, from D on (see ``rkgb/probe/names.py``).
    """

    op: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[int, ...]
    several: bool
    mode: Mode
    line: str
    path: str = ""
    label: str = field(default="", compare=False)
    _reads: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = refs(self.args)
        for _, a in self.kwargs:
            found += refs(a)
        object.__setattr__(self, "_reads", tuple(dict.fromkeys(found)))

    def reads(self) -> tuple[int, ...]:
        """Indices of the values read, in order of first use."""
        return self._reads


def refs(arg: Any) -> list[int]:
    """The values that an argument refers to."""
    if isinstance(arg, Ref):
        return [arg.index]
    if isinstance(arg, (list, tuple)):
        return [v for a in arg if isinstance(a, (Ref, list, tuple)) for v in refs(a)]
    return []


def substitute(arg: Any, put: Callable[[int], Any]) -> Any:
    """``arg`` with every ``Ref(i)`` replaced by ``put(i)``."""
    if isinstance(arg, Ref):
        return put(arg.index)
    if isinstance(arg, (list, tuple)):
        return type(arg)(substitute(a, put) for a in arg)
    return arg


@dataclass(frozen=True)
class Structure:
    """What the module returns (a pytree spec; leaves that are no tensors are constants), and what it does beside.

    ``assigned``: buffers, by qualified name, that forward assigns anew; their values follow the outputs'.
    ``written``: parameters that forward changes, and attributes that hold tensors, which it may change.
    ``code``: the Python that ran. ``sets``: what modules' attributes hold that forward has set, by qualified name; from
    D on only numbers and text, which a plan sets too. ``stale``: those of them that another call sets otherwise, so
    that a plan leaves them stale.
    """

    outputs: Any
    output_constants: tuple[tuple[int, Any], ...]
    assigned: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    code: Code = field(default_factory=Code)
    sets: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    stale: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class B_graph(Drawn):
    """The traced program as it was recorded.

    Invariants: run in order it reproduces the module; each value is defined once, by a source or by
    one node before its first use; ``outputs`` lists the values returned. ``notes``: what people should
    know of how the module was read. ``shapes``: of tensors that nodes make, on the sample.
    """

    names: tuple[str, ...]
    sources: dict[int, Source]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    structure: Structure
    notes: tuple[str, ...] = ()
    shapes: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

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
        return format_program(self.names, self.nodes, self.outputs)


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of a tensor value after one run.

    ``storage`` indexes the graph's storages; values with the same storage share memory.
    ``requires_grad`` is the tensor's own answer. ``bytes`` is the tensor's, not the storage's.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    storage: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation. ``owner``: the node that allocates it, or None for inputs, parameters, buffers, constants."""

    bytes: int
    owner: int | None
    source: int | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """What autograd saves when a node runs: known storages, and those private to the node (bytes of each)."""

    storages: tuple[int, ...]
    private: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """What one run of a D node showed. ``writes``: storages changed in place; ``random``: it drew random numbers;
    ``unseen``: from a state that nobody can read or put back. ``context``: what an ``autograd.Function`` keeps as
    attributes.
    """

    writes: tuple[int, ...]
    random: bool
    saved: Saved
    unseen: bool = False
    context: Saved = Saved((), ())


@dataclass(frozen=True, repr=False)
class D_graph(Drawn):
    """The data-flow graph: every node is needed, sizes are folded to numbers, facts are known.

    Invariants: those of B; every node makes an output, a value that a later node reads, changes a
    buffer, draws random numbers or is a guard; every tensor value has its ``Value``, every node its ``Facts``.
    ``storage_names``: their display names. ``ran``: how often the module itself called each operator below
    autograd; empty if that is not known.
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
    ran: Mapping[str, int] = field(default_factory=dict, compare=False)

    @cached_property
    def first_value(self) -> dict[int, int]:
        """The first value that lies in each storage."""
        found: dict[int, int] = {}
        for v, info in sorted(self.values.items()):
            found.setdefault(info.storage, v)
        return found

    def verify(self) -> None:
        """Assert the invariants."""
        B_graph(self.names, self.sources, self.nodes, self.outputs, self.structure).verify()
        assert len(self.facts) == len(self.nodes)
        read = set(self.outputs).union(*(n.reads() for n in self.nodes))
        for node, facts in zip(self.nodes, self.facts, strict=True):
            used = set(node.outputs) & read or facts.writes or facts.random
            assert used or node.name == "guard", f"{node.name} is dead"

    def __str__(self) -> str:
        return format_program(self.names, self.nodes, self.outputs, self.values)


@dataclass(frozen=True, slots=True)
class S_node:
    """One real operation with its body: the views and in-place operations on its result; or a guard; or a view of
    another node's result that is taken much later.

    ``ops``: indices of D nodes, in the order of the program. ``reads``: values of other nodes or
    sources; ``makes``: values that other nodes read or that are outputs. ``storages``: those of
    ``makes`` that the node allocates. ``saved``: what its backward reads. ``fixed``: it runs once and
    is never run again (it changes a buffer, or needs no gradient and nothing with a gradient).
    ``name``: of the operation; ``label``: its display name, that of one of its operations.
    """

    name: str
    ops: tuple[int, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    storages: tuple[int, ...]
    saved: Saved
    requires_grad: bool
    random: bool
    fixed: bool
    label: str = ""


@dataclass(frozen=True, repr=False)
class S_graph(Drawn):
    """The simplified graph, over the D graph that it groups.

    Invariants: each D node is in exactly one S node; a node reads values of earlier nodes or of
    sources; no node changes memory of another's; ``blocks`` partition the nodes in order
    (one block until ``cut``); labels of nodes are unique.
    """

    d: D_graph
    nodes: tuple[S_node, ...]
    blocks: tuple[tuple[int, int], ...] = ()

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
        """The display names of sources and of what nodes make: the storage's where a node makes one value in it."""
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

    def __str__(self) -> str:
        starts = {a: k for k, (a, _) in enumerate(self.blocks)}
        lines = []
        for i, node in enumerate(self.nodes):
            if i in starts:
                lines.append(f"# block {starts[i]}")
            flags = "".join(f"  [{flag}]" for flag in ("random", "fixed") if getattr(node, flag)) + (
                "" if node.requires_grad else "  [no grad]"
            )
            saved = [self.d.storage_names[s] for s in node.saved.storages]
            private = [f"{b} bytes" for b in node.saved.private]
            makes, reads = (", ".join(self.shown[v] for v in values) for values in (node.makes, node.reads))
            lines.append(
                f"{makes or '()'} = {node.name}({reads})  # saves {', '.join(saved + private) or 'nothing'}{flags}"
            )
        return "\n".join([*lines, f"return {', '.join(self.shown[v] for v in self.d.outputs)}"])


def format_program(
    names: tuple[str, ...], nodes: tuple[Node, ...], outputs: tuple[int, ...], values: dict[int, Value] | None = None
) -> str:
    """The nodes as a readable program, one assignment a line, with the user's source line behind it."""

    def show(arg: Any) -> str:
        if isinstance(arg, Ref):
            return names[arg.index]
        if isinstance(arg, (list, tuple)):
            return "[" + ", ".join(show(a) for a in arg) + "]"
        if isinstance(arg, torch.Tensor):
            return f"tensor({arg.item()})" if arg.numel() == 1 else f"tensor{list(arg.shape)}"
        return str(arg)

    lines = []
    for node in nodes:
        arguments = [show(a) for a in node.args] + [f"{k}={show(a)}" for k, a in node.kwargs]
        left = ", ".join(names[v] for v in node.outputs) or "()"
        kind = ""
        if values and node.outputs and node.outputs[0] in values:
            v = values[node.outputs[0]]
            kind = f": {str(v.dtype)[6:]}{list(v.shape)}"
        name = str(node.op) if node.name == "guard" else node.name
        lines.append(f"{left}{kind} = {name}({', '.join(arguments)})" + (f"  # {node.line}" if node.line else ""))
    return "\n".join([*lines, f"return {', '.join(names[v] for v in outputs)}"])
