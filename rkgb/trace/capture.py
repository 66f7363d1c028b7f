"""Observation of a module while it is traced: captured tensors, reads by Python, random draws, and modes.

Only this file and ``rkgb/trace/record.py`` call PyTorch's private tracing functions.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, resolve_name

from rkgb.device import KINDS
from rkgb.errors import UnsupportedError
from rkgb.graphs import Mode
from rkgb.randomness import (
    RandomSource,
    generators_in,
    own_generators,
    random_bytes,
    random_state,
    set_random_state,
    watched_devices,
)
from rkgb.storages import has_memory
from rkgb.trace.attention import USUAL_ATTENTION, attention_kernels
from rkgb.trace.guards import shaped_by_data, shapes, snapshot
from rkgb.trace.lines import user_line
from rkgb.trace.meta import OnMeta
from rkgb.trace.recurrent import RECURRENT, CastWeights
from rkgb.trace.respelled import Respelled, respelled
from rkgb.trace.written import Written
from rkgb.trees import map_tensors, tensors_in

_C: Any = torch._C

# Calls by which Python reads the data of tensors.
_HOST_READS = frozenset(
    "Tensor." + name
    for name in "__bool__ item __int__ __float__ __complex__ __index__ tolist numpy __array__ __contains__".split()
) | {"Tensor.is_nonzero", "torch.is_nonzero", "torch.equal", "torch.allclose", "Tensor.equal", "Tensor.allclose"}

_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)

_HOOKS = frozenset({"Tensor.register_hook", "Tensor.register_post_accumulate_grad_hook"})

_SWITCHES = frozenset({"Tensor.requires_grad_", "requires_grad.__set__"})

GIVEN_MEMORY = (
    "forward gives a tensor the memory of another (.data = … at {line}), which a plan would not do again. Write into "
    "it instead (.data.copy_(…)), or compute a new tensor."
)

# Operations that return what they are given, if it is of the right kind.
_SAME = frozenset("aten::" + name for name in "to lift_fresh resolve_conj resolve_neg detach alias".split())

# Not recorded: sizes, which are plain numbers in a trace, and printing.
_UNRECORDED = frozenset(
    {"Tensor.size", "Tensor.stride", "Tensor.numel", "Tensor.nelement", "Tensor.__len__", "shape.__get__"}
    | {"Tensor.__repr__", "Tensor.__str__", "Tensor.__format__"}
)

# Of these, what the tracer records, too.
_SIZES = frozenset({"Tensor.size", "Tensor.numel", "Tensor.nelement", "shape.__get__"})

# What these tell of a tensor is the same at all sizes.
_OF_ANY_SIZE = frozenset(
    "Tensor.dim Tensor.ndimension ndim.__get__ Tensor.element_size itemsize.__get__ requires_grad.__get__ "
    "is_leaf.__get__ is_cpu.__get__ is_meta.__get__ is_nested.__get__ is_sparse.__get__ "
    "is_quantized.__get__ Tensor.is_floating_point torch.is_floating_point Tensor.is_complex torch.is_complex".split()
)


def current_mode() -> Mode:
    """The grad mode and autocast state of this thread, and the kernels of attention."""
    on = [kind for kind in KINDS if torch.is_autocast_enabled(kind)]
    kernels = attention_kernels()
    return Mode(
        torch.is_grad_enabled(),
        tuple((kind, torch.get_autocast_dtype(kind)) for kind in on),
        () if kernels == USUAL_ATTENTION else kernels,
    )


def drop_saved() -> saved_tensors_hooks:
    """A context in which autograd saves no tensors, so that peak memory is that of inference."""

    def refuse(_: None) -> torch.Tensor:
        raise RuntimeError("a tensor dropped while the module was observed is needed: backward ran inside forward")

    return saved_tensors_hooks(lambda _: None, refuse)


@contextlib.contextmanager
def preserved(model: torch.nn.Module, inputs: Sequence[torch.Tensor], written: Sequence[str] = ()) -> Iterator[None]:
    """A context that restores buffers, inputs, generators and the tensors named in ``written`` at its end.

    Version counters are restored, too, since autograd graphs from before may have saved these tensors.
    """
    drawn: list[RandomSource] = [*watched_devices((*inputs, *model.parameters())), *own_generators(model.modules())]
    states = [(x, random_state(x)) for x in drawn]
    buffers = dict(model.named_buffers())
    holders = [(module, name, b) for module in model.modules() for name, b in module._buffers.items()]
    kept = [*buffers.values(), *inputs, *(_held(model, name) for name in written)]
    copies = [(t, t.detach().clone()) for t in kept if t.layout == torch.strided and not t.is_meta]
    counted = tuple(t for t, _ in copies if not t.is_inference())
    versions = tuple(t._version for t in counted)
    try:
        yield
    finally:
        for module, name, b in holders:
            module._buffers[name] = b
        with torch.no_grad():
            for t, copy in copies:
                if t.shape != copy.shape:  # statistics of quantization get their size in the first call
                    t.resize_(copy.shape)
                if not torch.equal(t, copy):
                    t.copy_(copy)
        torch._C._autograd._unsafe_set_version_counter(counted, versions)
        for x, state in states:
            set_random_state(x, state)


class Buffers:
    """The buffers of a module and its submodules, to compare with after a forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._before = [(n, m, k, b) for n, m in model.named_modules() for k, b in m._buffers.items()]

    def assigned(self) -> dict[str, torch.Tensor]:
        """The buffers that forward replaced by other tensors, by qualified name."""
        now = [(f"{n}.{k}" if n else k, m._buffers.get(k), b) for n, m, k, b in self._before]
        return {name: t for name, t, before in now if t is not before and t is not None}


