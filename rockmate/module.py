"""``Rockmate``: a module that computes what another does, in the memory it is given."""

from __future__ import annotations

import copy
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch

from rkgb.sample import Sample
from rockmate.budget import parse_budget
from rockmate.calls.attachment import Attachment
from rockmate.calls.handle import PlannedCall
from rockmate.calls.others import watch_layers
from rockmate.calls.runnable import Runnable
from rockmate.calls.terms import Terms
from rockmate.errors import BudgetError, InputError
from rockmate.follow.plan import FollowedPlan
from rockmate.memory import Memory
from rockmate.optimizers import OPTIMIZERS
from rockmate.pieces.inductor import prepare_for_pieces
from rockmate.planning.artefact import read_plan
from rockmate.planning.checks import checked_call, checked_module
from rockmate.planning.options import options_of
from rockmate.planning.plan import Plan
from rockmate.planning.wrappers import NO_REPLICAS
from rockmate.signed import called_right, signed
from rockmate.tell import be_heard
from solvers import Frontier


class _Forward:
    """Of a Rockmate, the model's forward under a plan, with its signature, or what was put in its place, around it; of
    its class, that of the model's class.
    """

    def __get__(self, rk: Rockmate | None, cls: type[Rockmate]) -> Callable[..., Any]:
        if rk is None:
            unplanned: Callable[..., Any] = super(Rockmate, cls).forward
            return unplanned
        own = rk._rockmate_forward
        return MethodType(signed(_planned, rk.original.forward), rk) if own is None else own

    def __set__(self, rk: Rockmate, function: Callable[..., Any] | None) -> None:
        object.__setattr__(rk, "_rockmate_forward", function)

    def __delete__(self, rk: Rockmate) -> None:
        self.__set__(rk, None)


