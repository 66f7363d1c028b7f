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


class Observer(TorchFunctionMode):
    """Records leaf tensors that are neither inputs nor the module's, reads by Python, and random calls."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known = {id(t) for t in known}
        self._alive: list[torch.Tensor] = []
        self.captured: list[torch.Tensor] = []
        self.host_reads: list[str] = []
        self.random_calls: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _call_name(func)
        if not name.endswith("__get__"):
            for t in tensors_in((args, kwargs or {})):
                if t.grad_fn is None and id(t) not in self._known:
                    self._remember(t)
                    self.captured.append(t)
        if name in _HOST_READS and any(True for _ in tensors_in(args)):
            self.host_reads.append(f"{name} at {user_line()}")
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if not torch.equal(before, torch.get_rng_state()):
            self.random_calls.add(name)
        for t in tensors_in(result):
            if t.grad_fn is None:
                self._remember(t)
        return result

    def _remember(self, t: torch.Tensor) -> None:
        """Note the tensor by identity; small ones are held, so that the identity is not given away again."""
        if id(t) not in self._known:
            self._known.add(id(t))
            self._alive.append(t)


def _call_name(func: Any) -> str:
    return ".".join((resolve_name(func) or getattr(func, "__name__", str(func))).split(".")[-2:])


_INSIDE = (__file__, contextlib.__file__, str(torch.__path__[0]))


def user_line() -> str:
    """The innermost source line outside this file and torch, as "file.py:12"."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""


class _Marks(TorchFunctionMode):
    """While tracing: notes mode and source line of each call in the scopes of its nodes; keeps dead random results."""

    def __init__(self, random_calls: set[str]) -> None:
        super().__init__()
        self._random = random_calls
        self.calls: dict[tuple[Mode, str], int] = {}
        self.kept: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.mark():
            result = func(*args, **(kwargs or {}))
        if self._random and _call_name(func) in self._random:
            self.kept.extend(tensors_in(result))
        return result

    @contextlib.contextmanager
    def mark(self) -> Iterator[None]:
        state = torch._C._get_tracing_state()
        if state is None:
            yield
            return
        call = self.calls.setdefault((current_mode(), user_line()), len(self.calls))
        state.push_scope(f"@{call}@")  # type: ignore[attr-defined]
        try:
            yield
        finally:
            state.pop_scope()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _plain_checkpoint() -> Iterator[None]:
    """Reentrant checkpoints run their function directly: we choose what is recomputed."""
    cls = torch.utils.checkpoint.CheckpointFunction
    cls.apply = staticmethod(lambda function, preserve, *args: function(*args))  # type: ignore[assignment]
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


def observe(function: Callable[[], Any], known: Sequence[torch.Tensor]) -> tuple[Any, Observer]:
    """Run ``function`` once; returns its result and what was observed."""
    observer = Observer(known)
    with _plain_checkpoint(), _transformers_as_eager(), drop_saved(), observer:
        result = function()
    return result, observer


def record(
    function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], random_calls: set[str]
) -> tuple[Any, list[tuple[Mode, str]], int]:
    """Trace ``function(*inputs)`` into a torch.jit graph whose inputs are ``inputs``.

    Returns the graph, the modes and source lines that scopes named "@k@" refer to, and how many of the
    graph's outputs are the function's (the rest are results of random calls that nobody reads: without them the
    generator would not move as in eager mode).
    """
    marks = _Marks(random_calls)
    count = 0

    def traced(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal count
        with marks:
            results = tuple(function(*args))
        count = len(results)
        seen = {id(t) for t in results}
        return results + tuple({id(t): t for t in marks.kept if id(t) not in seen}.values())

    lookup = torch.jit._trace._create_interpreter_name_lookup_fn()
    with _plain_checkpoint(), _transformers_as_eager(), drop_saved(), warnings.catch_warnings():
        # Sizes are numbers on purpose: another shape is traced again. What Python reads from data, the observer sees.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        try:
            graph, _ = torch._C._create_graph_by_tracing(traced, tuple(inputs), lookup, True, False)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise UnsupportedError(f"torch.jit could not trace the module: {error}") from error
    torch._C._jit_pass_inline(graph)
    return graph, list(marks.calls), count
