"""Wrappers of models that a plan does not run, and compiled modules."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from rockmate.errors import InputError

NO_REPLICAS = (
    "torch.nn.DataParallel copies modules to every device, and a plan is for one. Use one process for each device, in "
    "each attach(model, …), or Rockmate(model, …), and DistributedDataParallel around it."
)


class OwnCall:
    """What stands in the place of a module's calls, and is no compiled code."""

    def __reduce__(self) -> Any:
        """Copies and pickles of a model that holds its own handle have None there."""
        return type(None), ()


class PlainState:
    """The state of a module without what stands in the place of its calls, for copies and pickles.

    ``torch.nn.Module`` leaves that out itself; modules whose ``__getstate__`` is their own (``nn.LSTM``) do not.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> Any:
        """What the ``__getstate__`` of its class returns."""
        module = self._module()
        assert module is not None
        own = vars(module)
        taken: dict[str, Any] = {k: own.pop(k) for k in ("_compiled_call_impl", "__getstate__") if k in own}
        try:
            state = type(module).__getstate__(module)
            return dict(state) if state is own else state
        finally:
            own.update(taken)


def put_call(module: torch.nn.Module, call: OwnCall) -> None:
    """From now on ``call`` is what calls of ``module`` run."""
    own = vars(module)
    own["_compiled_call_impl"] = call
    if type(module).__getstate__ is not torch.nn.Module.__getstate__:
        own["__getstate__"] = PlainState(module)


def take_call(module: torch.nn.Module) -> None:
    """Calls of ``module`` are its own again."""
    own = vars(module)
    del own["_compiled_call_impl"]
    own.pop("__getstate__", None)


_PARALLEL = {
    "DistributedDataParallel": "attach(model, …), or Rockmate(model, …), and DistributedDataParallel around it",
    "DataParallel": "one process for each device, in each attach(model, …), and DistributedDataParallel around it",
    "FullyShardedDataParallel": "fully_shard(Rockmate(block, …)) for each block",
    "FSDPModule": "fully_shard(Rockmate(block, …)) for each block",
}


def check_compiled(model: torch.nn.Module, taken: bool = False) -> None:
    """Raise ``InputError`` where the model, or a submodule, was compiled: a plan would not run what was compiled.

    ``taken``: with ``compile=True`` what such a module was before is planned, and its operations are compiled anew.
    """
    compiled = compiled_parts(model)
    if type(model).__name__ == "OptimizedModule":
        raise InputError(
            "the model cannot be planned: it was compiled, and a plan runs operations one by one. Give the module as "
            "it was before torch.compile (model._orig_mod), with compile=True for compiled kernels."
        )
    if compiled and not taken:
        where = f"its submodule {compiled[0]!r}" if compiled[0] else "it"
        raise InputError(
            f"the model cannot be planned: {where} was compiled, and a plan runs operations one by one. Say "
            "compile=True, which plans the module as it was before torch.compile and runs compiled kernels, or give "
            "it as it was before."
        )


def compiled_parts(model: torch.nn.Module) -> list[str]:
    """The names of the modules of ``model``, itself included, that torch.compile or ``compile()`` has compiled."""
    return [name for name, m in model.named_modules() if _is_compiled(m)]


def _is_compiled(m: torch.nn.Module) -> bool:
    compiled = m.__dict__.get("_compiled_call_impl")
    return type(m).__name__ == "OptimizedModule" or (compiled is not None and not isinstance(compiled, OwnCall))


def check_wrappers(model: torch.nn.Module, taken: bool = False) -> None:
    """Raise ``InputError`` where a wrapper is inside that must be outside, or cannot be: a plan does not run it.

    ``taken``: see ``check_compiled``.
    """
    check_compiled(model, taken)
    for name, m in model.named_modules():
        where = f"its submodule {name!r}" if name else "it"
        for cls in type(m).__mro__:
            if cls.__name__ in _PARALLEL and cls.__module__.startswith("torch."):
                what = "was sharded by fully_shard" if cls.__name__ == "FSDPModule" else f"is a {cls.__name__}"
                raise InputError(f"the model cannot be planned: {where} {what}. Use {_PARALLEL[cls.__name__]}.")