class Rockmate(torch.nn.Module):
    """``model`` under a memory budget: same outputs, gradients and buffer updates, peak at most ``budget``.

    It is a twin of ``model``: its class is made of this one and the model's, and its ``__dict__`` is the model's. So
    attributes, methods, state, hooks and submodules are shared, in both directions; ``rk[0]``, ``len(rk)`` and
    ``isinstance(rk, type(model))`` are as for the model, and methods that call the module run under the plan. The model
    itself (``original``) runs without one.

    ``plan`` is the plan of the last call, or the one that replaced it after its backward. Calls of another
    shape, or with other settings (whatever the module's Python reads), are planned when they first come, and
    cached; likewise a call that finds no ``.grad`` where there was one at planning, since those stay and count. Without
    gradients the model itself runs. ``attach`` plans a model in place. Based on Rockmate (Zhao et al., ICML 2023).

    Args:
        model: Any module whose tensors lie on one device.
        sample: A tensor, a tuple of positional arguments, or a dict of keyword arguments, as ``model`` is called with.
        budget: What one forward and its backward may allocate above the level at the forward, in bytes or as text:
            "2 GiB", "60%" of what the step takes without recomputation, or "auto" for what the device has left for it
            when the optimizer's state is there.
        plan: Instead of a budget, a file that ``plan.save(path)`` wrote for this graph.
        sample_kwargs: Keyword arguments beside a tuple.
        costs: "measured" times every operation, "flops" models them, so that every run has the same plan.
        loss_memory: Bytes, or text such as "200 MiB", that the loss allocates beside the outputs and their gradients.
            In the first step that is the room for it, by default three times the outputs' bytes; what the loss took
            counts from then on (``plan.room``), but no less than was given. A scalar beside other outputs is taken for
            the loss until a step has shown where the backward starts.
        time_limit: Seconds after which a search ends with the best plan so far; by default 60 for each integer program.
        solver: One of ``solvers.solver_names(solvers.Problem)``, such as "sqrt" or one of your own; "auto" is the best.
        progress: Whether to show how far planning is; by default on a terminal, when it takes more than a second.
        cache: The folder where costs and schedules are kept for the next start of a script; True for what the
            environment variable ROCKMATE_CACHE says (a path, or "off"), or else the platform's folder for such files;
            False or None for nowhere.
        compile: Whether operations between the kernels of libraries run as pieces that Inductor has compiled
            (``docs/compile.md``).

    Raises:
        InputError: An argument cannot be used, or the model has an attribute of a name that is a Rockmate's own.
        InfeasibleBudgetError: No plan fits the budget.
        PlanError: The saved plan is for another graph.
        GraphError: The model cannot be traced.
    """

    # What is the twin's own cannot lie in its dictionary, which is the model's.
    __slots__ = ("_rockmate_attachment", "_rockmate_forward", "_rockmate_original")
    _rockmate_attachment: Attachment
    _rockmate_forward: Callable[..., Any] | None
    _rockmate_original: torch.nn.Module

    def __new__(cls, model: Any = None, *args: Any, **kwargs: Any) -> Rockmate:
        """An object of a class made of this one and the model's."""
        checked_module(model)
        if isinstance(model, Rockmate):
            raise InputError("the model is a Rockmate already: give rk.original, or set rk.budget")
        if taken := [name for name in _OWN if hasattr(model, name)]:
            raise InputError(
                f"{type(model).__name__} has an attribute {taken[0]!r} of its own, which would be hidden: use "
                "rockmate.attach(model, budget, sample=sample), which returns a handle with the plan"
            )
        made: Rockmate = object.__new__(_twin_class(cls, type(model)))
        return made

    @called_right
    def __init__(
        self,
        model: torch.nn.Module,
        sample: Sample,
        budget: int | float | str | None = None,
        *,
        plan: str | Path | None = None,
        sample_kwargs: dict[str, Any] | None = None,
        costs: str = "measured",
        loss_memory: int | str | None = None,
        time_limit: float | None = None,
        solver: str = "auto",
        progress: bool | None = None,
        cache: bool | str | os.PathLike[str] | None = True,
        compile: bool = False,
    ) -> None:
        if isinstance(sample, (str, int, float)) and not isinstance(budget, (str, int, float, type(None))):
            raise InputError("the sample comes before the budget: Rockmate(model, sample, budget)")
        call = checked_call(model, sample, sample_kwargs, compile)
        if plan is None and budget is None:
            raise BudgetError(
                "no budget is given: Rockmate(model, sample, budget), or plan= with the path of a saved plan"
            )
        if plan is not None and budget is not None:
            raise BudgetError("give either a budget, or a saved plan, which has a budget of its own")
        saved = None if plan is None else read_plan(plan)
        asked = costs, loss_memory, time_limit, solver, cache, compile
        options = options_of(*asked)
        if saved is not None:
            with saved.unchanged():
                options = options_of(saved.costs, saved.loss_memory, *asked[2:])
        terms = Terms(saved.budget if saved else parse_budget(budget), options, progress, always=True)
        OPTIMIZERS.watch()
        be_heard()
        if options.compile:
            prepare_for_pieces(model)
        _become(self, model, Attachment(model, terms))
        self._front.plan_for(call, saved)

    @property
    def _front(self) -> Attachment:
        return self._rockmate_attachment

    @property
    def original(self) -> torch.nn.Module:
        """The module that was given, which runs without a plan."""
        return self._rockmate_original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments, under a plan. The module's own hooks, such as those of
        ``fully_shard`` that gather parameters, run around the plan, and not in it.
        """
        self._check_own_changes()
        return torch.nn.Module._call_impl(self, *args, **kwargs)

    forward = _Forward()

    @property
    def plan(self) -> Plan | FollowedPlan:
        """The plan of the last call, or the one that replaced it after its backward."""
        plan = self._front.plan
        if plan is None:
            raise InputError(
                "the last call has no plan: it computed something new, which is planned when such a step was observed. "
                "rk.plans has the plans of other calls"
                if self.plans_made
                else "a copy plans at its first call: call it before you ask for its plan"
            )
        return plan

    @property
    def _last(self) -> Runnable | None:
        return self._front.runnable

    @property
    def plans_made(self) -> int:
        """How many kinds of calls were planned."""
        return self._front.plans_made

    @property
    def plans(self) -> list[PlannedCall]:
        """All kinds of calls so far, each with its plan, those of the last call first."""
        return self._front.plans

    @property
    def budget(self) -> int:
        """Bytes that one forward and its backward may allocate. When it is set, only the solver runs again."""
        return self._front.budget

    @budget.setter
    def budget(self, budget: int | float | str) -> None:
        self._front.budget = budget

    @property
    def plans_dropped(self) -> int:
        """Plans that went because more than ``runnable.MAX_PLANS`` kinds of calls came."""
        return self._front.plans_dropped

    @property
    def reason(self) -> str:
        """Why the model's forward is not captured as one graph; empty if it is."""
        return self._front.reason

    def frontier(self) -> Frontier:
        """Time against memory for the last kind of call, as ``rockmate.frontier``."""
        return self._front.frontier()

    def memory(self) -> Memory:
        """Where the device's memory goes in a step, as a table; ask between steps."""
        return self._front.memory()

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model, if it has one. Else nothing: ``loss.backward()`` has done it; scripts of the first
        Rockmate call it.
        """
        own = getattr(super(), "backward", None)
        return None if own is None else own(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rockmate:
        """A Rockmate of a copy of the model, which plans at its first call."""
        made = _remade(type(self).__mro__[1], copy.deepcopy(self.original, memo), self._front.terms)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles hold the model, and plan again at their first call."""
        return _remade, (type(self).__mro__[1], self.original, self._front.terms)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Twins are no subclasses that the model's classes are to know of."""

    def _get_name(self) -> str:
        return type(self).__mro__[1].__name__

    def _replicate_for_data_parallel(self) -> Rockmate:
        raise InputError(NO_REPLICAS)

    def _check_own_changes(self) -> None:
        """Raise ``InputError`` where the Rockmate got another class, which the model has not."""
        if type(self).__name__.startswith("Parametrized"):
            raise InputError(
                "a parametrization was registered on the Rockmate, and the model would not see it: register it on the "
                "model (rk.original), before or after planning"
            )

    def extra_repr(self) -> str:
        """The budget, and what the model says of itself."""
        budget = self._front.terms.budget
        own = super().extra_repr()
        said = f"budget={budget} bytes" if isinstance(budget, int) else f"budget={budget}"
        return f"{said}, {own}" if own else said