def _held(model: torch.nn.Module, name: str) -> torch.Tensor:
    module, _, key = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(module), key)
    return tensor


@contextlib.contextmanager
def attributes_preserved(model: torch.nn.Module) -> Iterator[None]:
    """A context that restores numbers in the modules' attributes at its end, such as counters of calls.

    Caches, hooks and flags that forward sets in its first run stay, as they depend on each other.
    """
    numbers = [(m, k, x) for m in model.modules() for k, x in vars(m).items() if type(x) in (int, float)]
    try:
        yield
    finally:
        for module, name, number in numbers:
            setattr(module, name, number)


@dataclass(frozen=True, slots=True)
class HostRead:
    """A read by Python: ``function(*args, **kwargs)`` returned ``value``; markers take the tensors' places."""

    function: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    line: str

    def markers(self) -> list[torch.Tensor]:
        """Results of the trace that stand for the tensors read, in order."""
        return list(tensors_in((self.args, self.kwargs)))


RecordedCall = tuple[Mode, str, torch.Generator | Respelled | None]
"""A traced call: its mode, its source line, and its generator (the trace has a copy only) or its other spelling."""


def call_in(scope: str, calls: Sequence[RecordedCall]) -> RecordedCall:
    """The one of the recorder's ``calls`` that the scope of a node in the trace names."""
    marks = re.findall(r"@(\d+)@", scope)
    return calls[int(marks[-1])] if marks else (Mode(), "", None)


def module_in(scope: str) -> str:
    """The qualified name of the submodule that the scope of a node in the trace names."""
    names = [part for part in scope.split("/") if not part.startswith("@")]
    return names[-1] if names else ""


