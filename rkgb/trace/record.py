"""The trace of one run of a function, as a torch.jit graph."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch

from rkgb.device import KINDS
from rkgb.errors import BACKWARD_INSIDE, UnsupportedError
from rkgb.trace.attention import attention_by, attention_kernels
from rkgb.trace.capture import Recorder, call_in
from rkgb.trace.lines import place, user_line
from rkgb.trace.patches import traceable
from rkgb.trace.preserved import drop_saved
from rkgb.trace.respelled import spell_booleans
from rkgb.trace.tracer import scoped, untraced
from rkgb.trees import tensors_in

_C: Any = torch._C


@contextlib.contextmanager
def _functions_marked(seen: Recorder) -> Iterator[None]:
    """Name calls of ``autograd.Function.apply`` in the scopes, as the recorder does not see them."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        tracing = torch._C._get_tracing_state()
        if tracing is None or seen.inside_function:
            return original.__get__(None, cls)(*args, **kwargs)
        _refuse_hidden_parameters(cls, args)
        untraced_forward = patch.object(cls, "forward", staticmethod(_untraced_forward(cls.forward, tracing)))
        with scoped(tracing, seen.scope()), patch.object(seen, "inside_function", True), untraced_forward:
            return original.__get__(None, cls)(*args, **kwargs)

    with patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def _refuse_hidden_parameters(cls: type, args: tuple[Any, ...]) -> None:
    """Raise ``UnsupportedError`` for a module among the arguments whose parameters are no arguments.

    Such parameters can only be trained by a backward inside the function's own.
    """
    given = {id(t) for t in tensors_in(args)}
    held = (p for m in args if isinstance(m, torch.nn.Module) for p in m.parameters() if p.requires_grad)
    if any(id(p) not in given for p in held):
        raise UnsupportedError(BACKWARD_INSIDE.format(what=cls.__name__, line=user_line()))


def _untraced_forward(forward: Callable[..., Any], tracing: Any) -> Callable[..., Any]:
    """``forward`` of an ``autograd.Function``, whose operations are not recorded: its writes would be made twice."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._get_tracing_state() is None:  # another thread computes with the class meanwhile
            return forward(*args, **kwargs)
        with untraced(tracing):
            results = forward(*args, **kwargs)
        given = {id(t) for t in tensors_in(args)}
        for t in tensors_in(results):
            if id(t) not in given:  # the tracer wants one of some origin, and gives it another one
                _C._set_value_trace(t, _C._get_value_trace(torch.empty(0)))
        return results

    return run


def record(
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    seen: Recorder,
    model: torch.nn.Module,
) -> tuple[Any, list[torch.Tensor]]:
    """Trace ``function(*inputs)``, which calls ``model``, into a torch.jit graph whose inputs are ``inputs``.

    Returns the graph and the function's results. ``seen`` records what the graph cannot hold. The graph's outputs are
    the results, then the markers of ``Recorder.draws`` and those of ``Recorder.reads``. Raises ``UnsupportedError`` for
    what torch.jit cannot trace.
    """
    results: list[torch.Tensor] = []

    def traced(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with seen:
            results[:] = function(*args)
        _check_recorded(seen)
        return (*results, *seen.draws, *(t for read in seen.reads for t in read.markers()))

    with _traceable_run(model, seen):
        try:
            graph, _ = torch._C._create_graph_by_tracing(traced, tuple(inputs), lambda _: "", True, False)
        except RuntimeError as error:
            if "dynamo-optimized" in str(error):
                raise UnsupportedError(
                    f"the module calls what torch.compile made{place(error)}, and a plan runs operations one by one. "
                    "Call the function as it was before."
                ) from None
            raise UnsupportedError(f"torch.jit could not trace the module{place(error)}: {error}") from error
    torch._C._jit_pass_inline(graph)
    return graph, results


@contextlib.contextmanager
def _traceable_run(model: torch.nn.Module, seen: Recorder) -> Iterator[None]:
    """What holds while ``model`` is traced."""
    scopes = {m: name for name, m in model.named_modules()}  # calls of submodules are scopes, by qualified names
    with (
        _mode_put_back(),
        traceable(),
        _functions_marked(seen),
        patch.object(torch.jit._trace, "_trace_module_map", scopes),
        patch.object(torch, "clear_autocast_cache", seen.casts.clear),
        drop_saved(),
        warnings.catch_warnings(),
    ):
        # What Python reads from data, the recorder sees.
        warnings.simplefilter("ignore", torch.jit._trace.TracerWarning)
        # A weight that was cast before would be a tensor from nowhere. Within the trace the cache does what it does in
        # eager mode: a weight used twice is cast once, and the gradients of both uses are added before they are cast.
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            torch.clear_autocast_cache()


@contextlib.contextmanager
def _mode_put_back() -> Iterator[None]:
    """Captured programs switch gradients and autocast, and begin ``vmap``, by calls, of which an error leaves out those
    that switch back.
    """
    grad, nesting = torch.is_grad_enabled(), _autocast_nesting()
    transforms: Any = torch._C._functorch
    depth = transforms.get_dynamic_layer_stack_depth()
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in KINDS]
    try:
        with attention_by(attention_kernels()):
            yield
    finally:
        transforms.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        torch.set_grad_enabled(grad)
        for kind, enabled, dtype in casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        while _autocast_nesting() > nesting:
            torch.autocast_decrement_nesting()
        while _autocast_nesting() < nesting:
            torch.autocast_increment_nesting()


def _autocast_nesting() -> int:
    """How many autocast contexts there are around."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _check_recorded(seen: Recorder) -> None:
    """Raise ``UnsupportedError`` if the tracer has lost the run, or holds an operation in no form that torch has."""
    state = torch._C._get_tracing_state()
    if state is None:
        raise UnsupportedError(
            "forward catches the error of an operation, after which torch.jit records nothing: ask before it is "
            "called whether it can be, or plan the submodules around that line"
        )
    if unknown := spell_booleans(state.graph()):
        line = call_in(unknown.scopeName(), list(seen.calls))[1]
        given = ", ".join(str(v.type()) for v in unknown.inputs())
        raise UnsupportedError(
            f"torch.jit has no overload of {unknown.kind()} for ({given}), as it is called at {line}. Give "
            "the arguments in another form (tensors for numbers, say), or plan the submodules around that line."
        )