_CALL_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_NO_HOOKS: OrderedDict[int, Any] = OrderedDict()

_OWN = ("plan", "plans", "plans_made", "plans_dropped", "budget", "frontier", "memory", "reason", "original")
"""What a Rockmate has that no model may have, too."""


def _planned(self: Rockmate, *args: Any, **kwargs: Any) -> Any:
    """The forward of the twin: the plan, which has none of the module's own hooks."""
    held = self.__dict__
    hooks = {name: held[name] for name in _CALL_HOOKS if held[name]}
    held.update(dict.fromkeys(hooks, _NO_HOOKS))
    try:
        return self._front(*args, **kwargs)
    finally:
        held.update(hooks)


def _twin_class(cls: type, model: type) -> type:
    known = _TWINS.setdefault(model, {})
    if cls not in known:
        call = torch.compiler.disable(
            cls.__call__, reason="a Rockmate runs a plan of its own; compile parts beside it, or rk.original"
        )
        body = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__call__": call}
        known[cls] = type(model)(f"{cls.__name__}[{model.__name__}]", (cls, model), body)
    return known[cls]


_TWINS: weakref.WeakKeyDictionary[type, dict[type, type]] = weakref.WeakKeyDictionary()


def _become(twin: Rockmate, model: torch.nn.Module, attachment: Attachment) -> None:
    """``twin`` is one of ``model`` from now on: what is set on either is set on both."""
    object.__setattr__(twin, "__dict__", model.__dict__)
    object.__setattr__(twin, "_rockmate_original", model)
    object.__setattr__(twin, "_rockmate_forward", None)
    object.__setattr__(twin, "_rockmate_attachment", attachment)
    watch_layers(twin, attachment)


def _remade(cls: type, model: torch.nn.Module, terms: Terms) -> Rockmate:
    made: Rockmate = object.__new__(_twin_class(cls, type(model)))
    _become(made, model, Attachment(model, replace(terms)))
    return made


@called_right
def frontier(
    model: torch.nn.Module,
    sample: Sample,
    *,
    sample_kwargs: dict[str, Any] | None = None,
    costs: str = "measured",
    loss_memory: int | str | None = None,
    progress: bool | None = None,
) -> Frontier:
    """Time against memory for ``model``: ``min_budget``, ``max_budget`` (no recomputation), and ``points``.

    Each point is (budget in bytes, predicted overhead as a fraction of the eager step). Of the loss nothing is known
    but ``loss_memory``: after a step under a plan, ``frontier`` of the handle or the ``Rockmate`` has what it took.

    Args:
        model: Any module whose tensors lie on one device.
        sample: A tensor, a tuple of positional arguments, or a dict of keyword arguments, as ``model`` is called with.
        sample_kwargs: Keyword arguments beside a tuple.
        costs: "measured" times every operation, "flops" models them.
        loss_memory: As for ``Rockmate``; by default room for three times the outputs' bytes.
        progress: Whether to show how far planning is; by default on a terminal, when it takes more than a second.

    Raises:
        InputError: An argument cannot be used.
        GraphError: The model cannot be traced.
    """
    call, options = checked_call(model, sample, sample_kwargs), options_of(costs, loss_memory, cache=None)
    probe = Attachment.probe(model, options, progress)
    probe.plan_for(call)
    return probe.frontier()
