"""B: the module as the program that torch.jit records, one node for each assignment.

``torch.jit.trace`` would make parameters attributes of the graph and lose the grad mode. Here parameters, buffers and
captured tensors are inputs of the traced function, so that a tied weight is one value.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from rkgb.errors import UnsupportedError
from rkgb.graphs import B_graph, Node, Ref, Source, Structure, refs
from rkgb.randomness import own_generators
from rkgb.sample import Call, Sample, call_of, check_module
from rkgb.trace.capture import GIVEN_MEMORY, HostRead, RecordedCall, Recorder, call_in, module_in
from rkgb.trace.distinct import DistinctCalls
from rkgb.trace.meta import OnMeta
from rkgb.trace.other_draws import other_draws
from rkgb.trace.preserved import Buffers, preserved
from rkgb.trace.record import record
from rkgb.trace.respelled import constant, data_of
from rkgb.trace.tracer import outside_vmap
from rkgb.trees import flatten, map_tensors

# Python reads these results from a tensor's shape, not from its data. D computes them once and keeps the numbers.
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
    "data": data_of,
    "size": lambda t, dim=None: list(t.shape) if dim is None else t.shape[dim],
}
_INLINE = ("prim::ListConstruct", "prim::TupleConstruct")
_UNPACK = ("prim::ListUnpack", "prim::TupleUnpack")


def make_B(model: torch.nn.Module, sample: Sample, sample_kwargs: dict[str, Any] | None = None) -> B_graph:
    """Trace ``model`` on ``sample``. Buffers, inputs and random state are restored. Errors: see ``trace``."""
    return trace(model, call_of(sample, sample_kwargs))[0]


def trace(model: torch.nn.Module, call: Call) -> tuple[B_graph, list[torch.Tensor]]:
    """The B graph of ``call``, and the outputs of the module itself on this sample.

    The module runs once under the tracer, in grad mode, with no tensor saved for backward. It runs again if it uses
    tensors that are neither inputs nor its own: these must be inputs of the trace. A value that its Python reads from a
    tensor becomes a guard.

    Raises:
        UnsupportedError: the tracer cannot record what the module does.
        TypeError: ``model`` is no module.
    """
    check_module(model)
    if any(t.is_meta for t in (*call.tensors, *_named_tensors(model).values())):
        raise UnsupportedError(
            "a parameter, buffer or input is on the meta device, where nothing can be run and measured: move the model "
            "to a device (model.to_empty(device=...)), give it its weights, and make the sample there"
        )
    return _traced(model, call)[:2]


def trace_without_data(
    model: torch.nn.Module, call: Call, device: torch.device, calls: DistinctCalls | None = None
) -> B_graph:
    """The B graph of ``call`` of a program ``model``, both on the meta device, which stands for ``device`` everywhere.

    Nothing is computed. ``calls``: where to note what is called. Raises what ``trace`` raises, and what torch raises
    for operations that need data.
    """
    return _traced(model, call, OnMeta(device, calls))[0]


def trace_of_any_size(model: torch.nn.Module, call: Call, device: torch.device) -> B_graph:
    """The same, with whole numbers among the arguments as values, so that it is the B graph at each size.

    Raises ``UnsupportedError``, too, where Python reads sizes or numbers, or is given others than whole ones: the graph
    would have those of now.
    """
    if any(leaf is not None and type(leaf) is not int and not isinstance(leaf, torch.Tensor) for leaf in call.leaves):
        raise UnsupportedError("numbers that are not whole are among the arguments")
    given = call.with_numbers_as_tensors()
    b, _, seen = _traced(model, given, OnMeta(device, of_any_size=True))
    if seen.sizes_read or any(isinstance(x, int) for _, x in b.structure.output_constants):
        raise UnsupportedError("Python reads sizes")
    inputs = (leaf for leaf in call.leaves if leaf is not None)
    numbers = [k for k, leaf in enumerate(inputs) if type(leaf) is int]

    def source(s: Source) -> Source:
        if s.kind != "input":
            return s
        before = bisect_left(numbers, s.key)
        return Source("number", before) if s.key in numbers else Source("input", s.key - before)

    return replace(b, sources={v: source(s) for v, s in b.sources.items()})


def _traced(
    model: torch.nn.Module, call: Call, on_meta: OnMeta | None = None
) -> tuple[B_graph, list[torch.Tensor], Recorder]:
    forward = _Forward(model, call)
    own = _named_tensors(model)
    graph, results, seen, captured = _recorded(forward, [*forward.inputs, *own.values()], on_meta)
    sources = [Source("input", k) for k in range(len(forward.inputs))] + [
        Source("parameter" if isinstance(t, torch.nn.Parameter) else "buffer", name) for name, t in own.items()
    ]
    held = _held(model, captured)
    sources += [Source("buffer", held[id(t)]) if id(t) in held else Source("constant", t) for t in captured]
    written = (*(name for name, t in own.items() if seen.written.changed(t)), *held.values())
    structure = replace(forward.structure, written=written)
    b = _Reader(graph, sources, list(seen.calls)).read(len(results), structure, seen.reads)
    made_by = ("trace of a captured graph" if is_pure(model) else "trace",)
    return replace(b, made_by=made_by), [t.detach() for t in results], seen


class _Forward:
    """``call`` of ``model`` as a function from tensors to tensors, which is what a tracer records.

    ``inputs``: the tensors among the arguments. Each call sets ``structure``: what the module returned and
    assigned.
    """

    structure: Structure

    def __init__(self, model: torch.nn.Module, call: Call) -> None:
        self.model, self.call, self.inputs = model, call, call.tensors

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """The outputs for inputs that ``tensors`` begin with, then the buffers that the module has assigned anew."""
        feed = iter(tensors[: len(self.inputs)])
        call = self.call.with_tensors(lambda _: next(feed))
        if is_pure(self.model):
            results, spec = flatten(self.model(*call.args, **call.kwargs))
            self.structure = Structure(spec, _constants(results))
            return [leaf for leaf in results if isinstance(leaf, torch.Tensor)]
        before = Buffers(self.model)
        with other_draws() as drawn:
            returned = self.model(*call.args, **call.kwargs)
        if drawn:
            raise UnsupportedError(
                f"the module draws from {drawn[0]} while it runs, and a graph has the sample's draw for ever. "
                "Draw with torch instead (torch.rand(()) < p), or plan only the submodules that do not draw."
            )
        results, spec = flatten(returned)
        assigned = before.assigned()
        self.structure = Structure(spec, _constants(results), tuple(assigned))
        return [*(leaf for leaf in results if isinstance(leaf, torch.Tensor)), *assigned.values()]


def _recorded(
    forward: _Forward, known: list[torch.Tensor], on_meta: OnMeta | None
) -> tuple[Any, list[torch.Tensor], Recorder, list[torch.Tensor]]:
    """The jit graph of ``forward``, its results, the recorder, and captured tensors, which are inputs after ``known``.

    A tensor that is not known is known in the next recording. One that each run makes anew stays a constant.
    """
    captured: list[torch.Tensor] = []
    recorded = 0
    while True:
        own = own_generators(forward.model.modules())
        seen = Recorder([*known, *captured], own, on_meta, watch_shapes=not is_pure(forward.model))
        graph: Any = None
        results: list[torch.Tensor] = []
        with preserved(forward.model, [*forward.inputs, *captured]):
            try:
                graph, results = record(forward, [*known, *captured], seen, forward.model)
            except UnsupportedError:
                if not any(t.requires_grad for t in seen.captured):  # these the trace must know of beforehand
                    raise
            finally:
                seen.written.put_back()
        more = [t for t in seen.captured if t.is_leaf and outside_vmap(t) is t]
        if not more or (captured and not any(t.requires_grad for t in more)):
            return graph, results, seen, captured
        recorded += graph is not None
        if recorded > 1:
            raise UnsupportedError(
                "forward makes a tensor that requires grad (nn.Parameter(...)) in each call: no plan can give it a "
                "gradient. Make it in __init__, or compute with a tensor that requires none."
            )
        captured += more


def is_pure(model: torch.nn.Module) -> bool:
    """Whether the class of ``model`` says that its Python only calls operations on tensors, and needs no watching: no
    shape in it follows from values.
    """
    return bool(getattr(type(model), "pure", False))


def _named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by qualified name; a tensor under several names is listed once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _held(model: torch.nn.Module, captured: Sequence[torch.Tensor]) -> dict[int, str]:
    """The qualified names of modules' attributes that hold captured tensors, by the tensors' identities."""
    wanted = {id(t) for t in captured}
    attributes = [(f"{n}.{k}" if n else k, v) for n, m in model.named_modules() for k, v in vars(m).items()]
    return {id(v): name for name, v in reversed(attributes) if id(v) in wanted}


def _constants(leaves: Sequence[Any]) -> tuple[tuple[int, Any], ...]:
    return tuple((k, leaf) for k, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor))


class _Reader:
    def __init__(self, graph: Any, sources: list[Source], calls: list[RecordedCall]) -> None:
        self.graph, self.calls = graph, calls
        self.names: list[str] = []
        self.taken: dict[str, int] = {}
        self.env: dict[str, Any] = {}  # jit value -> constant, Ref, or list of these
        self.nodes: list[Node] = []
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.strides: dict[int, tuple[int, ...]] = {}
        self.sources: dict[int, Source] = {}
        for value, source in zip(graph.inputs(), sources, strict=True):
            self.sources[self._define(value, _source_name(source))] = source

    def read(self, count: int, structure: Structure, reads: Sequence[HostRead]) -> B_graph:
        for node in self.graph.nodes():
            self._node(node)
        outputs = [self.env[v.debugName()] for v in self.graph.outputs()]
        flat = [i for out in outputs for i in refs(out)]
        self._put_guards(reads, flat[count:])
        used = set(flat[:count]).union(*(n.reads() for n in self.nodes))
        sources = {v: s for v, s in self.sources.items() if v in used or s.kind == "input"}
        b = B_graph(
            *(tuple(self.names), sources, tuple(self.nodes), tuple(flat[:count]), structure),
            *(self.shapes, self.strides),
        )
        b.verify()
        return b

    def _define(self, value: Any, name: str) -> int:
        again = self.taken.get(name, 0)
        self.taken[name] = again + 1
        self.names.append(f"{name}_{again}" if again else name)
        self.env[value.debugName()] = Ref(len(self.names) - 1)
        return len(self.names) - 1

    def _made(self, value: Any, name: str) -> int:
        """Define a value that a node makes."""
        v = self._define(value, name)
        kind = value.type()
        if isinstance(kind, torch._C.TensorType) and (shape := kind.sizes()) is not None:
            self.shapes[v], self.strides[v] = tuple(shape), tuple(kind.strides() or ())
        return v

    def _node(self, node: Any) -> None:
        kind = node.kind()
        if kind == "prim::Constant":
            self.env[node.output().debugName()] = constant(node)
            return
        outputs = list(node.outputs())
        inputs = [self.env[v.debugName()] for v in node.inputs()]
        mode, line, what = call_in(node.scopeName(), self.calls)
        path = module_in(node.scopeName())
        if what is not None:
            inputs = [what if isinstance(a, torch.Generator) else a for a in inputs]
        if kind in _INLINE:
            self.env[outputs[0].debugName()] = inputs if kind == _INLINE[0] else tuple(inputs)
        elif kind in _UNPACK and isinstance(inputs[0], (list, tuple)):
            for value, item in zip(outputs, inputs[0], strict=True):
                self.env[value.debugName()] = item
        elif kind in _UNPACK:
            self._unpack(inputs[0], outputs)
        else:
            op, args, kwargs = self._operation(node, kind, inputs, line)
            if callable(what):
                op, args, kwargs = what, (inputs[0],), ()
            name = getattr(args[0] if args else None, "words", "") or kind.split("::")[1]  # a compiled piece has words
            name = name if op is not data_of else "data"
            several = len(outputs) > 1
            made = tuple(self._made(v, name) for v in outputs)
            self.nodes.append(Node(op, name, args, kwargs, made, several, mode, line, path))

    def _put_guards(self, reads: Sequence[HostRead], marked: list[int]) -> None:
        """Remove the nodes that mark random draws; replace those that mark a read by Python with guards."""
        maker = {v: n for n in self.nodes for v in n.outputs}
        draws = len(marked) - sum(len(r.markers()) for r in reads)
        replaced: dict[int, Node | None] = {id(maker[v]): None for v in marked[:draws]}  # None: removed
        left = iter(marked[draws:])
        for read in reads:
            markers = [maker[next(left)] for _ in read.markers()]
            origin = iter([m.args[0] for m in markers])
            args = map_tensors(read.args, lambda _: next(origin))  # noqa: B023 - called at once
            kwargs = map_tensors(read.kwargs, lambda _: next(origin))  # noqa: B023
            replaced.update({id(m): None for m in markers})
            last = markers[-1]
            called = args, tuple(kwargs.items())
            replaced[id(last)] = Node(read.guard, "guard", *called, (), False, last.mode, read.guard.line, last.path)
        self.nodes = [n for node in self.nodes if (n := replaced.get(id(node), node)) is not None]

    def _unpack(self, ref: Ref, outputs: list[Any]) -> None:
        """Replace the list that an operation returned by its elements, which become the operation's outputs."""
        at = next(k for k in reversed(range(len(self.nodes))) if ref.index in self.nodes[k].outputs)
        node = self.nodes[at]
        if node.several:
            raise UnsupportedError(f"{node.name} at {node.line} returns nested lists")
        made = tuple(self._made(v, node.name) for v in outputs)
        self.nodes[at] = replace(node, outputs=made, several=True)

    def _operation(self, node: Any, kind: str, inputs: list[Any], line: str) -> tuple[Any, tuple[Any, ...], Any]:
        if kind == "aten::set_":
            raise UnsupportedError(GIVEN_MEMORY.format(line=line or "a call of set_"))
        if kind == "prim::PythonOp":
            function = node.pyobj()
            owner = function if isinstance(function, type) else getattr(function, "__self__", None)
            tensors, scalars = iter(inputs), iter(node.scalar_args())
            given = tuple(next(scalars) if kind == "c" else next(tensors) for kind in node.cconv())
            return getattr(owner, "apply", function), given, ()
        if kind.split("::")[1] in PRIMITIVES:
            return PRIMITIVES[kind.split("::")[1]], tuple(inputs), ()
        text = node.schema()
        if text == "(no schema)":
            raise UnsupportedError(f"{kind} at {line} has no place in a graph: plan the submodules around it instead")
        op, arguments = _signature(text)
        positional = tuple(a for a, (_, by_name) in zip(inputs, arguments, strict=True) if not by_name)
        keyword = tuple((name, a) for a, (name, by_name) in zip(inputs, arguments, strict=True) if by_name)
        return op, positional, keyword


@functools.cache
def _signature(schema: str) -> tuple[Any, tuple[tuple[str, bool], ...]]:
    """The operation of a schema; its arguments, and whether they are given by name."""
    parsed = torch._C.parse_schema(schema)
    namespace, name = parsed.name.split("::")
    op = getattr(getattr(getattr(torch.ops, namespace), name), parsed.overload_name or "default")
    return op, tuple((a.name, a.kwarg_only) for a in parsed.arguments)


def _source_name(source: Source) -> str:
    if source.kind == "input":
        return f"input{source.key}"
    return str(source.key) if source.kind != "constant" else "constant"