class Recorder(TorchFunctionMode):
    """Observes every call of a traced run.

    It collects ``captured`` (leaf tensors that are neither inputs nor the module's), ``reads`` by Python, and ``draws``
    (markers of random results). Mode and source line of each call become part of the scopes of its nodes. The markers
    keep unused random results in the trace, without which the generators would not advance as in eager mode.
    """

    def __init__(
        self,
        known: Sequence[torch.Tensor],
        generators: Sequence[torch.Generator] = (),
        on_meta: OnMeta | None = None,
        watch_shapes: bool = True,
    ) -> None:
        """``on_meta``: calls functions where no data are, and nothing is drawn, but seen to be. ``watch_shapes``:
        whether shapes may follow from values, and count as read.
        """
        super().__init__()
        self._known = {id(t): weakref.ref(t) for t in known}
        self.generators = generators
        self.devices = () if on_meta else watched_devices(known)
        self.on_meta, self.watch_shapes = on_meta, watch_shapes
        self.call: Callable[..., Any] = on_meta or _plainly
        self.captured: list[torch.Tensor] = []
        self.reads: list[HostRead] = []
        self.of_any_size = on_meta is not None and on_meta.of_any_size
        self.sizes_read = False  # or what may follow from them, by Python: the trace has numbers in their place
        self.draws: list[torch.Tensor] = []  # markers of results of random calls
        self.inside_function = False  # an autograd.Function is one operation, however many it calls
        self.written = Written(known)
        self.cast_weights = CastWeights()
        self.calls: dict[RecordedCall, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracing = torch._C._get_tracing_state()
        kwargs = kwargs or {}
        if tracing is None or self.inside_function:
            return self.call(func, args, kwargs)
        name = _call_name(func)
        self._refuse(func, name, args)
        if name in _UNRECORDED:
            if self.of_any_size and name in _SIZES:
                return func(*args, **kwargs)
            self.sizes_read = True
            with untraced(tracing):
                return func(*args, **kwargs)
        what = respelled(name, args, kwargs)
        if what is not None or not name.endswith("__get__"):
            self._look_for_captured(tracing, (args, kwargs))
        if what is not None:
            return self._recorded_as(tracing, what, args[0])
        if name in _HOST_READS and any(True for _ in tensors_in((args, kwargs))):
            return self._read(tracing, func, name.split(".")[-1].strip("_"), args, kwargs)
        inner = _without_override(func)
        if inner is not None:
            with self:
                return inner(*args, **kwargs)
        return self._recorded(tracing, func, name, args, kwargs)

    def _refuse(self, func: Any, name: str, args: tuple[Any, ...]) -> None:
        """Raise ``UnsupportedError`` for a call that no plan can repeat."""
        if name in _HOOKS:
            raise UnsupportedError(
                f"forward registers a hook on a tensor ({name} at {user_line()}), which a plan would not do again. "
                "Use an autograd.Function for what the hook does to the gradient."
            )
        if func in _GRADIENTS:
            raise UnsupportedError(
                f"{name} at {user_line()}: the module computes gradients inside its forward, which no plan can "
                "foresee. Plan the submodules that do not, instead of the whole module."
            )
        if name == "data.__set__":
            raise UnsupportedError(GIVEN_MEMORY.format(line=user_line()))
        if name in _SWITCHES and self.written.is_parameter(args[0]) and args[0].requires_grad != all(args[1:]):
            raise UnsupportedError(
                f"forward switches requires_grad of a parameter at {user_line()}, which a plan would not do again. "
                "Use its values without gradient instead: detach(), or functional_call with detached parameters."
            )

    def _recorded(self, tracing: Any, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call, which the tracer records as it is."""
        generator = self._generator(name, (*args, *kwargs.values()))
        before = self._states(tracing, generator)
        with untraced(tracing):
            calls = None if self.on_meta is None else self.on_meta.calls
            form = None if calls is None else calls.form(func, args, kwargs, current_mode())
            copies = self.written.before(name, (args, kwargs))
        numbers = [t for t in tensors_in((args, kwargs)) if not t.dim() and has_memory(t)]
        traced = [_C._get_value_trace(t) for t in numbers]
        uses = [*map(_uses, traced)]
        try:
            with scoped(tracing, self.scope(generator)):
                given = self.cast_weights(args, current_mode()) if func in RECURRENT else args
                result = self.call(func, given, kwargs)
        finally:  # it may have written before it failed
            with untraced(tracing):
                self.written.after(name, copies)
        if calls and form and any(True for _ in tensors_in((args, kwargs, result))):  # it is no switch of modes
            calls.note(form)
        if numbers and any(True for _ in tensors_in(result)):
            for t, value, before_call in zip(numbers, traced, uses, strict=True):
                if _uses(value) == before_call:
                    self._read(tracing, torch.Tensor.item, "item", (t,), {})
        drawn = self._states(tracing, generator) != before if self.on_meta is None else self.on_meta.draws
        if drawn:
            self.draws += self._marked(tracing, list(tensors_in(result)))
        found = result if isinstance(result, (tuple, list)) else (result,)
        self.sizes_read |= name not in _OF_ANY_SIZE and any(isinstance(x, (int, float)) for x in found)
        for t in tensors_in(result):
            if t.grad_fn is None:
                self._may_change(tracing, t)
                self._remember(t)
        if self.watch_shapes and shaped_by_data(name.split(".")[-1], args):
            self._read(tracing, shapes, "shape", tuple(tensors_in(result)), {})
        return result

    def _recorded_as(self, tracing: Any, what: Respelled, t: torch.Tensor) -> torch.Tensor:
        """``what(t)``, recorded as another operation that stands for it (``detach``)."""
        with untraced(tracing):
            self.written.keep(t)
            result = what(t)
        with scoped(tracing, self.scope(what)):
            _C._set_value_trace(result, _C._get_value_trace(t.detach()))
        self._remember(result)
        return result

    def _generator(self, name: str, arguments: tuple[Any, ...]) -> torch.Generator | None:
        """The generator among the arguments of a call. Raises ``UnsupportedError`` if no module has it."""
        generator = next(iter(generators_in(arguments)), None)
        if generator is not None and generator not in self.generators:
            raise UnsupportedError(
                f"{name} at {user_line()} draws from a torch.Generator that is no attribute of the model or of a "
                "submodule, so that its state could not be kept. Make it one."
            )
        return generator

    def _states(self, tracing: Any, generator: torch.Generator | None) -> list[bytes]:
        """The state of the generator; for None those of all devices' default generators."""
        with untraced(tracing):
            drawn: Sequence[RandomSource] = self.devices if generator is None else (generator,)
            return [random_bytes(x) for x in drawn]

    def scope(self, what: torch.Generator | Respelled | None = None) -> str:
        """A scope name that refers to the present mode and source line, and to the call's generator or spelling."""
        return f"@{self.calls.setdefault((current_mode(), user_line(), what), len(self.calls))}@"

    def _read(self, tracing: Any, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a read that the tracer does not record; markers in the trace show which tensors are read, and when."""
        marked = self._marked(tracing, args), self._marked(tracing, kwargs)
        with untraced(tracing):
            value = func(*args, **kwargs)
            self.reads.append(HostRead(func, name, marked[0], marked[1], snapshot(value), user_line()))
        return value

    def _marked(self, tracing: Any, tree: Any) -> Any:
        """``tree`` with each tensor replaced by a marker: an empty tensor whose node in the trace reads it."""
        with scoped(tracing, self.scope()):
            return map_tensors(tree, lambda t: _mark(outside_vmap(t)))

    def _look_for_captured(self, tracing: Any, arguments: Any) -> None:
        for t in tensors_in(arguments):
            if t.grad_fn is None and not self._knows(t):
                self._remember(t)
                self.captured.append(t)
                with untraced(tracing):
                    self.written.keep_captured(t)
                self._may_change(tracing, t)

    def _may_change(self, tracing: Any, t: torch.Tensor) -> None:
        """If the trace has ``t`` as a constant, have it as a copy of a constant, which the module may change."""
        if t.requires_grad or not has_memory(t) or not _is_constant(_C._get_value_trace(t)):
            return
        value = _C._get_value_trace(t)
        with untraced(tracing):
            constant = _constant_of(value) if t.is_meta else t.clone()
        with scoped(tracing, self.scope()):
            _C._set_value_trace(t, _C._get_value_trace(constant.clone()))

    def _remember(self, t: torch.Tensor) -> None:
        if not self._knows(t):
            self._known[id(t)] = weakref.ref(t)

    def _knows(self, t: torch.Tensor) -> bool:
        known = self._known.get(id(t))
        return known is not None and known() is t


def _plainly(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _uses(value: Any) -> int:
    """How many operations of the trace read a value."""
    return len(list(value.uses()))


def _is_constant(value: Any) -> bool:
    """Whether a value of the trace is a tensor that came from nowhere, as torch's constructors and NumPy make them."""
    constant: bool = _origin(value).kind() == "prim::Constant"
    return constant


def _constant_of(value: Any) -> torch.Tensor:
    """The tensor that such a value is."""
    made: torch.Tensor = _origin(value).t("value").clone()
    return made


def _origin(value: Any) -> Any:
    while value.node().kind() in _SAME:
        value = next(value.node().inputs())
    return value.node()


@functools.cache
def _without_override(func: Any) -> Callable[..., Any] | None:
    """``func``, if it is a function in Python of torch's, without its own question whether a mode overrides it.

    So the recorder sees each call in it: those under ``no_grad``, and what Python reads from tensors.
    """
    if not isinstance(func, FunctionType) or func.__module__ not in ("torch.nn.functional", "torch.functional"):
        return None
    asks = {name: _overridden_by_nothing for name in func.__code__.co_names if name.startswith("has_torch_function")}
    if not asks or "_get_tracing_state" in func.__code__.co_names:  # it does otherwise where sizes are traced
        return None
    made = FunctionType(func.__code__, {**func.__globals__, **asks}, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _overridden_by_nothing(*_: Any) -> bool:
    return False


def _mark(t: torch.Tensor) -> torch.Tensor:
    return t.new_empty(0) if t.layout == torch.strided else t.detach()


def outside_vmap(t: torch.Tensor) -> torch.Tensor:
    """The tensor outside of ``vmap`` to which a tensor inside belongs."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


@functools.lru_cache(4096)
def _call_name(func: Any) -> str:
    return ".".join((resolve_name(func) or getattr(func, "__name__", str(func))).split(".")[-2:])


@contextlib.contextmanager
def scoped(tracing: Any, name: str) -> Iterator[None]:
    """A context in which what the tracer records is in the scope ``name``."""
    tracing.push_scope(name)
    try:
        yield
    finally:
        tracing.pop_scope()


@contextlib.contextmanager
def untraced(tracing: Any) -> Iterator[None]:
    """A context in which the tracer records nothing."""
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]
