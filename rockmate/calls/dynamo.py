"""TorchDynamo as ``attach`` uses it: its settings, the function that it compiles, and what it does not guard."""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

RECOMPILE_LIMIT = 64
"""Captures of one model, at most."""

_SETTINGS = {
    "recompile_limit": RECOMPILE_LIMIT,
    "accumulated_recompile_limit": 8 * RECOMPILE_LIMIT,
    "optimize_ddp": False,  # one graph, whose gradients come one by one, so that buckets overlap as in eager mode
    "allow_unspec_int_on_nn_module": True,  # a counter on a module is no reason to capture again
    "specialize_float": False,
    "allow_rnn": True,
    "skip_nnmodule_hook_guards": False,  # hooks come and go
    "suppress_errors": False,
    "trace_numpy": False,  # as torch's operations, whose random numbers are others; the numbers would be constants
}


_OF_PARTS = {
    "suppress_errors": True,  # code that cannot be captured runs as it is
    "recompile_limit": 16 * RECOMPILE_LIMIT,  # functions of modules are shared by all models of their class
    "accumulated_recompile_limit": 128 * RECOMPILE_LIMIT,
}
"""Where a call is captured as several graphs."""


def settings(whole: bool) -> dict[str, Any]:
    """TorchDynamo's settings while calls are captured, of those that this version of torch has.

    What transformers and others say once (``logger.warning_once``) is no reason not to capture a call: it is not said.
    """
    config = torch._dynamo.config
    once = {f for name, f in vars(logging.Logger).items() if name.endswith("_once")}
    found = {
        **_SETTINGS,
        **({} if whole else _OF_PARTS),
        "ignore_logging_functions": getattr(config, "ignore_logging_functions", set()) | once,
    }
    return {name: value for name, value in found.items() if hasattr(config, name)}


def hide_own_warnings() -> None:
    """What TorchDynamo's own code is warned of while it captures is no user's concern, nor a reason to fail where
    warnings are errors.
    """
    if _OF_DYNAMO not in warnings.filters:
        warnings.filterwarnings("ignore", module=_MODULES)


_MODULES = r"torch\.(_dynamo|_subclasses|_higher_order_ops|fx)\."
_OF_DYNAMO = ("ignore", None, Warning, re.compile(_MODULES), 0)


def classes_of(model: torch.nn.Module) -> list[type]:
    """The classes of the model's modules, and those that they inherit from."""
    return list(dict.fromkeys(c for m in model.modules() for c in type(m).__mro__ if c is not object))


def unguarded(classes: list[type]) -> list[Any]:
    """What a call may read and TorchDynamo does not guard: methods of classes, the environment."""
    methods = [v for c in classes for v in c.__dict__.values() if isinstance(v, _METHODS)]
    return [*methods, *getattr(os.environ, "_data", {}).items()]


_METHODS = (FunctionType, property, staticmethod, classmethod)


def new_entry() -> Callable[..., Any]:
    """The function that TorchDynamo compiles: one of its own for each model, since captures are kept with its code."""

    def entry(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return model._call_impl(*args, **kwargs)

    name = f"entry_{next(_numbers)}"  # what TorchDynamo learns of a function, it knows by name and line
    variables = {"__name__": __name__, "__builtins__": __builtins__}  # it keeps what it makes in the function's globals
    return FunctionType(entry.__code__.replace(co_name=name), variables, name)


_numbers = itertools.count()


def _forward(self: torch.nn.Sequential, input: Any) -> Any:
    for module in self:
        input = module(input)
    return input


class _Containers:
    """While it is entered, ``torch.nn.Sequential.forward`` is a function outside of torch.

    TorchDynamo begins no graph in functions of torch's own: where it cannot capture the code that calls a container (a
    loop with a graph break), the layers in it would run as they are. Several threads may enter.
    """

    def __init__(self) -> None:
        self.lock, self.entered = threading.Lock(), 0
        self.original: Any = None

    def __enter__(self) -> None:
        with self.lock:
            if not self.entered:
                self.original = torch.nn.Sequential.forward
                if self.original is _ORIGINAL:
                    torch.nn.Sequential.forward = _forward  # type: ignore[method-assign]
            self.entered += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.entered -= 1
            if not self.entered:
                torch.nn.Sequential.forward = self.original  # type: ignore[method-assign]


_ORIGINAL = torch.nn.Sequential.forward
CONTAINERS_TOO = _Containers()
