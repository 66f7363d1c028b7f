"""TorchDynamo as ``attach`` uses it: its settings, and the function that it compiles."""

from __future__ import annotations

import itertools
import logging
import re
import warnings
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from rkgb.trace.casts import NAMES_OF_RECURRENT
from rkgb.trace.patches import TRACING
from rockmate.calls.guards import guard_what_equals_and_differs
from rockmate.calls.unguarded import is_captured, see_what_is_not_guarded, wrap

_SETTINGS = {
    "recompile_limit": 64,  # captures of one model, at most
    "accumulated_recompile_limit": 512,
    "optimize_ddp": False,  # one graph, whose gradients come one by one, so that buckets overlap as in eager mode
    "allow_unspec_int_on_nn_module": True,  # a counter on a module is no reason to capture again
    "specialize_float": False,
    "allow_rnn": True,
    "enable_dynamo_decompositions": False,  # into operations that compute other bits
    "skip_nnmodule_hook_guards": False,  # hooks are added and removed
    "suppress_errors": False,
    "do_not_emit_runtime_asserts": True,  # that pass computes with fractions as algebra does: (x + 1e9) - 1e9 was x
}


def settings() -> dict[str, Any]:
    """TorchDynamo's settings while it captures calls, of those that this version of torch has.

    What transformers and others say once (``logger.warning_once``) is no reason not to capture a call: it is not said.
    """
    config = torch._dynamo.config
    once = {f for name, f in vars(logging.Logger).items() if name.endswith("_once")}
    found = {**_SETTINGS, "ignore_logging_functions": getattr(config, "ignore_logging_functions", set()) | once}
    return {name: value for name, value in found.items() if hasattr(config, name)}


def prepare() -> None:
    """From now on TorchDynamo captures as calls of ours need it; for all others that compile nothing changes.

    Where a call of ours is captured, it has ``settings``. Calls that run as they were captured go without: to set and
    reset them takes longer than the guards of many models.
    """
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_news)
    wrap(torch._dynamo.guards, "recompilation_reason_for_no_tensor_aliasing_guard", _explained)
    wrap(torch._dynamo.convert_frame.CatchErrorsWrapper, "__call__", _under_settings)
    wrap(torch._dynamo.guards, "profile_guard_manager", _timed)
    see_what_is_not_guarded()
    guard_what_equals_and_differs()
    know_sizes_of_recurrent_layers()


def _under_settings(convert: Callable[..., Any], *args: Any) -> Any:
    if not is_captured():
        return convert(*args)
    with TRACING, torch._dynamo.config.patch(settings()):
        return convert(*args)


def _timed(profile: Callable[..., float], *args: Any) -> float:
    """TorchDynamo empties the processor's caches to time the guards of each capture, for its own logs."""
    return 0.0 if is_captured() else profile(*args)


def _explained(explain: Callable[..., Any], *args: Any) -> Any:
    """TorchDynamo captures again where a tensor is given twice, and fails where it looks for the reason in an argument
    that was left out. Then it goes on without a reason.
    """
    try:
        return explain(*args)
    except (KeyError, IndexError, AttributeError, TypeError):
        return ["Duplicate tensors found"]


def hide_own_warnings() -> None:
    """What TorchDynamo's own code is warned of while it captures is no user's concern, nor a reason to fail where
    warnings are errors.
    """
    if _OF_DYNAMO not in warnings.filters:
        warnings.filterwarnings("ignore", module=_MODULES)


def _is_news(record: logging.LogRecord) -> bool:
    """A call that the module refuses fails in TorchDynamo first, which logs pages; the module's own error says it.
    Where values are read, TorchDynamo logs which of its settings to change; a model that is followed needs none.
    In torch 2.11 it fails to log its settings, of which some are functions.
    """
    return not (is_captured() and str(record.msg).startswith(_NO_NEWS))


_LOGGERS = (
    "torch._subclasses.fake_tensor",
    "torch._dynamo.convert_frame",
    "torch._dynamo.metrics_context",
    "torch._dynamo.variables.tensor",
)

_NO_NEWS = (
    "failed while attempting to run meta",
    "WON'T CONVERT",
    "Graph break from `Tensor.item()`",
    "Unexpected exception logging compilation metrics",
)


_MODULES = r"torch\.(_dynamo|_subclasses|_higher_order_ops|fx)\."
_OF_DYNAMO = ("ignore", None, Warning, re.compile(_MODULES), 0)


def new_entry() -> Callable[..., Any]:
    """The function that TorchDynamo compiles: one of its own for each model, since captures are kept with its code."""

    def entry(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], unpadded: bool | None) -> Any:
        if unpadded:  # a branch, which TorchDynamo guards
            return model._call_impl(*args, **kwargs)
        return model._call_impl(*args, **kwargs)

    name = f"entry_{next(_numbers)}"  # what TorchDynamo learns of a function, it knows by name and line
    variables = {"__name__": __name__, "__builtins__": __builtins__}  # it keeps what it makes in the function's globals
    return FunctionType(entry.__code__.replace(co_name=name), variables, name)


_numbers = itertools.count()


def know_sizes_of_recurrent_layers() -> None:
    """From now on, where a call of ours is captured, recurrent operations on tensors without memory are one operation.

    torch's decompositions make one for each step in time. That takes seconds, and a capture serves one length only.
    """
    for name in NAMES_OF_RECURRENT:
        operator = getattr(torch.ops.aten, name).input
        kernels: dict[Any, Callable[..., Any]] = operator.py_kernels
        for key, kernel in kernels.items():
            if not isinstance(kernel, partial):
                kernels[key] = partial(_of_one_step, kernel)
        operator._dispatch_cache.clear()


def _of_one_step(kernel: Callable[..., Any], input: Any, hx: Any, *others: Any) -> Any:
    """What ``kernel`` makes of the first step, with all steps in its place. ``others``: the last is batch_first."""
    if not (is_captured() and is_fake(input)):
        return kernel(input, hx, *others)
    along = 1 if others[-1] else 0
    output, *states = kernel(input.narrow(along, 0, 1), hx, *others)
    steps = output.transpose(0, along).expand(input.shape[along], -1, -1).clone()
    return steps.transpose(0, along), *states
