"""A model under a memory budget, in place: TorchDynamo captures what its calls do, Rockmate plans and runs that.

``torch.nn.Module.compile`` installs a compiler in a module in the same way: the module keeps its class, its methods and
its state, and copies and pickles of it are plain modules.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack, overload

import torch

from rkgb.sample import Sample
from rockmate.budget import parse_budget
from rockmate.calls.attachment import Attachment
from rockmate.calls.others import warn_of_whole, watch_layers, watch_others
from rockmate.calls.terms import Terms, is_least
from rockmate.errors import InputError
from rockmate.optimizers import OPTIMIZERS
from rockmate.pieces.inductor import prepare_for_pieces
from rockmate.planning.checks import checked_call, checked_module, checked_type
from rockmate.planning.options import options_of
from rockmate.planning.wrappers import check_compiled, put_call
from rockmate.signed import called_right
from rockmate.tell import be_heard


class AttachOptions(TypedDict, total=False):
    """The options of ``attach``."""

    sample: Sample | None
    sample_kwargs: dict[str, Any] | None
    costs: str
    loss_memory: int | str | None
    on_infeasible: str
    time_limit: float | None
    solver: str
    progress: bool | None
    cache: bool | str | os.PathLike[str] | None
    compile: bool
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@overload
def attach(model: torch.nn.Module, budget: int | float | str, **options: Unpack[AttachOptions]) -> Attachment: ...


@overload
def attach(
    model: Sequence[torch.nn.Module], budget: int | float | str, **options: Unpack[AttachOptions]
) -> tuple[Attachment, ...]: ...


@called_right
def attach(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    budget: int | float | str,
    *,
    sample: Sample | None = None,
    sample_kwargs: dict[str, Any] | None = None,
    costs: str = "measured",
    loss_memory: int | str | None = None,
    on_infeasible: str = "error",
    time_limit: float | None = None,
    solver: str = "auto",
    progress: bool | None = None,
    cache: bool | str | os.PathLike[str] | None = True,
    compile: bool = False,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> Attachment | tuple[Attachment, ...]:
    """Train ``model`` under ``budget``, in place: from now on its calls with gradients run under a plan.

    The model stays what it is: its class, methods, state and attributes; copies and pickles of it are plain modules.
    Without ``sample`` a plan is made at the first call with gradients, and at the first of each new kind. Calls without
    gradients, and those for which the budget does not bind, run as they did before. Calls that come before the backward
    of others are planned together with these, from the second such step on.

    Args:
        model: Any module whose tensors lie on one device. A list of modules that run in one step, such as a generator
            and its discriminator, shares the budget; then a tuple of what is returned for each comes back.
        budget: What one step may allocate, forward and backward, in bytes or as text: "8 GiB", "60%", "auto".
        sample: A call to plan at once: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
        sample_kwargs: Keyword arguments beside a tuple.
        costs: "measured" times every operation, "flops" models them: the same plan on every run.
        loss_memory: Bytes that the loss allocates beside the outputs and their gradients, as a number or as text
            ("200 MiB"): the least room for it. What it is observed to take beyond that counts from then on.
        on_infeasible: "error" raises ``InfeasibleBudgetError`` where no plan fits the budget, "least" warns
            (``BudgetWarning``) and takes the plan of least memory.
        time_limit: Seconds after which the search for a plan ends with the best so far; by default 60 for each integer
            program.
        solver: One of ``solvers.solver_names(solvers.Problem)``.
        progress: Whether to show how far planning is; by default on a terminal, when it takes more than a second.
        cache: Where costs and schedules are kept: a folder, True for the platform's, or False for nowhere.
        compile: Whether operations between the kernels of libraries run as pieces that Inductor has compiled
            (``docs/compile.md``).
        optimizer: What will step, or a list of such, for the budget "auto" and ``memory()``: what its state will take
            is known before its first step.

    Raises:
        InputError: An argument cannot be used.
        GraphError: The model cannot be traced; at a call that is planned.
        InfeasibleBudgetError: No plan fits the budget; at a call that is planned.
    """
    models = [model] if isinstance(model, torch.nn.Module) else _checked_list(model, sample)
    for k, one in enumerate(models):
        _check_new(one, models[:k], compile)
    if sample is None and sample_kwargs is not None:
        raise InputError("sample_kwargs without a sample: give sample=() if the call has no positional arguments")
    options = options_of(costs, loss_memory, time_limit, solver, cache, compile)
    terms = Terms(parse_budget(budget), options, progress, is_least(on_infeasible))
    OPTIMIZERS.watch()
    OPTIMIZERS.know(_checked_optimizers(optimizer))
    be_heard()
    attachments, kinds = [], [type(one) for one in models]
    for k, one in enumerate(models):
        if compile:
            prepare_for_pieces(one)
        attachment = Attachment(one, terms)
        if kinds.count(kinds[k]) > 1:
            attachment.name += f" [{k}]"  # its place in the list
        if sample is not None:
            attachment.plan_for(checked_call(one, sample, sample_kwargs, compile))
        attachments.append(attachment)
    for one, attachment in zip(models, attachments, strict=True):
        put_call(one, attachment)
        watch_layers(one, attachment)
        _attachments.add(attachment)
    watch_others(Attachment, attached)
    return attachments[0] if isinstance(model, torch.nn.Module) else tuple(attachments)


def _checked_list(models: object, sample: Sample | None) -> list[torch.nn.Module]:
    """Modules that are to share a budget."""
    if not isinstance(models, (list, tuple)):
        checked_type(models)
        raise InputError("give a module, or a list of modules that run in one step")
    if not models:
        raise InputError("the list of modules is empty: give the modules that run in one step")
    for k, one in enumerate(models):
        if not isinstance(one, torch.nn.Module):
            raise InputError(f"number {k} of the list is of type {type(one).__name__}: give torch.nn.Modules")
    if sample is not None:
        raise InputError("sample= is for one module: the calls of several are planned when they come")
    return list(models)


def _checked_optimizers(given: Any) -> list[torch.optim.Optimizer]:
    """The optimizers among the arguments."""
    found = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise InputError(
                f"optimizer= is of type {type(one).__name__}: give a torch.optim.Optimizer, or a list of such; for "
                "others leave it out: two moments of each trained parameter are counted"
            )
    return found


def _check_new(model: torch.nn.Module, others: Sequence[torch.nn.Module], compile: bool) -> None:
    """Raise ``InputError`` for a module that cannot be attached. ``others``: that are attached together with it."""
    checked_module(model)
    if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
        raise InputError(f"the model is a {type(model).__name__}, which a plan does not run: attach model.module")
    if hasattr(model, "_rockmate_attachment"):
        raise InputError("the model is a Rockmate, which has a plan: set rk.budget, or attach rk.original")
    if attached(model) is not None:
        raise InputError(
            "the model is attached already: set the budget of what attach returned (rockmate.attached(model).budget), "
            "or rockmate.detach(model) first"
        )
    for other in others:
        if other is model:
            raise InputError(f"the {type(model).__name__} is in the list more than once: give each module once")
        if any(m is model for m in other.modules()) or any(m is other for m in model.modules()):
            raise InputError(
                f"of the modules in the list, the {type(model).__name__} is the {type(other).__name__}, a part of it, "
                "or has it as a part: attach the larger one alone"
            )
    check_compiled(model, compile)
    for attachment in list(_attachments):
        if attachment.is_around(model):
            warn_of_whole(model, attachment.name)


_attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()


def attached(model: torch.nn.Module) -> Attachment | None:
    """What ``attach`` returned for ``model``; None if it is not attached. Raises ``InputError`` for no module."""
    checked_type(model)
    found = model.__dict__.get("_compiled_call_impl")
    return found if isinstance(found, Attachment) else None


@called_right
def detach(model: torch.nn.Module) -> None:
    """The model runs as it did before ``attach``. Raises ``InputError`` if it is not attached."""
    found = attached(model)
    if found is None:
        raise InputError("the model is not attached")
    found.detach()
