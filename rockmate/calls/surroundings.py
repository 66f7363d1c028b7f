"""What is in force around a call: hooks of all modules, hooks of saved tensors, tracers and transforms of torch."""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as modules
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode

from rkgb.graphs import Mode
from rkgb.program import in_mode
from rkgb.settings import are_in_force, under_settings
from rkgb.trace.other_draws import draws_put_back
from rkgb.trace.patches import is_traced
from rkgb.warn import warn
from rockmate.errors import BudgetWarning, HookError

_GLOBAL_HOOKS = {
    "register_module_forward_pre_hook": modules._global_forward_pre_hooks,
    "register_module_forward_hook": modules._global_forward_hooks,
    "register_module_full_backward_pre_hook": modules._global_backward_pre_hooks,
    "register_module_full_backward_hook": modules._global_backward_hooks,
}


def is_recorded() -> bool:
    """Whether torch.jit.trace, torch.export or another Rockmate records operations: those of the model itself.

    ``is_compiling`` is one flag for all threads. Fake tensors tell whether this one records.
    """
    if is_traced() or torch._C._is_tracing() or torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_compiling() and torch._guards.detect_fake_mode() is not None


def is_transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is in force. Under the first, autograd cannot
    be told what to save; a plan computes no tangents.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def runs_plainly(values: Sequence[Hashable]) -> bool:
    """Whether the settings ``values`` are in force, and no transform nor hook of saved tensors."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return False
    depth = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return are_in_force(values) and depth == 0 and not is_transformed()


@contextlib.contextmanager
def untransformed() -> Iterator[None]:
    """Out of torch.func.vmap and of that of ``is_grads_batched``, under which a backward may run: what the forward
    computed was not batched.
    """
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    depth = torch._C._vmapmode_increment_nesting() - 1
    for _ in range(depth + 1):
        torch._C._vmapmode_decrement_nesting()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in range(depth):
            torch._C._vmapmode_increment_nesting()


@contextlib.contextmanager
def running_in(mode: Mode, values: Sequence[Hashable]) -> Iterator[None]:
    """Run in ``mode`` under the settings ``values``, out of transforms and hooks of saved tensors."""
    with untransformed(), without_saved_hooks(), under_settings(values), in_mode(mode):
        yield


def leave_plan(where: str) -> None:
    """Say that the model itself runs; ``where``: "under …"."""
    warn(f"{where} the model itself runs, and the memory budget does not hold", BudgetWarning)


IN_TRANSFORMS = "under torch.func's transforms and in forward mode"


def function_mode() -> str:
    """The class of a TorchFunctionMode in force that is not torch's own, empty if there is none."""
    modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []
    return next((type(m).__name__ for m in modes if not type(m).__module__.startswith("torch.")), "")


def graph_is_retained() -> bool:
    """Whether the backward that runs was called with retain_graph=True (or create_graph=True)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def warn_unplanned(why: str) -> None:
    """Say that the budget is not promised for this call."""
    instead = _PENALTY if why == RETAINED else ""
    warn(
        f"{why}: results are right, but what is kept or computed again for it may exceed the memory budget{instead}",
        BudgetWarning,
    )


RETAINED = "backward was called with retain_graph=True (or create_graph=True)"
_PENALTY = ". A gradient penalty is planned where forward itself takes the derivative, and returns the loss"
ANOTHER = "a backward of a part of the graph, or a second one, computes again what the plan dropped"
INSTEAD = "forward computed otherwise than in the call before, after what its plan keeps was let go"


def witnesses(suspended: int = 0) -> tuple[Hashable, ...]:
    """What is told of each operation now, or of each tensor that autograd saves: hooks of saved tensors, why there may
    be none, and the number of modes that see every operation, ``suspended`` ones among them.

    Under others than at the beginning of a call, which its forward has entered itself, captured graphs have no plan:
    TorchDynamo does not record such contexts, and what the executor runs and saves is not what they are to be told of.
    """
    autograd = torch._C._autograd
    hooks = autograd._top_saved_tensors_default_hooks(True)
    modes = torch._C._len_torch_dispatch_stack() + suspended
    return hooks, autograd._saved_tensors_hooks_get_disabled_error_message(), modes


_GIVING_BACK = ("torch.utils.checkpoint.", "torch.autograd.graph.")
"""Whose hooks of saved tensors give back what they were given."""


def saved_hooks() -> str:
    """Where others' hooks of saved tensors are in force that may give back something else: "under …"; else empty."""
    hooks, refused, _ = witnesses()
    if refused is not None:
        return "under torch.autograd.graph.disable_saved_tensors_hooks"
    pack = hooks[0] if isinstance(hooks, tuple) else None
    name = "" if pack is None else f"{pack.__module__}.{getattr(pack, '__qualname__', type(pack).__qualname__)}"
    return "" if pack is None or name.startswith(_GIVING_BACK) else f"under the hook of saved tensors {name}"


