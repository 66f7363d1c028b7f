"""Run a module under observation: what a trace cannot tell (captured tensors, reads by Python), and its modes.

The one place that touches PyTorch's private tracing entry points.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, resolve_name

from rkgb.errors import UnsupportedError
from rkgb.graphs import Mode
from rkgb.guards import shaped_by_data, shapes, snapshot
from rkgb.patches import traceable
from rkgb.randomness import Drawn, generators_in, own_generators, random_state, set_random_state

# What Python reads from the data of tensors.
_HOST_READS = frozenset(
    "Tensor." + name
    for name in "__bool__ item __int__ __float__ __complex__ __index__ tolist numpy __array__ __contains__".split()
) | {"Tensor.is_nonzero", "torch.is_nonzero", "torch.equal", "torch.allclose", "Tensor.equal", "Tensor.allclose"}

_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)

# What people print of them: no decision follows.
_PRINTED = frozenset({"Tensor.__repr__", "Tensor.__str__", "Tensor.__format__"})

_HOOKS = frozenset({"Tensor.register_hook", "Tensor.register_post_accumulate_grad_hook"})

# Sizes are plain numbers in a trace: a call with other shapes is traced again.
_SIZES = frozenset(
    {"Tensor.size", "Tensor.stride", "Tensor.numel", "Tensor.nelement", "Tensor.__len__", "shape.__get__"}
)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))


def current_mode() -> Mode:
    """The grad mode and autocast state of this thread."""
    on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return Mode(torch.is_grad_enabled(), tuple((kind, torch.get_autocast_dtype(kind)) for kind in on))


def drop_saved() -> saved_tensors_hooks:
    """Run with gradients, but let autograd keep nothing: memory stays that of inference."""

    def refuse(_: None) -> torch.Tensor:
        raise RuntimeError("a tensor dropped while the module was observed is needed: backward ran inside forward")

    return saved_tensors_hooks(lambda _: None, refuse)


@contextlib.contextmanager
def preserved(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Afterwards buffers, inputs and generators are as they were, and the former count as never changed: graphs from
    before may have saved them.
    """
    devices = {torch.device("cpu")} | {t.device for t in (*inputs, *model.parameters())}
    drawn: list[Drawn] = [*devices, *own_generators(model)]
    states = [(x, random_state(x)) for x in drawn]
    buffers = dict(model.named_buffers())
    holders = [(module, name, b) for module in model.modules() for name, b in module._buffers.items()]
    copies = [(t, t.detach().clone()) for t in (*buffers.values(), *inputs) if t.layout == torch.strided]
    counted = tuple(t for t, _ in copies if not t.is_inference())
    versions = tuple(t._version for t in counted)
    try:
        yield
    finally:
        for module, name, b in holders:
            module._buffers[name] = b
        with torch.no_grad():
            for t, copy in copies:
                if not torch.equal(t, copy):
                    t.copy_(copy)
        torch._C._autograd._unsafe_set_version_counter(counted, versions)
        for x, state in states:
            set_random_state(x, state)


@contextlib.contextmanager
def attributes_preserved(model: torch.nn.Module) -> Iterator[None]:
    """Afterwards numbers among the modules' attributes are what they were: nothing was counted.

    What forward makes when it first runs (caches, hooks and the flags that say so) stays, as it belongs together.
    """
    numbers = [(m, k, x) for m in model.modules() for k, x in vars(m).items() if type(x) in (int, float)]
    try:
        yield
    finally:
        for module, name, number in numbers:
            setattr(module, name, number)


@dataclass(frozen=True, slots=True)
class HostRead:
    """Python read ``value`` by ``function(*args, **kwargs)``, whose tensors are the markers in the trace."""

    function: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    line: str

    def markers(self) -> list[torch.Tensor]:
        """Results of the trace that stand for the tensors read, in order."""
        return list(tensors_in((self.args, self.kwargs)))


Call = tuple[Mode, str, torch.Generator | None]
"""Mode and source line of a traced call, and the generator that it was given (a trace holds a copy)."""


