"""What TorchDynamo captured of a call, as a module: a pure program of tensors under the model's names."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from rkgb.errors import runs_functions
from rkgb.graphs import Source
from rkgb.trace.lines import line_of_trace, told
from rockmate.calls.functions import Function

_STEP = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")
_STEPS = re.compile(rf"[LG]\['\w+'\](?:{_STEP.pattern})+")
_HERE = os.path.join(os.path.dirname(__file__), "dynamo.py")  # whose functions call the model
_BUFFER = re.compile(r"\._buffers\['[^']*'\]$")
WRAPPED = ("autograd_function_apply", "tag_activation_checkpoint")


class Captured(torch.nn.Module):
    """``program``: a graph of TorchDynamo, without wrappers; its inputs are parameters, buffers, tensors and numbers,
    which come from ``sources`` (see ``captured_sources``).

    As a module it has the parameters and buffers under the names that they have in the model, and ``forward`` takes
    the other inputs, in order. It has them while ``holding`` is in force, so that it keeps no model alive.
    """

    pure = True  # see ``rkgb.Btools.is_pure``

    def __init__(self, program: fx.GraphModule, arguments: Sequence[Any], sources: Sequence[str]) -> None:
        super().__init__()
        self.__dict__["program"] = program
        self.sources = sources
        self.given: list[int] = []  # positions of the arguments of ``forward`` among the inputs
        self.names: list[str] = []  # of these, as the user would write them
        self._own: list[tuple[dict[str, Any], str, int]] = []
        self._at: dict[str, int] = {}  # parameters and buffers by name: positions among the inputs
        self.trained: list[tuple[str, int]] = []  # parameters that need gradients, by name: positions among the inputs
        self._lock, self._holders = threading.Lock(), 0
        for k, (source, value) in enumerate(zip(sources, arguments, strict=True)):
            is_parameter = isinstance(value, torch.nn.Parameter)
            if not (is_parameter or (isinstance(value, torch.Tensor) and _BUFFER.search(source))):
                self.given.append(k)
                self.names.append(_written(source))
                continue
            *above, name = _path(source)
            holder: torch.nn.Module = self
            for j, step in enumerate(above):
                if step not in holder._modules:
                    above[j] = step = _free(holder, step)
                    holder.add_module(step, torch.nn.Module())
                holder = holder._modules[step]  # type: ignore[assignment]
            name = _free(holder, name)
            (holder.register_parameter if is_parameter else holder.register_buffer)(name, value)
            self._own.append((holder._parameters if is_parameter else holder._buffers, name, k))
            self._at[".".join([*above, name])] = k
            if is_parameter and value.requires_grad:
                self.trained.append((".".join([*above, name]), k))
        for held, name, _ in self._own:
            held[name] = None

    @contextlib.contextmanager
    def holding(self, inputs: Sequence[Any]) -> Iterator[None]:
        """The parameters and buffers are those among ``inputs``. Several threads may run one model."""
        with self._lock:
            self._holders += 1
            before = [held[name] for held, name, _ in self._own]
            for held, name, k in self._own:
                held[name] = inputs[k]
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                for (held, name, _), value in zip(self._own, before, strict=True):
                    held[name] = (held[name] if value is None else value) if self._holders else None

    def values_of(
        self, sources: Mapping[int, Source], given: list[torch.Tensor], inputs: Sequence[Any]
    ) -> dict[int, torch.Tensor]:
        """The tensors that ``sources`` stand for in a call; ``given``: tensors among the arguments of ``forward``."""
        found: dict[int, torch.Tensor] = {}
        for v, source in sources.items():
            if source.kind == "input":
                found[v] = given[source.key]
            else:
                found[v] = source.key if source.kind == "constant" else inputs[self._at[source.key]]
        return found

    def forward(self, *given: Any) -> Any:
        arguments: list[Any] = [None] * (len(self._own) + len(given))
        for held, name, k in self._own:
            arguments[k] = held[name]
        for k, value in zip(self.given, given, strict=True):
            arguments[k] = value
        program, recorded = self.__dict__["program"], torch._C._get_tracing_state() is not None
        return _Located(program).run(*arguments) if recorded else program.forward(*arguments)


class _Located(fx.Interpreter):
    """Tells the tracer which of the user's lines and modules each operation is of."""

    def run_node(self, n: fx.Node) -> Any:
        tracing, module = torch._C._get_tracing_state(), module_of(n)
        if module:
            tracing.push_scope(module)
        try:
            with told(line_of_trace(n.meta.get("stack_trace") or "", _HERE)):
                return super().run_node(n)
        finally:
            if module:
                tracing.pop_scope()


def module_of(node: fx.Node) -> str:
    """The path of the submodule that an operation is of, as "layers.0.norm"; empty for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    behind_root = re.sub(r"^[LG]\['[^']*'\]", "", _plain(stack[-1][0]))
    path = re.sub(r"\['?([^'\]]*)'?\]", r".\1", behind_root)
    return ".".join(x for x in path.replace("_modules.", "").split(".") if x)


def source_of(node: fx.Node) -> str:
    """Where an input of a captured program comes from, as TorchDynamo writes it: "L['x']"; empty if it does not say."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name)


def kind_of_source(node: fx.Node) -> str:
    """The class of TorchDynamo's that says where an input comes from."""
    return type(getattr(node, "_dynamo_source", None)).__name__


