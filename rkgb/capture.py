"""Run a module under observation: what a trace cannot tell (captured tensors, reads by Python), and its modes.

The one place that touches PyTorch's private tracing entry points.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, resolve_name

from rkgb.errors import UnsupportedError
from rkgb.graphs import Mode

_HOST_READS = frozenset(
    "Tensor." + name
    for name in "__bool__ item __int__ __float__ __index__ tolist numpy __array__ __contains__ is_nonzero".split()
) | {"torch.equal", "torch.allclose", "Tensor.equal"}

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


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the generator that operations on ``device`` draw from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Restore what ``random_state`` returned."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextlib.contextmanager
def preserved(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Afterwards buffers, inputs and generators are as they were."""
    devices = {torch.device("cpu")} | {t.device for t in (*inputs, *model.parameters())}
    states = [(d, random_state(d)) for d in devices]
    buffers = dict(model.named_buffers())
    holders = [(module, name, b) for module in model.modules() for name, b in module._buffers.items()]
    copies = [(t, t.detach().clone()) for t in (*buffers.values(), *inputs)]
    try:
        yield
    finally:
        for module, name, b in holders:
            module._buffers[name] = b
        with torch.no_grad():
            for t, copy in copies:
                if not torch.equal(t, copy):
                    t.copy_(copy)
        for device, state in states:
            set_random_state(device, state)


class Recorder(TorchFunctionMode):
    """Sees every call of a traced run: leaf tensors that are nobody's, reads by Python, and random draws.

    While tracing it also names mode and source line of each call in the scopes of its nodes, and keeps
    dead random results alive: without them the generator would not move as in eager mode.
    """

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known = {id(t) for t in known}
        self._alive: list[torch.Tensor] = []  # identities stay given while these live
        self.captured: list[torch.Tensor] = []
        self.host_reads: list[str] = []
        self.kept: list[torch.Tensor] = []
        self.inside_function = False  # an autograd.Function is one operation, however many it calls
        self.calls: dict[tuple[Mode, str], int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracing = torch._C._get_tracing_state()
        if tracing is None or self.inside_function:
            return func(*args, **(kwargs or {}))
        name = _call_name(func)
        if name in _SIZES:
            with _untraced(tracing):
                return func(*args, **(kwargs or {}))
        if not name.endswith("__get__"):
            self._look_for_captured((args, kwargs))
        if name in _HOST_READS and any(True for _ in tensors_in(args)):
            self.host_reads.append(f"{name} at {user_line()}")
        before = _draws(tracing)
        tracing.push_scope(self.scope())
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            tracing.pop_scope()
        if _draws(tracing) != before:
            self.kept.extend(tensors_in(result))
        for t in tensors_in(result):
            if t.grad_fn is None:
                self._remember(t)
        return result

    def scope(self) -> str:
        """A scope name that stands for the present mode and source line."""
        return f"@{self.calls.setdefault((current_mode(), user_line()), len(self.calls))}@"

    def _look_for_captured(self, arguments: Any) -> None:
        for t in tensors_in(arguments):
            if t.grad_fn is None and id(t) not in self._known:
                self._remember(t)
                self.captured.append(t)

    def _remember(self, t: torch.Tensor) -> None:
        if id(t) not in self._known:
            self._known.add(id(t))
            self._alive.append(t)


def _call_name(func: Any) -> str:
    return ".".join((resolve_name(func) or getattr(func, "__name__", str(func))).split(".")[-2:])


_INSIDE = (os.path.dirname(__file__), contextlib.__file__, str(torch.__path__[0]))


def user_line() -> str:
    """The innermost source line outside this file and torch, as "file.py:12"."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""


@contextlib.contextmanager
def _untraced(tracing: Any) -> Iterator[None]:
    """What runs here is not recorded."""
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def _draws(tracing: Any) -> bytes:
    """The state of the CPU generator."""
    with _untraced(tracing):
        return torch.get_rng_state().numpy().tobytes()


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


@contextlib.contextmanager
def _plain_checkpoint() -> Iterator[None]:
    """Reentrant checkpoints run their function directly: we choose what is recomputed."""
    cls = torch.utils.checkpoint.CheckpointFunction
    cls.apply = staticmethod(lambda function, preserve, *args: function(*args))  # type: ignore[method-assign]
    try:
        yield
    finally:
        del cls.apply


@contextlib.contextmanager
def _transformers_as_eager() -> Iterator[None]:
    """transformers builds other masks when it sees a trace; let it do what it does in eager mode."""
    module: Any = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_jit_tracing", None)
    if original is not None:
        module.is_jit_tracing = lambda: False
    try:
        yield
    finally:
        if original is not None:
            module.is_jit_tracing = original


def record(
    function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
) -> tuple[Any, Recorder, list[torch.Tensor]]:
    """Trace ``function(*inputs)`` into a torch.jit graph whose inputs are ``inputs``.

    Returns the graph, what was seen, and the function's results. The graph's outputs are these, then
    results of random calls that nobody reads.
    """
    seen = Recorder(inputs)
    results: list[torch.Tensor] = []

    def traced(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with seen:
            results[:] = function(*args)
        known = {id(t) for t in results}
        return (*results, *{id(t): t for t in seen.kept if id(t) not in known}.values())

    lookup = torch.jit._trace._create_interpreter_name_lookup_fn()
    with (
        _functions_marked(seen),
        _plain_checkpoint(),
        _transformers_as_eager(),
        drop_saved(),
        warnings.catch_warnings(),
    ):
        # What Python reads from data, the recorder sees.
        warnings.simplefilter("ignore", torch.jit._trace.TracerWarning)
        cached = torch.is_autocast_cache_enabled()
        torch.clear_autocast_cache()  # a weight cast before the trace would be a tensor from nowhere
        torch.set_autocast_cache_enabled(False)
        try:
            graph, _ = torch._C._create_graph_by_tracing(traced, tuple(inputs), lookup, True, False)
        except RuntimeError as error:
            raise UnsupportedError(f"torch.jit could not trace the module: {error}") from error
        finally:
            torch.set_autocast_cache_enabled(cached)
    torch._C._jit_pass_inline(graph)
    return graph, seen, results