class Recorder(TorchFunctionMode):
    """Sees every call of a traced run: leaf tensors that are nobody's, reads by Python, and random draws.

    While tracing it also names mode and source line of each call in the scopes of its nodes, and keeps
    dead random results alive: without them the generator would not move as in eager mode.
    """

    def __init__(self, known: Sequence[torch.Tensor], generators: Sequence[torch.Generator] = ()) -> None:
        super().__init__()
        self._known = {id(t): weakref.ref(t) for t in known}
        self.generators = generators
        self.captured: list[torch.Tensor] = []
        self.reads: list[HostRead] = []
        self.draws: list[torch.Tensor] = []  # markers of results of random calls
        self.inside_function = False  # an autograd.Function is one operation, however many it calls
        self.calls: dict[Call, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracing = torch._C._get_tracing_state()
        if tracing is None or self.inside_function:
            return func(*args, **(kwargs or {}))
        name = _call_name(func)
        if name in _HOOKS:
            raise UnsupportedError(
                f"forward registers a hook on a tensor ({name} at {user_line()}), which a plan would not do again. "
                "Use an autograd.Function for what the hook does to the gradient."
            )
        if name in _SIZES:
            with _untraced(tracing):
                return func(*args, **(kwargs or {}))
        if not name.endswith("__get__"):
            self._look_for_captured((args, kwargs))
        if name in _PRINTED:
            with _untraced(tracing):
                return func(*args, **(kwargs or {}))
        if func in _GRADIENTS:
            raise UnsupportedError(
                f"{name} at {user_line()}: the module computes gradients inside its forward, which no plan can "
                "foresee. Wrap the submodules that do not, instead of the whole module."
            )
        if name in _HOST_READS and any(True for _ in tensors_in((args, kwargs))):
            return self._read(tracing, func, name.split(".")[-1].strip("_"), args, kwargs or {})
        generator = self._generator(name, (*args, *(kwargs or {}).values()))
        before = _draws(tracing, generator)
        tracing.push_scope(self.scope(generator))
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            tracing.pop_scope()
        if _draws(tracing, generator) != before:
            self.draws += self._marked(tracing, list(tensors_in(result)))
        for t in tensors_in(result):
            if t.grad_fn is None:
                self._remember(t)
        if shaped_by_data(name.split(".")[-1], args):
            self._read(tracing, shapes, "shape", tuple(tensors_in(result)), {})
        return result

    def _generator(self, name: str, arguments: tuple[Any, ...]) -> torch.Generator | None:
        """The generator that a call is given."""
        generator = next(iter(generators_in(arguments)), None)
        if generator is not None and generator not in self.generators:
            raise UnsupportedError(
                f"{name} at {user_line()} draws from a torch.Generator that is no attribute of the model or of a "
                "submodule, so that its state could not be kept. Make it one."
            )
        return generator

    def scope(self, generator: torch.Generator | None = None) -> str:
        """A scope name that stands for the present mode and source line, and the generator of the call."""
        return f"@{self.calls.setdefault((current_mode(), user_line(), generator), len(self.calls))}@"

    def _read(self, tracing: Any, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Read outside the trace; a marker of each tensor says in the trace what was read, and where."""
        marked = self._marked(tracing, args), self._marked(tracing, kwargs)
        with _untraced(tracing):
            value = func(*args, **kwargs)
            self.reads.append(HostRead(func, name, marked[0], marked[1], snapshot(value), user_line()))
        return value

    def _marked(self, tracing: Any, tree: Any) -> Any:
        """``tree`` with each tensor replaced by a marker: an empty tensor whose node in the trace reads it."""
        tracing.push_scope(self.scope())
        try:
            return map_tensors(tree, lambda t: t.new_empty(0) if t.layout == torch.strided else t.detach())
        finally:
            tracing.pop_scope()

    def _look_for_captured(self, arguments: Any) -> None:
        for t in tensors_in(arguments):
            if t.grad_fn is None and not self._knows(t):
                self._remember(t)
                self.captured.append(t)

    def _remember(self, t: torch.Tensor) -> None:
        if not self._knows(t):
            self._known[id(t)] = weakref.ref(t)

    def _knows(self, t: torch.Tensor) -> bool:
        known = self._known.get(id(t))
        return known is not None and known() is t


def map_tensors(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``tree`` (nested lists, tuples and dicts) with ``function`` applied to its tensors."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(t, function) for t in tree)
    if isinstance(tree, dict):
        return {k: map_tensors(t, function) for k, t in tree.items()}
    return tree


@functools.lru_cache(4096)
def _call_name(func: Any) -> str:
    return ".".join((resolve_name(func) or getattr(func, "__name__", str(func))).split(".")[-2:])


_INSIDE = (os.path.dirname(__file__) + os.sep, contextlib.__file__, str(torch.__path__[0]) + os.sep)


def user_line() -> str:
    """The innermost source line outside this file and torch, as "file.py:12", or "cell:12" in a notebook."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    if frame is None:
        return ""
    folder, name = os.path.split(frame.f_code.co_filename)
    return f"{'cell' if 'ipykernel_' in folder else name}:{frame.f_lineno}"  # a notebook's files are numbers


@contextlib.contextmanager
def _untraced(tracing: Any) -> Iterator[None]:
    """What runs here is not recorded."""
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def _draws(tracing: Any, generator: torch.Generator | None) -> bytes:
    """The state of the generator, by default that of the CPU."""
    with _untraced(tracing):
        return random_state(generator or torch.device("cpu")).numpy().tobytes()


@contextlib.contextmanager
def _functions_marked(seen: Recorder) -> Iterator[None]:
    """``autograd.Function.apply`` is no torch function: name its call in the scopes, leave its inside alone."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        tracing = torch._C._get_tracing_state()
        if tracing is None or seen.inside_function:
            return original.__func__(cls, *args, **kwargs)
        tracing.push_scope(seen.scope())
        seen.inside_function = True
        try:
            return original.__func__(cls, *args, **kwargs)
        finally:
            seen.inside_function = False
            tracing.pop_scope()

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def record(
    function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], seen: Recorder
) -> tuple[Any, list[torch.Tensor]]:
    """Trace ``function(*inputs)`` into a torch.jit graph whose inputs are ``inputs``; ``seen`` looks on.

    Returns the graph and the function's results. The graph's outputs are these, then
    the markers of ``Recorder.draws`` and those of ``Recorder.reads``.
    """
    results: list[torch.Tensor] = []

    def traced(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with seen:
            results[:] = function(*args)
        return (*results, *seen.draws, *(t for read in seen.reads for t in read.markers()))

    lookup = torch.jit._trace._create_interpreter_name_lookup_fn()
    with (
        _functions_marked(seen),
        traceable(),
        drop_saved(),
        warnings.catch_warnings(),
    ):
        # What Python reads from data, the recorder sees.
        warnings.simplefilter("ignore", torch.jit._trace.TracerWarning)
        # A weight that was cast before would be a tensor from nowhere. Within the trace the cache does what it does in
        # eager mode: a weight used twice is cast once, and the gradients of both uses are added before they are cast.
        torch.clear_autocast_cache()
        try:
            graph, _ = torch._C._create_graph_by_tracing(traced, tuple(inputs), lookup, True, False)
        except RuntimeError as error:
            raise UnsupportedError(f"torch.jit could not trace the module: {error}") from error
        finally:
            torch.clear_autocast_cache()
    torch._C._jit_pass_inline(graph)
    return graph, results