def captured_sources(program: fx.GraphModule) -> list[str]:
    """Where each input of a captured program comes from."""
    return [_plain(source_of(node)) or node.name for node in program.graph.find_nodes(op="placeholder")]


def name_of(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def line_of(node: fx.Node) -> str:
    """Where the user's code computes ``node``, or the first one behind it whose line is known, as " at file.py:12";
    empty if there is none.
    """
    while node.op not in ("output", "root") and not node.meta.get("stack_trace"):
        node = node.next
    line = line_of_trace(node.meta.get("stack_trace") or "", _HERE)
    return f" at {line}" if line else ""


def _plain(source: str) -> str:
    """``source`` as for modules of torch's own ``__getattr__``; of others TorchDynamo reads the dictionaries. An array
    of NumPy's is called as it is given, and not as the tensor that is made of it.
    """
    source = re.sub(r"^___from_numpy\((.*)\)$", r"\1", source)
    return re.sub(r"\.__dict__\['(_modules|_parameters|_buffers)'\]", r".\1", source)


def _path(source: str) -> list[str]:
    """The names on the way to a parameter or buffer: from the root on, where nothing but modules is on it."""
    return _STEP.findall(source) if _STEPS.fullmatch(source) else [re.sub(r"\W+", "_", source).strip("_")]


def _free(holder: torch.nn.Module, name: str) -> str:
    """``name``, or one like it that ``holder`` does not have yet."""
    while hasattr(holder, name):
        name += "_"
    return name


def _written(source: str) -> str:
    """``source`` without brackets: "args.0" for "L['args'][0]"."""
    return re.sub(r"\[('?)(\w+)\1\]", r".\2", re.sub(r"^[LG]\['(\w+)'\]", r"\1", source))


def without_wrappers(program: fx.GraphModule) -> None:
    """Replace what only compilers understand: the operations of checkpointed parts are put among the others, since
    Rockmate decides what runs again; functions of autograd save through autograd, where Rockmate sees it.
    """
    for node in program.graph.find_nodes(op="call_function", target=torch._C._autograd._get_data_attr):  # type: ignore[attr-defined]
        node.target = _data_of
    for node in list(program.graph.nodes):
        name = str(getattr(node.target, "_name", ""))
        if name not in WRAPPED:
            continue
        bodies = [getattr(program, str(a.target)) for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"]
        if name == "tag_activation_checkpoint":
            without_wrappers(bodies[0])
            _put_inside(program, node, bodies[0])
            continue
        path = f"_rockmate_{node.name}"
        program.add_submodule(path, Function(bodies[0], bodies[1], dict(node.kwargs)))
        with program.graph.inserting_before(node):
            new = program.graph.call_module(path, tuple(node.args[2:]))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        program.graph.erase_node(node)
    program.recompile()


def _put_inside(program: fx.GraphModule, node: fx.Node, body: fx.GraphModule) -> None:
    """Put the operations of ``body`` in the place of ``node``, whose first argument it is."""
    held, given = node.all_input_nodes[0], node.args[1:]
    known: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=True))
    with program.graph.inserting_before(node):
        results: Any = program.graph.graph_copy(body.graph, known)
    for inner in body.graph.nodes:
        if inner.op in ("get_attr", "call_module"):
            path = f"{node.name}_{inner.target}".replace(".", "_")
            setattr(program, path, attrgetter(str(inner.target))(body))
            known[inner].target = path
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    for user in list(node.users):  # each takes one of several
        user.replace_all_uses_with(results[user.args[1]])
        program.graph.erase_node(user)
    program.graph.erase_node(node)
    if not held.users:
        program.graph.erase_node(held)
        delattr(program, str(held.target))


def _data_of(t: torch.Tensor) -> torch.Tensor:
    return t.data


_EXACT = frozenset(
    "abs absolute array asarray astype ceil copy floor item maximum minimum reshape sign sqrt squeeze transpose "
    "where".split()
)
"""What NumPy computes to the same bits as torch."""


def check_operators(program: fx.GraphModule) -> None:
    """Raise ``UnsupportedError`` for an operator of the user's that runs functions, which no graph has."""
    for node in program.graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and _RUNS_FUNCTIONS.match(name_of(node)):
            raise runs_functions(name_of(node), line_of(node))


_RUNS_FUNCTIONS = re.compile("cond|while_loop|scan|associative_scan|map|flex_attention")


def numpy_function(program: fx.GraphModule) -> str | None:
    """A function or method of NumPy that the graph has torch compute, perhaps to other bits, and where; draws too. What
    has no dimensions is a number for NumPy, beside which tensors keep their type.
    """
    from torch._dynamo import utils

    wrappers = utils.numpy_operator_wrapper, utils.numpy_to_tensor_wrapper, utils.numpy_method_wrapper
    for node in program.graph.nodes:
        if not isinstance(node.target, wrappers):
            continue
        name = name_of(node).removeprefix("wrapped_")
        exact = isinstance(node.target, utils.numpy_operator_wrapper) or name in _EXACT
        example = node.meta.get("example_value")
        is_number = isinstance(example, torch.Tensor) and not example.dim()
        if not exact or (is_number and {n.target for n in node.users} != {"item"}):
            return f"{name}{line_of(node)}"
    return None
