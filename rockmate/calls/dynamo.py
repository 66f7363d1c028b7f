"""TorchDynamo as ``attach`` uses it: its settings, the function that it compiles, and what it does not guard."""

from __future__ import annotations

import itertools
import logging
import os
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
}


def settings() -> dict[str, Any]:
    """TorchDynamo's settings while calls are captured, of those that this version of torch has.

    What transformers and others say once (``logger.warning_once``) is no reason not to capture a call: it is not said.
    """
    config = torch._dynamo.config
    once = {f for name, f in vars(logging.Logger).items() if name.endswith("_once")}
    found = {**_SETTINGS, "ignore_logging_functions": getattr(config, "ignore_logging_functions", set()) | once}
    return {name: value for name, value in found.items() if hasattr(config, name)}


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
