"""Where others would run an attached model past its plan: it is said, or refused."""

from __future__ import annotations

import importlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rkgb.trees import tensors_in
from rkgb.warn import warn_once
from rockmate.calls.front import Front
from rockmate.calls.surroundings import is_recorded, is_transformed
from rockmate.calls.unguarded import CAPTURING, wrap
from rockmate.errors import BudgetWarning, InputError
from rockmate.follow.following import is_followed
from rockmate.planning.wrappers import NO_REPLICAS, OwnCall, put_call, take_call


def watch_others(kind: type, attached: Callable[[torch.nn.Module], object]) -> None:
    """From now on, code that torch.compile makes says so once where it takes an attached model apart, torch.jit.script
    and a model's ``compile`` say so, too, and torch.nn.DataParallel makes no replicas of one. ``kind``: of what is put
    in the place of a model's calls, which ``attached`` returns, or None.

    torch's compiler takes seconds to import: where it is not there yet, the first torch.compile brings it.
    """
    _ATTACHED[:] = [kind, attached]
    module: Any = torch.nn.Module
    wrap(module, "_replicate_for_data_parallel", _refused)
    wrap(module, "compile", _replaced)
    module.__prepare_scriptable__ = _scripted
    if "torch._dynamo" in sys.modules:
        _watch_compiler()
    else:
        wrap(torch, "compile", _watched)


_ATTACHED: list[Any] = []
"""The arguments of ``watch_others``."""


def _refused(replicate: Callable[..., Any], model: torch.nn.Module) -> Any:
    if _ATTACHED[1](model) is not None:
        raise InputError(NO_REPLICAS)
    return replicate(model)


def _replaced(compile: Callable[..., Any], model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """``torch.nn.Module.compile``, which puts its code where the plan is."""
    is_attached = _ATTACHED[1](model) is not None
    compile(model, *args, **kwargs)
    if is_attached:
        warn_once(
            f"{type(model).__name__}.compile() was called after attach, and took the place of the plan: no budget "
            "holds. For compiled kernels under a plan, leave it out, and write attach(model, budget, compile=True)",
            BudgetWarning,
        )


def _scripted(model: torch.nn.Module) -> torch.nn.Module:
    """What torch.jit.script calls of each module."""
    if _ATTACHED[1](model) is not None:
        warn_once(
            f"{type(model).__name__} is attached, and what torch.jit.script makes of it runs with no plan, and no "
            "budget: train the module itself",
            BudgetWarning,
        )
    return model


def _watched(compile: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if getattr(torch.compile, "by_rockmate", None) is _watched:
        torch.compile = compile
    importlib.import_module("torch._dynamo")
    _watch_compiler()
    return compile(*args, **kwargs)


def warn_of_whole(part: torch.nn.Module, whole: str) -> None:
    """Say that the plan of ``part`` does not run: that of ``whole``, as it is called, does."""
    warn_once(
        f"{type(part).__name__} is attached, and so is {whole}, of which it is a part: it runs under the plan of the "
        "whole, and its own budget does not hold. Attach only one of them (rockmate.detach)",
        BudgetWarning,
    )


def _watch_compiler() -> None:
    if wrap(torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable, "call_function", _taken_apart):
        kind = _ATTACHED[0]
        kind.__call__ = torch.compiler.disable(
            kind.__call__, reason="the model is attached, and runs under a plan of its own"
        )


def _taken_apart(call: Callable[..., Any], variable: Any, *args: Any) -> Any:
    whole = getattr(CAPTURING, "name", None)
    if _ATTACHED[1](variable.value) is None:
        pass
    elif whole is not None:
        warn_of_whole(variable.value, whole)
    else:
        warn_once(
            f"{type(variable.value).__name__} is attached, but called within code that torch.compile makes, where it "
            "runs with no plan, and no budget: call it outside of that, or compile the parts beside it",
            BudgetWarning,
        )
    return call(variable, *args)


def watch_layers(model: torch.nn.Module, front: Front) -> None:
    """From now on it is said once where layers of ``model`` run in other code than its forward: a method of its own,
    or, where the model is attached, the user's. ``front``: of its plans.
    """
    for layer in _layers(model):
        if isinstance(layer.__dict__.get("_compiled_call_impl"), WatchedCall | None):
            put_call(layer, WatchedCall(layer, model, front))


def unwatch_layers(model: torch.nn.Module, front: Front) -> None:
    """The calls of the model's layers are their own."""
    for layer in _layers(model):
        found = layer.__dict__.get("_compiled_call_impl")
        if isinstance(found, WatchedCall) and found.front() is front:
            take_call(layer)


def _layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The submodules that code of ``model`` calls: what is in lists and dicts of modules, too."""
    for child in model.children():
        if inspect.getattr_static(child, "forward") is torch.nn.Module.forward:  # a container is not called
            yield from _layers(child)
        else:
            yield child


class WatchedCall(OwnCall):
    """In the place of the calls of one layer, where ``torch.nn.Module.__call__`` looks: runs it as it is."""

    def __init__(self, layer: torch.nn.Module, model: torch.nn.Module, front: Front) -> None:
        self.layer, self.model, self.front = weakref.ref(layer), weakref.ref(model), weakref.ref(front)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer()
        result = layer._call_impl(*args, **kwargs)  # type: ignore[union-attr]
        if torch.compiler.is_dynamo_compiling() or not torch.is_grad_enabled():
            return result
        model, front = self.model(), self.front()
        if model is not None and front is not None and not getattr(front.inside, "on", False):
            _look_around(layer, model, front, result)
        return result


def _look_around(layer: Any, model: torch.nn.Module, front: Front, result: Any) -> None:
    """Say that ``layer`` runs without a plan, if that is not known, and it is training."""
    in_backward = torch._C._current_graph_task_id() != -1  # a checkpoint runs it again
    if in_backward or is_recorded() or is_followed() or is_transformed():
        return
    if not any(t.requires_grad for t in tensors_in(result)):
        return
    caller = _caller_in(model, layer)
    if caller == "_call_impl" or not (caller or model.__dict__.get("_compiled_call_impl") is front):
        return
    unwatch_layers(model, front)
    path = next((path for path, m in model.named_modules() if m is layer), type(layer).__name__)
    what = f"{front.name}.{caller}" if caller else f"a call of {path}"
    warn_once(
        f"{what} runs layers of {front.name} without a plan, and no budget holds there: a plan is for a call of the "
        "module, model(…), with all that its forward calls. Have forward do this, or attach, instead of the whole, the "
        f"submodules that run there (the first one is {path})",
        BudgetWarning,
    )


def _caller_in(model: torch.nn.Module, layer: torch.nn.Module) -> str:
    """The first method of ``model`` that led to ``layer``; "_call_impl" if the module was called, or another one that
    has the layer, too (a shallow copy); empty if none led here.
    """
    found, frame = "", sys._getframe(1)
    own = set(model.modules())
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and hasattr(type(model), code.co_name):
            held = frame.f_locals
            caller: Any = held.get(code.co_varnames[0])
            if type(held) is dict:
                held.clear()  # a copy of the frame's variables, which would keep tensors
            if caller is model:
                found = code.co_name
            elif code is torch.nn.Module._call_impl.__code__ and caller not in own:
                found = code.co_name if any(m is layer for _, m in caller.named_modules({model})) else found
        if found == "_call_impl":
            break
        frame = frame.f_back  # type: ignore[assignment]
    return found
