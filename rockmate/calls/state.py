"""What of a module decides which graph a call runs, beside the values of tensors: modes, attributes, ties."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from rockmate.calls.python_state import NOTES, PLAIN
from rockmate.errors import HookError, InputError

_BY_IDENTITY = frozenset({FunctionType, BuiltinFunctionType, torch.Generator})

# Hooks of torch's own compute weights from others (spectral_norm, weight_norm); transformers' collect outputs.
_TRACED = ("torch.nn.utils.", "transformers.")


def module_key(model: torch.nn.Module) -> tuple[Hashable, frozenset[str]]:
    """(key, parameters that have no gradient but need one); modules with equal keys run the same graph on equal calls.

    Counts: the class, the mode and the plain attributes of every submodule (numbers, texts, None, tuples of them), the
    functions and generators that it holds, and its hooks; of every parameter and buffer the name, the form, and which
    other names are the same tensor. Runs at every call, hence the one plain loop.
    """
    modules: list[Any] = []
    tensors: list[Hashable] = []
    missing: list[str] = []
    first: dict[int, int] = {}
    seen: dict[int, int] = {}
    left: list[tuple[str, torch.nn.Module]] = [("", model)]
    while left:
        prefix, m = left.pop()
        at = seen.setdefault(id(m), len(seen))
        modules.append(at)
        if at < len(seen) - 1:
            continue
        held = m.__dict__
        if held["_backward_hooks"] or held["_backward_pre_hooks"]:
            raise _refused(prefix[:-1], m, next(iter((*m._backward_hooks.values(), *m._backward_pre_hooks.values()))))
        modules += (type(m), *held["_forward_hooks"], *held["_forward_pre_hooks"])
        _add_attributes(modules, held)
        for k, p in held["_parameters"].items():
            if p is not None:
                tensors += (k, first.setdefault(id(p), len(first)), *_form(p))
                if p.requires_grad and (not p.is_leaf or p.grad is None):
                    missing.append(prefix + k)
        for k, b in held["_buffers"].items():
            if b is not None:
                tensors += (k, first.setdefault(id(b), len(first)), *_form(b))
        left += [(f"{prefix}{k}.", child) for k, child in held["_modules"].items() if child is not None]
    return (tuple(modules), tuple(tensors)), frozenset(missing)


def missing_gradients(model: torch.nn.Module) -> frozenset[str]:
    """Parameters that have no gradient but need one: new memory that stays."""
    return module_key(model)[1]


def _form(t: torch.Tensor) -> tuple[Hashable, ...]:
    return t.requires_grad, t.dtype, t.shape, t.stride() if t.layout == torch.strided else t.layout, t.device


def _add_attributes(found: list[Any], held: dict[str, Any]) -> None:
    for k, v in held.items():
        kind = type(v)
        if kind in PLAIN:
            if not k.startswith(NOTES):
                found += (k, kind, v)
        elif kind in _BY_IDENTITY or (kind is tuple and all(type(x) in PLAIN for x in v)):
            found += (k, v)


Hooks = list[tuple[Callable[[], Any], int]]
"""Hooks of modules: what returns the dict that a hook is in, if that still is, and its key there."""


def hooks_of(model: torch.nn.Module) -> Hooks:
    """All hooks of the model's modules, now."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    held = [m.__dict__[kind] for m in model.modules() for kind in kinds]
    return [(weakref.ref(hooks), key) for hooks in held for key in hooks]


def any_is_gone(hooks: Hooks) -> bool:
    """Whether one of ``hooks`` was removed since."""
    return any(key not in (held() or ()) for held, key in hooks)


@contextlib.contextmanager
def watched_hooks(model: torch.nn.Module) -> Iterator[None]:
    """While the module is traced: hooks that change what they are given become part of the plan, others are refused.

    A plan runs the operations that were traced, so a hook that only looks on would be called once and never again.
    Raises ``HookError``, naming it.
    """
    put_back: list[tuple[dict[int, Any], int, Any]] = []
    silent: list[tuple[str, torch.nn.Module, Any]] = []
    for name, m in model.named_modules():
        for hooks in (m._forward_hooks, m._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                if not str(getattr(hook, "__module__", type(hook).__module__)).startswith(_TRACED):
                    put_back.append((hooks, key, hook))
                    hooks[key] = _Watch(hook, lambda m=m, name=name, hook=hook: silent.append((name, m, hook)))  # type: ignore[misc]
    try:
        yield
    finally:
        for hooks, key, hook in put_back:
            hooks[key] = hook
    for name, m, hook in silent:
        raise _refused(name, m, hook)


NO_REPLICAS = (
    "torch.nn.DataParallel copies modules to every device, and a plan is for one. Use one process for each device, in "
    "each attach(model, …), or Rockmate(model, …), and DistributedDataParallel around it."
)

_PARALLEL = {
    "DistributedDataParallel": "attach(model, …), or Rockmate(model, …), and DistributedDataParallel around it",
    "DataParallel": "one process for each device, in each attach(model, …), and DistributedDataParallel around it",
    "FullyShardedDataParallel": "fully_shard(Rockmate(block, …)) for each block",
    "FSDPModule": "fully_shard(Rockmate(block, …)) for each block",
}


def check_compiled(model: torch.nn.Module) -> None:
    """Raise ``InputError`` where the model, or a submodule, was compiled: a plan would not run what was compiled."""
    for name, m in model.named_modules():
        where = f"its submodule {name!r}" if name else "it"
        compiled = m.__dict__.get("_compiled_call_impl")
        if type(m).__name__ == "OptimizedModule" or (compiled is not None and not hasattr(compiled, "plan_for")):
            raise InputError(
                f"the model cannot be planned: {where} was compiled, and a plan runs operations one by one. Give the "
                "module as it was before torch.compile, or plan the parts beside it."
            )


def check_wrappers(model: torch.nn.Module) -> None:
    """Raise ``InputError`` where a wrapper is inside that must be outside, or cannot be: a plan does not run it."""
    check_compiled(model)
    for name, m in model.named_modules():
        where = f"its submodule {name!r}" if name else "it"
        for cls in type(m).__mro__:
            if cls.__name__ in _PARALLEL and cls.__module__.startswith("torch."):
                what = "was sharded by fully_shard" if cls.__name__ == "FSDPModule" else f"is a {cls.__name__}"
                raise InputError(f"the model cannot be planned: {where} {what}. Use {_PARALLEL[cls.__name__]}.")


class _Watch:
    """Calls a hook, and ``note`` if it returned nothing."""

    def __init__(self, hook: Callable[..., Any], note: Callable[[], None]) -> None:
        self.hook, self.note = hook, note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.hook(*args, **kwargs)
        if result is None:
            self.note()
        return result


def _refused(name: str, module: torch.nn.Module, hook: Any) -> HookError:
    where = f"{type(module).__name__} {name!r}" if name else f"the model itself ({type(module).__name__})"
    called = getattr(hook, "__qualname__", type(hook).__qualname__)
    return HookError(
        f"the hook {called} of {where} would not be called under a plan, which runs operations and not modules. "
        "Remove it (handle.remove()), or plan the submodules on both sides of it. Hooks of tensors and parameters, "
        "forward hooks that return a changed value, and hooks of a Rockmate itself work."
    )
