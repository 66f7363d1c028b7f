"""Models and samples that no plan can be made for are refused before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from rkgb.sample import Call, Sample, call_of
from rkgb.warn import warn
from rockmate.errors import BudgetWarning, InputError
from rockmate.planning.wrappers import check_wrappers


def refuse_lazy(model: torch.nn.Module) -> None:
    """Raise ``InputError`` where layers have no sizes yet."""
    if lazy := _first_lazy(model):
        raise InputError(
            f"{lazy} of the model has no shape yet (a lazy module): call the model once on the sample before, as "
            "the optimizer needs it too"
        )


def gets_sizes(model: torch.nn.Module, name: str) -> bool:
    """Whether layers get their sizes in the call that comes, so that there is nothing to plan yet, with a warning."""
    lazy = _first_lazy(model)
    if lazy:
        warn(
            f"{name}: layers get their sizes in this call ({lazy}), which runs with no budget. The next one is planned",
            BudgetWarning,
        )
    return bool(lazy)


def _first_lazy(model: torch.nn.Module) -> str:
    """The first parameter or buffer that has no shape yet; empty if there is none."""
    return next((n for n, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)), "")


def checked_type(model: object) -> None:
    """Raise ``InputError`` for anything but a module."""
    if not isinstance(model, torch.nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise InputError(f"the model is {given}, not a torch.nn.Module: the module comes first, then the rest")


def checked_module(model: torch.nn.Module) -> None:
    """Raise ``InputError`` for a model that no plan can be made for, before anything runs."""
    checked_type(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "the model was scripted or traced by torch.jit as a whole: give the module as it was before. Scripted "
            "parts of a model can be planned."
        )


def checked_call(
    model: torch.nn.Module,
    sample: Sample,
    sample_kwargs: dict[str, Any] | None,
    compile: bool = False,
) -> Call:
    """The call that the sample stands for; refuses what no plan can be made for, before anything runs."""
    checked_module(model)
    if torch.is_inference_mode_enabled():
        raise InputError("nothing can be trained under torch.inference_mode(): plan outside of it")
    check_wrappers(model, compile)
    refuse_lazy(model)
    if sample_kwargs is not None and not isinstance(sample_kwargs, Mapping):
        raise InputError(f"sample_kwargs is of type {type(sample_kwargs).__name__}: give a dict of keyword arguments")
    call = call_of(sample, sample_kwargs)
    inputs = call.tensors
    parameters = list(model.named_parameters())
    if not any(p.requires_grad for _, p in parameters) and not any(t.requires_grad for t in inputs):
        raise InputError(
            "nothing needs a gradient: no parameter of the model and no tensor of the sample requires grad, so there "
            "is nothing to save memory on. Set requires_grad on what is to be trained."
        )
    if meta := next((name for name, p in parameters if p.is_meta), ""):
        raise InputError(
            f"{meta} of the model is on the meta device, and has no values: build the model on a device, or move it "
            "with .to_empty(device=…) and load its weights"
        )
    devices = {p.device for _, p in parameters} or {t.device for t in inputs}
    for k, t in enumerate(inputs):
        if t.device not in devices and t.dim() > 0:
            raise InputError(
                f"tensor {k} of the sample is on {t.device}, the model on {', '.join(sorted(map(str, devices)))}: "
                f"move the sample with .to({str(next(iter(devices)))!r})"
            )
    return call