def warn_of_saved_hooks() -> None:
    """Say that others' hooks of saved tensors (torch.utils.checkpoint, save_on_cpu) allocate beside the plan."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        warn(
            "a model with a plan was called under hooks of saved tensors (torch.utils.checkpoint, save_on_cpu): "
            "results are right, but they keep or compute tensors of their own, for which the budget has no room",
            BudgetWarning,
        )


def check_global_hooks() -> None:
    """Raise ``HookError`` where a hook of all modules would not be called; torch's own only say where it is."""
    for register, hooks in _GLOBAL_HOOKS.items():
        for hook in hooks.values():
            if not str(getattr(hook, "__module__", type(hook).__module__)).startswith("torch."):
                name = getattr(hook, "__qualname__", type(hook).__qualname__)
                raise HookError(
                    f"the hook {name} of all modules ({register}) would not be called under a plan, which "
                    "runs operations and not modules. Remove it (handle.remove()) before training; in eval() mode "
                    "and without gradients it is called."
                )


def keep_draws_of_other_threads() -> None:
    """TorchDynamo is about to put the state of Python's generator back to what it was before it captured: not so, as
    other threads may have drawn meanwhile.
    """
    if threading.active_count() == 1:
        return
    this, original = threading.get_ident(), random.setstate

    def setstate(state: Any) -> None:
        if threading.get_ident() != this:
            original(state)
        else:
            random.setstate = original

    random.setstate = setstate


@contextlib.contextmanager
def modes_suspended() -> Iterator[list[Any]]:
    """Run without the modes that see every operation, which TorchDynamo does not run under; these are returned."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    try:
        yield modes
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


@contextlib.contextmanager
def modes_again(modes: list[Any]) -> Iterator[None]:
    """Within ``modes_suspended``: run under them."""
    for mode in reversed(modes):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


@contextlib.contextmanager
def put_back_if_it_fails() -> Iterator[None]:
    """Capture a call. Where that fails within a transform of torch.func, TorchDynamo leaves what the transform sets: it
    is put back here.
    """
    autograd, functorch = torch._C._autograd, torch._C._functorch
    message, depth = autograd._saved_tensors_hooks_get_disabled_error_message(), _transforms()
    try:
        yield
    except BaseException:
        for _ in range(_transforms() - depth):
            functorch.pop_dynamic_layer_stack()
        if autograd._saved_tensors_hooks_get_disabled_error_message() != message:
            if message is None:
                autograd._saved_tensors_hooks_enable()
            else:
                autograd._saved_tensors_hooks_disable(message)
        raise


def _transforms() -> int:
    """How many transforms of torch.func are in force."""
    found = torch._C._functorch.get_interpreter_stack()
    return 0 if found is None else len(found)


@contextlib.contextmanager
def without_saved_hooks() -> Iterator[None]:
    """Run without the hooks of saved tensors that are in force."""
    autograd = torch._C._autograd
    with contextlib.ExitStack() as saved:
        while top := autograd._top_saved_tensors_default_hooks(True):
            autograd._pop_saved_tensors_default_hooks()
            saved.callback(autograd._push_saved_tensors_default_hooks, *top)
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Plan without what the caller's context would add: hooks of saved tensors (torch.utils.checkpoint,
    save_on_cpu), modes that see every operation (FlopCounterMode), torch's own hooks of all modules, and the cache
    of parametrizations. Afterwards Python's and NumPy's generators are as before.

    Raises ``HookError`` for others' hooks of all modules.
    """
    check_global_hooks()
    with (
        draws_put_back(),
        without_cached_parametrizations(),
        without_global_hooks(),
        without_saved_hooks(),
        _disable_current_modes(),
    ):
        yield


def without_cached_parametrizations() -> contextlib.AbstractContextManager[Any]:
    """Run as out of ``torch.nn.utils.parametrize.cached()``, and leave its cache as it is."""
    return patch.object(parametrize, "_cache_enabled", 0)


@contextlib.contextmanager
def without_global_hooks() -> Iterator[None]:
    """Run without hooks of all modules: torch's own, which only say where it is."""
    with contextlib.ExitStack() as held:
        for hooks in _GLOBAL_HOOKS.values():
            held.callback(hooks.update, dict(hooks))
            hooks.clear()
        yield


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
