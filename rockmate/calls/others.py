"""Where others would run an attached model past its plan: it is said, or refused."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from rkgb.warn import warn_once
from rockmate.calls.unguarded import CAPTURING
from rockmate.errors import BudgetWarning, InputError
from rockmate.planning.wrappers import NO_REPLICAS


def watch_others(kind: type, attached: Callable[[torch.nn.Module], object]) -> None:
    """From now on, code that torch.compile makes says so once where it takes an attached model apart, and
    torch.nn.DataParallel makes no replicas of one. ``kind``: of what is put in the place of a model's calls, which
    ``attached`` returns, or None.

    torch's compiler takes seconds to import: where it is not there yet, the first torch.compile brings it.
    """
    _refuse_replicas(attached)
    if "torch._dynamo" in sys.modules:
        _watch_compiler(kind, attached)
    elif not hasattr(torch.compile, "watches_for_rockmate"):
        original = torch.compile

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            if torch.compile is compile:
                torch.compile = original
            importlib.import_module("torch._dynamo")
            _watch_compiler(kind, attached)
            return original(*args, **kwargs)

        compile.watches_for_rockmate = True  # type: ignore[attr-defined]
        torch.compile = compile


def warn_of_whole(part: torch.nn.Module, whole: str) -> None:
    """Say that the plan of ``part`` does not run: that of ``whole``, as it is called, does."""
    warn_once(
        f"{type(part).__name__} is attached, and so is {whole}, of which it is a part: it runs under the plan of the "
        "whole, and its own budget does not hold. Attach only one of them (rockmate.detach)",
        BudgetWarning,
    )


def _watch_compiler(kind: Any, attached: Callable[[torch.nn.Module], object]) -> None:
    modules: Any = torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable
    original = modules.call_function
    if hasattr(original, "watches_for_rockmate"):
        return

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        whole = getattr(CAPTURING, "name", None)
        if attached(self.value) is None:
            pass
        elif whole is not None:
            warn_of_whole(self.value, whole)
        else:
            warn_once(
                f"{type(self.value).__name__} is attached, but called within code that torch.compile makes, where it "
                "runs with no plan, and no budget: call it outside of that, or compile the parts beside it",
                BudgetWarning,
            )
        return original(self, tx, args, kwargs)

    call_function.watches_for_rockmate = True  # type: ignore[attr-defined]
    modules.call_function = call_function
    kind.__call__ = torch.compiler.disable(
        kind.__call__, reason="the model is attached, and runs under a plan of its own"
    )


def _refuse_replicas(attached: Callable[[torch.nn.Module], object]) -> None:
    kind: Any = torch.nn.Module
    original = kind._replicate_for_data_parallel
    if hasattr(original, "watches_for_rockmate"):
        return

    @functools.wraps(original)
    def replicate(self: torch.nn.Module) -> Any:
        if attached(self) is not None:
            raise InputError(NO_REPLICAS)
        return original(self)

    replicate.watches_for_rockmate = True  # type: ignore[attr-defined]
    kind._replicate_for_data_parallel = replicate
