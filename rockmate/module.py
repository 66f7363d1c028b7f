"""``Rockmate``: a module that computes what another does, in the memory it is given."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from rkgb.capture import current_mode
from rkgb.graphs import Structure
from rkgb.guards import GuardFailed
from rkgb.patches import TRACING
from rkgb.sample import Sample, call_of
from rkgb.trees import flatten, tensors_of, unflatten
from rockmate.artefact import SavedPlan, read_plan
from rockmate.budget import parse_budget
from rockmate.errors import BudgetError, InputError, VariantLimitError
from rockmate.executor import CallState
from rockmate.facade import Facade, signed_as_original
from rockmate.observe import abandoned, end_look
from rockmate.plan import Plan
from rockmate.planning import make_planner
from rockmate.progress import Progress
from rockmate.python_state import Place, PythonState, find, in_key
from rockmate.state import check_wrappers, module_key, watched_hooks
from rockmate.surroundings import (
    check_global_hooks,
    is_recorded,
    is_transformed,
    leave_plan,
    settings,
    undisturbed,
    warn_of_saved_hooks,
)
from rockmate.variants import PlanCache, Variant, adapted, as_before, make_first, make_variant, reads_more
from solvers import Frontier
from solvers.interrupts import Heeded

# Plans for calls that differ only in what the module's Python reads from tensors.
MAX_VARIANTS = 16


class Rockmate(Facade):
    """``model`` under a memory budget: same outputs, gradients and buffer updates, peak at most ``budget``.

    ``sample``: a tensor, a tuple of positional arguments, or a dict of keyword arguments, as ``model`` is
    called with; ``sample_kwargs``: keyword arguments beside a tuple. ``budget``: what one forward and its
    backward may allocate above the level at the forward, in bytes or as text ("2 GiB"). ``plan``: instead
    of a budget, a file that ``plan.save(path)`` wrote for this graph (else ``PlanError``). ``costs``:
    "measured" times every operation, "flops" models them (the same plan on every run and machine with such
    a device).
    ``loss_memory``: bytes that the loss allocates beside the outputs and their gradients. By default, room
    for three times the outputs' bytes is left in the first step, and for what the loss took from then on
    (``plan.room``). A scalar beside other outputs is taken for the loss until a step has shown which outputs
    the backward starts from. ``time_limit``: seconds after which the search for a plan ends with the best so far, as
    ``plan.reason`` then says; by default 60 for each integer program. ``progress``: True shows how far planning is,
    False does not; None does on a terminal, when it takes more than a second.

    ``plan`` is the plan of the last call, or the one that replaced it after its backward. Calls of another
    shape, or with other settings (whatever the module's Python reads), are planned when they first come, and
    cached; likewise a call that finds no ``.grad`` where there was one at planning, since gradients that are
    made then stay and count. In ``eval()`` mode and without gradients the model itself runs. Raises
    ``InputError`` and its kinds for arguments that cannot be used, ``InfeasibleBudgetError`` for a budget that
    no plan fits, ``GraphError`` for a model that cannot be traced. Based on Rockmate (Zhao et al., ICML 2023).
    """

    OWN = frozenset("plan plans_made _budget _costs _loss_memory _time_limit _progress _cache _unwatched _last".split())
    plan: Plan

    def __init__(
        self,
        model: torch.nn.Module,
        sample: Sample,
        budget: int | float | str | None = None,
        *,
        plan: str | Path | None = None,
        sample_kwargs: dict[str, Any] | None = None,
        costs: str = "measured",
        loss_memory: int | None = None,
        time_limit: float | None = None,
        progress: bool | None = None,
    ) -> None:
        args, kwargs = _checked_call(model, sample, sample_kwargs)
        if (plan is None) == (budget is None):
            raise BudgetError("give either a budget, or a saved plan, which has a budget of its own")
        saved = None if plan is None else read_plan(plan)
        super().__init__(model)
        self._budget = saved.budget if saved else parse_budget(budget)
        self.plans_made = 0
        self._costs = saved.costs if saved else costs
        self._loss_memory = saved.loss_memory if saved else loss_memory
        self._time_limit = _checked_limit(time_limit)
        self._progress = progress
        self._cache = PlanCache()
        self._unwatched: set[Place] = set()
        self._last: Variant | None = None
        self._last = self._planned(args, kwargs, saved)[0]
        self.plan = self._last.plan

    @property
    def budget(self) -> int:
        """Bytes that one forward and its backward may allocate. When it is set, only the solver runs again."""
        return self._budget

    @budget.setter
    def budget(self, budget: int | float | str) -> None:
        size = parse_budget(budget)
        if self._last is not None:
            with Heeded(), Progress(self._progress) as self._last.planner.report:
                variant = make_variant(self._last.planner, size, self._last.state, self._last.observer)
            self._cache.replace(self._last, variant)  # others are made again when they are needed
            self._last, self.plan = variant, variant.plan
        self._budget = size

    @property
    def plans_dropped(self) -> int:
        """Plans that went because more than ``variants.MAX_PLANS`` kinds of calls came."""
        return self._cache.dropped

    def frontier(self) -> Frontier:
        """Time against memory for the last kind of call, as ``rockmate.frontier``."""
        if self._last is None:
            raise InputError("a copy plans at its first call: call it before you ask for its frontier")
        with Heeded(), Progress(self._progress) as self._last.planner.report:
            return self._last.planner.frontier()

    @signed_as_original
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments."""
        if not (self.training and torch.is_grad_enabled()) or is_recorded():
            return self.original(*args, **kwargs)
        if is_transformed():
            leave_plan()
            return self.original(*args, **kwargs)
        check_global_hooks()
        warn_of_saved_hooks()
        end_look()
        inputs = tensors_of((args, kwargs))
        variants = self._planned(args, kwargs)
        failed: list[str] = []
        for variant in variants:
            variant = self._adapted(variant, inputs)
            state, look = CallState(variant.program, self.original, inputs), variant.look()
            try:
                with abandoned(look):
                    outputs = state.forward()
            except GuardFailed as guard:
                failed.append(str(guard))
                continue
            break
        else:
            if len(variants) >= MAX_VARIANTS:
                raise VariantLimitError(
                    f"{MAX_VARIANTS} plans were made for calls of this kind, and none is for the values that the "
                    "module's Python reads from tensors now, or for the shapes that follow from values (torch.where, "
                    f"x[mask]): {failed[0]}. Wrap the submodules around that line instead, or compute with masks of "
                    "one shape."
                )
            variant = self._make_variant(args, kwargs)
            state, look = CallState(variant.program, self.original, inputs), variant.look()
            with abandoned(look):
                outputs = self._run_new(state)
        self._cache.used(variant)
        self._last, self.plan = variant, variant.plan
        if variant.observer is not None:
            if look is not None:
                look.then = partial(self._learn, variant, inputs)
            variant.observer.watch(state, outputs, look)
        return self._returned(variant.structure, outputs)

    def _adapted(self, variant: Variant, inputs: list[torch.Tensor]) -> Variant:
        """The variant for what earlier calls have shown."""
        if variant.observer is None or not (variant.observer.news or reads_more(self._last, variant)):
            return variant
        with TRACING, Heeded(), Progress(self._progress) as variant.planner.report, undisturbed():
            new = adapted(variant, self._last, self.original, inputs)
        self._cache.adapt(variant, new)
        return new

    def _learn(self, variant: Variant, inputs: list[torch.Tensor]) -> None:
        """A step has been looked at: plan again at once, so that the next step is as it will stay."""
        try:
            new = self._adapted(variant, inputs)
        except Exception:  # noqa: BLE001 - parameters may be sharded now, a warning an error: the next forward tries again
            assert variant.observer is not None
            variant.observer.news = True
            return
        if self._last is variant:
            self._last, self.plan = new, new.plan

    def _run_new(self, state: CallState) -> list[torch.Tensor]:
        try:
            return state.forward()
        except GuardFailed as guard:
            raise VariantLimitError(
                f"what the module's Python reads from a tensor changed between two runs on the same input: {guard}"
            ) from guard

    def _returned(self, structure: Structure, outputs: list[torch.Tensor]) -> Any:
        """What forward returns, from the program's outputs; buffers that it assigns are assigned."""
        results = iter(outputs)
        constants = dict(structure.output_constants)
        leaves = [constants[k] if k in constants else next(results) for k in range(structure.outputs.num_leaves)]
        for name, tensor in zip(structure.assigned, results, strict=True):
            module, _, key = name.rpartition(".")
            self.original.get_submodule(module)._buffers[key] = tensor
        return unflatten(leaves, structure.outputs)

    def _replicate_for_data_parallel(self) -> Rockmate:
        raise InputError(
            "torch.nn.DataParallel copies modules to every device, and a plan is for one. Use one process for each "
            "device, and DistributedDataParallel(Rockmate(model, …)) in each."
        )

    def backward(self) -> None:
        """Nothing: ``loss.backward()`` has done it. Kept for scripts of the first Rockmate, which call it."""

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any], saved: SavedPlan | None = None) -> list[Variant]:
        """The variants for calls of this kind, the last one used first; one is made if there is none."""
        leaves, spec = flatten((args, kwargs))
        modules, missing = module_key(self.original)
        found = self._cache.find(_call_key(leaves, spec, modules), missing)
        if found:
            now = {v.state.code: find(self.original, leaves, v.state.code) for v in found}
            found = [v for v in found if v.state.changed(now[v.state.code]) <= self._unwatched]
        return found or [self._make_variant(args, kwargs, saved)]

    def _make_variant(self, args: tuple[Any, ...], kwargs: dict[str, Any], saved: SavedPlan | None = None) -> Variant:
        self._check_own_changes()
        check_wrappers(self.original)
        with TRACING, Heeded(), Progress(self._progress) as report:
            leaves, spec = flatten((args, kwargs))
            key = _call_key(leaves, spec, module_key(self.original)[0])
            codes = self._cache.codes()
            before = [PythonState(code, find(self.original, leaves, code)) for code in codes]
            with undisturbed(), watched_hooks(self.original):
                planner = make_planner(
                    self.original, args, kwargs, self._costs, self._loss_memory, report, saved, self._time_limit
                )
                planners = [as_before(planner, self._last, self.original, tensors_of((args, kwargs))), planner]
            for state in before:  # what forward itself changes, a plan leaves as it is
                self._unwatched |= state.changed(find(self.original, leaves, state.code))
            code = planner.graphs.D.structure.code
            code = next((known for known in codes if known.reads_as(code)), code)
            state = PythonState(code, find(self.original, leaves, code))
            variant = make_first(list(dict.fromkeys(planners)), self._budget, state)
            self._cache.add(key, planner.missing, variant)
            self.plans_made += saved is None
        return variant

    def _check_own_changes(self) -> None:
        """Raise ``InputError`` where weights were replaced on the Rockmate, whose forward is not that of the model."""
        hooks = [h for h in self._forward_pre_hooks.values() if type(h).__module__.startswith("torch.nn.utils.")]
        parametrized = type(self).__name__ == f"Parametrized{type(self).__mro__[1].__name__}"
        if hooks or parametrized:
            what = type(hooks[0]).__name__ if hooks else "a parametrization"
            raise InputError(
                f"{what} was registered on the Rockmate, and the model would not see it: register it on the model "
                "(rk.original), before or after planning"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Without plans; see ``PlanCache``."""
        return {**super().__getstate__(), "_last": None, "plan": None}

    def extra_repr(self) -> str:
        return f"budget={self.budget} bytes"


def frontier(
    model: torch.nn.Module,
    sample: Sample,
    *,
    sample_kwargs: dict[str, Any] | None = None,
    costs: str = "measured",
    loss_memory: int | None = None,
    progress: bool | None = None,
) -> Frontier:
    """Time against memory for ``model``: ``min_budget``, ``max_budget`` (no recomputation), and ``points``.

    Each point is (budget in bytes, predicted overhead as a fraction of the eager step). Arguments as for
    ``Rockmate``.
    """
    args, kwargs = _checked_call(model, sample, sample_kwargs)
    with TRACING, Heeded(), undisturbed(), Progress(progress) as report:
        return make_planner(model, args, kwargs, costs, loss_memory, report).frontier()


def _checked_limit(time_limit: float | None) -> float:
    """Seconds; infinite if there is no limit."""
    if time_limit is None:
        return inf
    if isinstance(time_limit, bool) or not isinstance(time_limit, (int, float)) or not time_limit > 0:
        raise InputError(f"time_limit={time_limit!r}: give a positive number of seconds, or None for no limit")
    return float(time_limit)


def _checked_call(
    model: torch.nn.Module, sample: Sample, sample_kwargs: dict[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The sample as arguments; refuses what no plan can be made for, before anything runs."""
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "the model was scripted or traced by torch.jit as a whole: give the module as it was before. Scripted "
            "parts of a model can be planned."
        )
    if torch.is_inference_mode_enabled():
        raise InputError("nothing can be trained under torch.inference_mode(): plan outside of it")
    check_wrappers(model)
    lazy = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)]
    if lazy:
        raise InputError(
            f"{lazy[0]} of the model has no shape yet (a lazy module): call the model once on the sample before, as "
            "the optimizer needs it too"
        )
    if sample_kwargs is not None and not isinstance(sample_kwargs, Mapping):
        raise InputError(f"sample_kwargs is a {type(sample_kwargs).__name__}: give a dict of keyword arguments")
    args, kwargs = call_of(sample, sample_kwargs)
    inputs = tensors_of((args, kwargs))
    parameters = list(model.named_parameters())
    if not any(p.requires_grad for _, p in parameters) and not any(t.requires_grad for t in inputs):
        raise InputError(
            "nothing needs a gradient: no parameter of the model and no tensor of the sample requires grad, so there "
            "is nothing to save memory on. Set requires_grad on what is to be trained."
        )
    devices = {p.device for _, p in parameters} or {t.device for t in inputs}
    for k, t in enumerate(inputs):
        if t.device not in devices and t.dim() > 0:
            raise InputError(
                f"tensor {k} of the sample is on {t.device}, the model on {', '.join(sorted(map(str, devices)))}: "
                f"move the sample with .to({str(next(iter(devices)))!r})"
            )
    return args, kwargs


def _value(x: Any) -> tuple[Hashable, ...]:
    """What distinguishes a leaf that is no tensor; of objects more is seen by ``find``."""
    if not in_key(x):
        return ()
    return (x.dtype.str, x.shape, x.tobytes()) if isinstance(x, (np.ndarray, np.generic)) else (x,)


def _call_key(leaves: list[Any], spec: Any, modules: Hashable) -> Hashable:
    """Calls with equal keys, for which ``find`` finds the same, run the same graph."""
    described = tuple(
        (tuple(x.shape), x.stride() if x.layout == torch.strided else x.layout, x.dtype, x.device, x.requires_grad)
        if isinstance(x, torch.Tensor)
        else (type(x), *_value(x))
        for x in leaves
    )
    mode = current_mode()
    cached = bool(mode.autocast) and torch.is_autocast_cache_enabled()  # whether a weight used twice is cast once
    return spec, described, mode, cached, settings(), modules
