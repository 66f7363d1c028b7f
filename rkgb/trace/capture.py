"""Observation of a module while it is traced: captured tensors, reads by Python, random draws, and modes.

Only this file, ``rkgb/trace/tracer.py`` and ``rkgb/trace/record.py`` call PyTorch's private tracing functions.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from rkgb.device import KINDS
from rkgb.errors import UnsupportedError
from rkgb.graphs import Mode
from rkgb.randomness import RandomSource, generators_in, random_bytes, watched_devices
from rkgb.storages import has_memory
from rkgb.trace.attention import USUAL_ATTENTION, attention_kernels
from rkgb.trace.casts import Casts
from rkgb.trace.guards import Guard, shaped_by_data, shapes, snapshot
from rkgb.trace.lines import user_line
from rkgb.trace.meta import OnMeta
from rkgb.trace.respelled import Respelled, respelled
from rkgb.trace.tracer import (
    call_name,
    constant_of,
    is_constant,
    outside_vmap,
    scoped,
    untraced,
    uses,
    without_override,
)
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


class HostRead(NamedTuple):
    """A read by Python, which ``guard(*args, **kwargs)`` makes again; markers take the tensors' places."""

    guard: Guard
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

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
        self.call: Callable[..., Any] = on_meta or (lambda func, args, kwargs: func(*args, **kwargs))
        self.captured: list[torch.Tensor] = []
        self.reads: list[HostRead] = []
        self.sizes_read = False  # or what may follow from them, by Python: the trace has numbers in their place
        self.draws: list[torch.Tensor] = []  # markers of results of random calls
        self.inside_function = False  # an autograd.Function is one operation, however many it calls
        self.written = Written(known)
        self.casts = Casts(on_meta.kind if on_meta else None)
        self.calls: dict[RecordedCall, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracing = torch._C._get_tracing_state()
        kwargs = kwargs or {}
        if tracing is None or self.inside_function:
            return self.call(func, args, kwargs)
        name = call_name(func)
        self._refuse(func, name, args)
        if name in _UNRECORDED:
            if self.on_meta is not None and self.on_meta.of_any_size and name in _SIZES:
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
        inner = without_override(func)
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
        generator, mode = self._generator(name, (*args, *kwargs.values())), current_mode()
        before = self._states(tracing, generator)
        with untraced(tracing):
            calls = None if self.on_meta is None else self.on_meta.calls
            form = None if calls is None else calls.form(func, args, kwargs, mode)
            copies = self.written.before(name, (args, kwargs))
        numbers = [t for t in tensors_in((args, kwargs)) if not t.dim() and has_memory(t)]
        traced = [_C._get_value_trace(t) for t in numbers]
        used = [*map(uses, traced)]
        try:
            with scoped(tracing, self.scope(generator)):
                given, named = self.casts(func, args, kwargs, mode)
                result = self.call(func, given, named)
        finally:  # it may have written before it failed
            with untraced(tracing):
                self.written.after(name, copies)
        if calls and form and any(True for _ in tensors_in((args, kwargs, result))):  # it is no switch of modes
            calls.note(form)
        if numbers and any(True for _ in tensors_in(result)):
            for t, value, before_call in zip(numbers, traced, used, strict=True):
                if uses(value) == before_call:
                    self._read(tracing, torch.Tensor.item, "item", (t,), {})
        drawn = self._states(tracing, generator) != before if self.on_meta is None else self.on_meta.rules.drawn
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
            self.reads.append(HostRead(Guard(func, name, snapshot(value), user_line()), *marked))
        return value

    def _marked(self, tracing: Any, tree: Any) -> Any:
        """``tree`` with each tensor replaced by a marker: an empty tensor whose node in the trace reads it."""

        def mark(t: torch.Tensor) -> torch.Tensor:
            outside = outside_vmap(t)
            return outside.new_empty(0) if outside.layout == torch.strided else outside.detach()

        with scoped(tracing, self.scope()):
            return map_tensors(tree, mark)

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
        if t.requires_grad or not has_memory(t) or not is_constant(_C._get_value_trace(t)):
            return
        value = _C._get_value_trace(t)
        with untraced(tracing):
            constant = constant_of(value) if t.is_meta else t.clone()
        with scoped(tracing, self.scope()):
            _C._set_value_trace(t, _C._get_value_trace(constant.clone()))

    def _remember(self, t: torch.Tensor) -> None:
        if not self._knows(t):
            self._known[id(t)] = weakref.ref(t)

    def _knows(self, t: torch.Tensor) -> bool:
        known = self._known.get(id(t))
        return known is not None and known() is t
