"""Wrappers of models that a plan does not run, and compiled modules."""

from __future__ import annotations

import torch

from rockmate.errors import InputError

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
