"""B: the module as the program that torch.jit records, each assignment one node.

torch.jit.trace gives the same graph, but bakes parameters in as attributes and loses the grad mode;
here parameters, buffers and captured tensors are inputs of the trace, so a tied weight is one value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rkgb.capture import preserved, record
from rkgb.errors import TraceError, UnsupportedError
from rkgb.graphs import B_graph, Mode, Node, Ref, Source, Structure, refs

# Results that Python reads from a tensor's shape, not its data: their operations run when the graph is built.
PRIMITIVES: dict[str, Callable[..., Any]] = {
    "NumToTensor": torch.tensor,
    "ScalarImplicit": lambda t: t.item(),
    "IntImplicit": int,
    "FloatImplicit": float,
    "Int": int,
    "Float": float,
    "Bool": bool,
    "device": lambda t: t.device,
    "dtype": lambda t: t.dtype,
    "data": lambda t: t.data,
    "size": lambda t, dim=None: list(t.shape) if dim is None else t.shape[dim],
}
_INLINE = ("prim::ListConstruct", "prim::TupleConstruct")
_UNPACK = ("prim::ListUnpack", "prim::TupleUnpack")


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call, flattened: the graph's inputs, in order."""
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def make_B(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> B_graph:
    """Trace ``model(*args, **kwargs)``; buffers, inputs and random state are as before afterwards. See ``trace``."""
    return trace(model, args, kwargs or {})[0]


def trace(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[B_graph, list[torch.Tensor]]:
    """The B graph of ``model(*args, **kwargs)``, and the outputs of the module itself on this sample.

    The module runs once, traced, with gradients on but nothing saved for backward; a second time where
    it uses tensors that are neither inputs nor its own, which the trace must know of. Raises
    ``TraceError`` where the module's Python reads data from tensors, ``UnsupportedError`` where torch.jit
    cannot follow.
    """
    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    own = _named_tensors(model)
    structure: list[Structure] = []

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        feed = iter(tensors[: len(inputs)])
        filled = [next(feed) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        a, k = pytree.tree_unflatten(filled, in_spec)
        results, out_spec = pytree.tree_flatten(model(*a, **k))
        structure.append(Structure(in_spec, _constants(leaves), out_spec, _constants(results)))
        return [leaf for leaf in results if isinstance(leaf, torch.Tensor)]

    known = [*inputs, *own.values()]
    with preserved(model, inputs):
        graph, seen, results = record(run, known)
    captured = [t for t in seen.captured if t.is_leaf]
    if captured:
        with preserved(model, inputs):
            graph, seen, results = record(run, [*known, *captured])
    if seen.host_reads:
        raise TraceError(
            f"the module reads the value of a tensor while it runs ({seen.host_reads[0]}); a trace would keep the "
            "value of the sample for ever. Wrap the submodules around that line instead of the whole module."
        )
    sources = [Source("input", k) for k in range(len(inputs))] + [
        Source("parameter" if isinstance(t, torch.nn.Parameter) else "buffer", name) for name, t in own.items()
    ]
    sources += [Source("constant", t) for t in captured]
    b = _Reader(graph, sources, list(seen.calls)).read(len(results), structure[-1])
    return b, [t.detach() for t in results]


def _named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by qualified name; a tensor under several names is listed once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _constants(leaves: Sequence[Any]) -> tuple[tuple[int, Any], ...]:
    return tuple((k, leaf) for k, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor))


class _Reader:
    """Reads the torch.jit graph into nodes."""

    def __init__(self, graph: Any, sources: list[Source], calls: list[tuple[Mode, str]]) -> None:
        self.graph, self.calls = graph, calls
        self.names: list[str] = []
        self.taken: dict[str, int] = {}
        self.env: dict[str, Any] = {}  # what stands for each jit value: a constant, a Ref, or a list of them
        self.nodes: list[Node] = []
        self.sources: dict[int, Source] = {}
        for value, source in zip(graph.inputs(), sources, strict=True):
            self.sources[self._define(value, _source_name(source))] = source

    def read(self, count: int, structure: Structure) -> B_graph:
        for node in self.graph.nodes():
            self._node(node)
        outputs = [self.env[v.debugName()] for v in self.graph.outputs()]
        flat = [i for out in outputs for i in refs(out)]
        used = set(flat).union(*(n.reads() for n in self.nodes))
        sources = {v: s for v, s in self.sources.items() if v in used or s.kind == "input"}
        b = B_graph(tuple(self.names), sources, tuple(self.nodes), tuple(flat[:count]), structure)
        b.verify()
        return b

    def _define(self, value: Any, name: str) -> int:
        again = self.taken.get(name, 0)
        self.taken[name] = again + 1
        self.names.append(f"{name}_{again}" if again else name)
        self.env[value.debugName()] = Ref(len(self.names) - 1)
        return len(self.names) - 1

    def _node(self, node: Any) -> None:
        kind = node.kind()
        outputs = list(node.outputs())
        inputs = [self.env[v.debugName()] for v in node.inputs()]
        mode, line = self._call(node.scopeName())
        if kind == "prim::Constant":
            self.env[outputs[0].debugName()] = _constant(node)
        elif kind in _INLINE:
            self.env[outputs[0].debugName()] = inputs if kind == _INLINE[0] else tuple(inputs)
        elif kind in _UNPACK and isinstance(inputs[0], (list, tuple)):
            for value, item in zip(outputs, inputs[0], strict=True):
                self.env[value.debugName()] = item
        elif kind in _UNPACK:
            self._unpack(inputs[0], outputs)
        else:
            op, args, kwargs = self._operation(node, kind, inputs, line)
            name = kind.split("::")[1]
            several = len(outputs) > 1
            made = tuple(self._define(v, name) for v in outputs)
            self.nodes.append(Node(op, name, args, kwargs, made, several, mode, line))

    def _unpack(self, ref: Ref, outputs: list[Any]) -> None:
        """The operation that returned the list defines its elements instead."""
        at = max(k for k, n in enumerate(self.nodes) if ref.index in n.outputs)
        node = self.nodes[at]
        if node.several:
            raise UnsupportedError(f"{node.name} at {node.line} returns nested lists")
        made = tuple(self._define(v, node.name) for v in outputs)
        self.nodes[at] = Node(node.op, node.name, node.args, node.kwargs, made, True, node.mode, node.line)

    def _call(self, scope: str) -> tuple[Mode, str]:
        marks = re.findall(r"@(\d+)@", scope)
        return self.calls[int(marks[-1])] if marks else (Mode(), "")

    def _operation(self, node: Any, kind: str, inputs: list[Any], line: str) -> tuple[Any, tuple[Any, ...], Any]:
        if kind == "prim::PythonOp":
            return _python_function(node), _python_arguments(node, inputs), ()
        if kind.split("::")[1] in PRIMITIVES:
            return PRIMITIVES[kind.split("::")[1]], tuple(inputs), ()
        text = node.schema()
        if text == "(no schema)":
            raise UnsupportedError(f"{kind} at {line} has no place in a graph: wrap the submodules around it instead")
        schema = torch._C.parse_schema(text)
        namespace, name = schema.name.split("::")
        packet = getattr(getattr(torch.ops, namespace), name)
        op = getattr(packet, schema.overload_name or "default")
        positional = tuple(a for a, s in zip(inputs, schema.arguments, strict=True) if not s.kwarg_only)
        keyword = tuple((s.name, a) for a, s in zip(inputs, schema.arguments, strict=True) if s.kwarg_only)
        return op, positional, keyword


def _source_name(source: Source) -> str:
    if source.kind == "input":
        return f"input{source.key}"
    return str(source.key) if source.kind != "constant" else "constant"


def _constant(node: Any) -> Any:
    # A 0-dim tensor read by t() keeps its "wrapped number" flag, which decides type promotion.
    if node.hasAttribute("value") and node.kindOf("value") == "t":
        return node.t("value")
    return node.output().toIValue()


def _python_function(node: Any) -> Callable[..., Any]:
    function = node.pyobj()
    owner = function if isinstance(function, type) else getattr(function, "__self__", None)
    apply: Callable[..., Any] = getattr(owner, "apply", function)
    return apply


def _python_arguments(node: Any, inputs: list[Any]) -> tuple[Any, ...]:
    tensors, scalars = iter(inputs), iter(node.scalar_args())
    return tuple(next(scalars) if kind == "c" else next(tensors) for kind in node.cconv())
