"""``parse_S`` reads the text of an S graph back, so that passes can be tested without a model.

A text has one line for each source, then one for each node, in order, and at its end the outputs::

    # S, made by hand
    x: float32[4, 8] = input 0
    w: float32[8, 8] = parameter
    # block 0
    up: float32[4, 8] = linear(x, w)  # model.py:12; saves x, w
    act: float32[4, 8] = relu(up)  # saves act, 16 bytes; random
    return act

A value has its type and shape. Attributes follow if they differ from the default in parentheses: ``strides [...]``
(contiguous), ``in`` a storage (the value's own name), ``of ... bytes`` (the value's), ``on`` a device (the header's),
``grad`` or ``no grad`` (a parameter has ``grad``, as has a floating-point result of a node without ``no grad``).

A node's label is the name of what it makes. Another label stands before the operation: ``() = bn.add: add_(...)``. The
comment has, separated by semicolons, the source line, what autograd ``saves``, what an ``autograd.Function`` ``keeps``
in its ``ctx``, the sources that the node ``writes``, and the flags ``random``, ``fixed`` and ``no grad``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rkgb.errors import GraphError
from rkgb.graphs import D_graph, Facts, Mode, Node, Ref, S_graph, S_node, Saved, Source, Storage, Structure, Value

_NAME = r"[^\s,:()]+"
_VALUE = re.compile(
    rf"(?P<name>{_NAME}): (?P<dtype>\w+)\[(?P<shape>[\d, ]*)\](?: strides \[(?P<strides>[\d, ]*)\])?"
    rf"(?: in (?P<storage>{_NAME}))?(?: of (?P<bytes>\d+) bytes)?(?: on (?P<device>[^\s,]+))?"
    r"(?: (?P<grad>(?:no )?grad))?"
)
_SOURCE = re.compile(rf"(?P<value>{_VALUE.pattern}) = (?P<kind>input (?P<key>\d+)|parameter|buffer|constant)")
_NODE = re.compile(
    rf"(?P<makes>.*?) = (?:(?P<label>{_NAME}): )?(?P<op>[^\s(]+)\((?P<reads>[^()]*)\)(?:  # (?P<comment>.*))?"
)
_HEADER = re.compile(r"# S, made by (?P<by>.*?)(?:, on (?P<device>\S+))?")
_FLAGS = ("random", "fixed", "no grad", "spoilt")


class TextError(GraphError):
    """A text is not that of an S graph; the message has the line and the reason."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The operation of a node that was read from text. It has a name, and cannot be run."""

    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise GraphError(f"{self.name} was read from text, and cannot be run")

    def __str__(self) -> str:
        return self.name


def parse_S(text: str) -> S_graph:
    """The S graph with this text: ``str(parse_S(str(s))) == str(s)``.

    Each node has one operation, which cannot be run, and no values but those that the text names. The keys of
    parameters, buffers and constants are their names. Raises ``TextError`` for a line that cannot be read.
    """
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            reader.line(line.strip())
        except (ValueError, AttributeError) as error:
            raise TextError(f"line {number}: {error}: {line.strip()!r}") from error
    return reader.graph()


class _Reader:
    """Collects the graph, line by line."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}  # of values
        self.storage_names: dict[str, int] = {}
        self.values: list[Value] = []
        self.storages: list[Storage] = []
        self.sources: dict[int, Source] = {}
        self.ops: list[Node] = []
        self.facts: list[Facts] = []
        self.nodes: list[S_node] = []
        self.starts: list[int] = []
        self.made_by: tuple[str, ...] = ()
        self.device = torch.device("cpu")
        self.outputs: tuple[int, ...] | None = None

    def line(self, line: str) -> None:
        if not line:
            return
        if self.outputs is not None:
            raise ValueError("nothing comes behind the outputs")
        if match := _HEADER.fullmatch(line):
            self.made_by = (match["by"],)
            self.device = torch.device(match["device"] or "cpu")
        elif line == f"# block {len(self.starts)}":
            self.starts.append(len(self.nodes))
        elif line == "return" or line.startswith("return "):
            self.outputs = self._known(line.removeprefix("return"))
        elif match := _SOURCE.fullmatch(line):
            v = self._value(match, None, match["kind"] == "parameter")
            kind = match["kind"].split()[0]
            self.sources[v] = Source(kind, int(match["key"]) if kind == "input" else match["name"])
        elif match := _NODE.fullmatch(line):
            self._node(match)
        else:
            raise ValueError("this is neither a source nor a node")

    def _node(self, match: re.Match[str]) -> None:
        said = list(filter(None, (match["comment"] or "").split("; ")))
        flags, i = [part for part in said if part in _FLAGS], len(self.nodes)
        reads, before = self._known(match["reads"]), len(self.storages)
        grad = "no grad" not in flags
        makes = tuple(self._value(x, i, grad) for x in self._definitions(match["makes"]))
        own = tuple(range(before, len(self.storages)))
        saved, kept, written = (self._memory(said, verb) for verb in ("saves", "keeps", "writes"))
        lines = [x for x in said if x not in flags and x.split()[0] not in ("saves", "keeps", "writes")]
        usual = list(self.storage_names)[own[0]] if own else list(self.names)[makes[0]] if makes else ""
        label = match["label"] or usual
        random, args = "random" in flags, tuple(map(Ref, reads))
        drawn = (self.values[next(iter((*makes, *reads)))].device,) if random else ()
        line = lines[0] if lines else ""
        op = match["op"]
        self.ops.append(Node(Unknown(op), op, args, (), makes, len(makes) > 1, Mode(), line, label=label))
        self.facts.append(Facts(written.storages, drawn, saved, context=kept, spoilt="spoilt" in flags))
        self.nodes.append(S_node(op, (i,), reads, makes, own, saved, grad, random, "fixed" in flags, label))

    def _definitions(self, text: str) -> Iterator[re.Match[str]]:
        matches = list(_VALUE.finditer(text))
        if ", ".join(x[0] for x in matches) != text and text != "()":
            raise ValueError(f"{text!r} does not define values")
        return iter(matches)

    def _value(self, match: re.Match[str], owner: int | None, grad: bool) -> int:
        name, dtype = match["name"], getattr(torch, match["dtype"])
        if name in self.names:
            raise ValueError(f"{name} is defined again")
        v, shape = len(self.values), _numbers(match["shape"])
        stride = torch.empty(shape, device="meta").stride() if match["strides"] is None else _numbers(match["strides"])
        size = prod(shape) * dtype.itemsize
        storage = match["storage"] or name
        if storage not in self.storage_names:
            self.storage_names[storage] = len(self.storages)
            self.storages.append(Storage(int(match["bytes"] or size), owner, v if owner is None else None))
        carries = match["grad"] == "grad" if match["grad"] else grad and (dtype.is_floating_point or dtype.is_complex)
        device = torch.device(match["device"] or self.device)
        self.values.append(Value(shape, tuple(stride), dtype, device, carries, self.storage_names[storage], size))
        self.names[name] = v
        return v

    def _known(self, text: str) -> tuple[int, ...]:
        return tuple(_found(name, self.names) for name in filter(None, text.strip().split(", ")))

    def _memory(self, said: list[str], verb: str) -> Saved:
        """Storages, and bytes of memory that has no name."""
        parts = [x for part in said if part.startswith(f"{verb} ") for x in part.removeprefix(f"{verb} ").split(", ")]
        private = [x for x in parts if re.fullmatch(r"\d+ bytes", x)]
        known = tuple(_found(x, self.storage_names) for x in parts if x not in private)
        return Saved(known, tuple(int(x.split()[0]) for x in private))

    def graph(self) -> S_graph:
        if self.outputs is None:
            raise TextError("the text has no line of outputs: return ...")
        d = D_graph(
            tuple(self.names),
            self.sources,
            tuple(self.ops),
            self.outputs,
            Structure(pytree.tree_structure(((0,) * len(self.outputs), {})), ()),
            dict(enumerate(self.values)),
            tuple(self.storages),
            tuple(self.facts),
            storage_names=tuple(self.storage_names),
            made_by=self.made_by,
        )
        ends = [*self.starts, len(self.nodes)]
        s = S_graph(d, tuple(self.nodes), tuple(itertools.pairwise(ends)), self.made_by)
        d.verify()
        s.verify()
        return s


def _found(name: str, known: dict[str, int]) -> int:
    if name not in known:
        raise ValueError(f"{name} is not defined")
    return known[name]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(",") if x.strip())
