"""A model under a memory budget, in place: TorchDynamo captures what its calls do, Rockmate plans and runs that.

``torch.nn.Module.compile`` installs a compiler in a module in the same way: the module keeps its class, its methods and
its state, and copies and pickles of it are plain modules.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from rkgb.errors import GraphError
from rkgb.sample import Sample
from rockmate.artefact import SavedPlan
from rockmate.bound import rough_peak
from rockmate.budget import parse_budget, show_bytes
from rockmate.calls import Calls, Terms
from rockmate.captured import Captured, captured_sources
from rockmate.errors import BudgetWarning, InputError
from rockmate.executor import CallState
from rockmate.observe import WholeLook, end_look
from rockmate.plan import Plan
from rockmate.planning import NOTHING_COMPUTED
from rockmate.surroundings import (
    check_global_hooks,
    is_recorded,
    is_transformed,
    leave_plan,
    put_back_if_it_fails,
    warn_of_saved_hooks,
)
from rockmate.tell import LOG, be_heard, described, planned_line
from rockmate.variants import PlanCache, Variant
from rockmate.watched import WatchedCalls
from solvers import Frontier

if TYPE_CHECKING:
    from torch import fx

RECOMPILE_LIMIT = 64
"""Captures of one model, at most."""

_SETTINGS = {
    "recompile_limit": RECOMPILE_LIMIT,
    "accumulated_recompile_limit": 8 * RECOMPILE_LIMIT,
    "optimize_ddp": False,  # one graph, whose gradients come one by one, so that buckets overlap as in eager mode
    "allow_unspec_int_on_nn_module": True,  # a counter on a module is no reason to capture again
    "specialize_float": True,
    "allow_rnn": True,
    "skip_nnmodule_hook_guards": False,  # hooks come and go
    "suppress_errors": False,
}


def _once() -> dict[str, Any]:
    """That what transformers and others say once (``logger.warning_once``) is no reason not to capture a call; it is not
    said then.
    """
    methods = {f for name, f in vars(logging.Logger).items() if name.endswith("_once")}
    return {"ignore_logging_functions": torch._dynamo.config.ignore_logging_functions | methods}


@dataclass(frozen=True)
class PlannedCall:
    """A kind of call, in a few words for each of its inputs, and its plan; None if the budget does not bind for it."""

    call: tuple[str, ...]
    plan: Plan | None


class CapturedCalls(Calls):
    """The calls of one graph that TorchDynamo captured."""

    module: Captured

    def __init__(self, program: fx.GraphModule, identity: Hashable, front: Attachment) -> None:
        """``identity``: see ``identity_of``."""
        self.program, self.identity, self.front = program, identity, front
        self.terms = front.terms
        self.ready = False
        self.spacious: dict[Hashable, tuple[str, ...]] = {}  # kinds of calls for which the budget does not bind
        self.binding: set[Hashable] = set()

    def call(self, *arguments: Any) -> Any:
        """What the program returns for ``arguments``."""
        wanted = (a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad)
        if not torch.is_grad_enabled() or next(wanted, None) is None:
            return self.program.forward(*arguments)
        if not self.ready:
            super().__init__(Captured(self.program, arguments), self.terms, self.front.cache)
            self.ready = True
        self.module.hold(arguments)
        given = tuple(arguments[k] for k in self.module.given)
        if self.front.only_plans:
            self.front.last = self
            if not self._fits(given, arguments):
                self.last = self.variants(given, {}, self.front.saved)[0]
            raise Planned
        if self._fits(given, arguments):
            return self._run_freely(given, arguments)
        self.front.last = self
        return self.run(given, {})

    def kind(self, leaves: list[Any], spec: Any) -> tuple[Hashable, frozenset[str]]:
        """As in ``Calls``; a plan is for one graph."""
        key, missing = super().kind(leaves, spec)
        return (id(self), key), missing

    def computed(
        self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[torch.Tensor], CallState | None]:
        """As in ``Calls``; where nothing runs again, the captured program runs as it is."""
        if variant.plan.recomputed or variant.program.undo.last >= 0:
            return super().computed(variant, args, kwargs)
        result = self.module(*args)
        return result, [t for t in result if isinstance(t, torch.Tensor)], None

    def described(self, leaves: list[Any]) -> tuple[str, ...]:
        """By the names that arguments have in the model's forward."""
        return self.front.described(self.module.names, leaves)

    def planned(self, variant: Variant) -> None:
        """Say so."""
        self.front.tell(variant)

    # ---------------------------------------------------------------- budgets that do not bind

    def _fits(self, given: tuple[Any, ...], arguments: tuple[Any, ...]) -> bool:
        """Whether the budget is so large that a call need not be planned."""
        if self.terms.always:
            return False
        kind = self.kind(list(given), None)
        if kind in self.binding:
            return False
        if kind in self.spacious:
            return True
        budget = self.terms.bytes_known(_device_of(arguments))
        return budget is not None and rough_peak(self.program, arguments) <= budget

    def _run_freely(self, given: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        """Run the captured program as it is; the first such step is measured."""
        kind = self.kind(list(given), None)
        if kind in self.spacious or not WholeLook.possible():
            return self.program.forward(*arguments)
        call = self.described(list(given))
        budget = self.front.budget

        def measured(peak: int) -> None:
            if peak <= budget:
                self.spacious[kind] = call
                LOG.info(
                    "%s needs no plan for %s: a step took %s of %s",
                    self.front.name, ", ".join(call), show_bytes(peak), show_bytes(budget),
                )  # fmt: skip
                return
            self.binding.add(kind)
            warnings.warn(
                f"the last step took {show_bytes(peak)}, more than the budget of {show_bytes(budget)}, "
                "which the sizes of the results did not show. Later steps like it are planned.",
                BudgetWarning,
                stacklevel=3,
            )

        look = WholeLook(_device_of(arguments), measured)
        try:
            result = self.program.forward(*arguments)
        except BaseException:
            look.abandon()
            raise
        look.follow(result)
        return result


def _device_of(arguments: tuple[Any, ...]) -> torch.device:
    return next(a.device for a in arguments if isinstance(a, torch.Tensor))


def identity_of(program: fx.GraphModule) -> Hashable:
    """Programs of equal identity do the same to the same inputs; None where that is not known.

    What a model's Python reads and only logs makes TorchDynamo capture again, but the program is the same.
    """
    nodes = list(program.graph.nodes)
    if any(n.op in ("get_attr", "call_module") for n in nodes):
        return None
    targets = tuple(n.target for n in nodes if n.op == "call_function")
    return program.code, tuple(captured_sources(program)), targets


class Planned(Exception):
    """A plan was made, and nothing is to run."""


class Attachment:
    """What ``attach`` returns: the plans of a model.

    ``name``: the class of the model. ``terms``: what is asked of plans.
    """

    def __init__(self, model: torch.nn.Module, terms: Terms) -> None:
        self._model = weakref.ref(model)
        self.name, self.terms = type(model).__name__, terms
        self.cache = PlanCache()
        self._graphs: list[CapturedCalls] = []
        self._direct: WatchedCalls | None = None
        self.reason = ""
        self.last: Calls | None = None
        self._compiled: Callable[..., Any] | None = None
        self._entry = _entry()
        self._inside = threading.local()
        self._made = 0
        self._before: tuple[str, ...] | None = None
        self._signature: inspect.Signature | None = None
        self.saved: SavedPlan | None = None

    # ----------------------------------------------------------------- what users ask

    @property
    def model(self) -> torch.nn.Module:
        """The model. Raises ``InputError`` when it is gone."""
        model = self._model()
        if model is None:
            raise InputError("the model that this plan was for is gone")
        return model

    @property
    def variant(self) -> Variant | None:
        """The plan of the last call, ready to run."""
        return self.last.last if self.last is not None else None

    @property
    def plan(self) -> Plan | None:
        """The plan of the last call, or the one that replaced it after its backward; None if none was needed so far."""
        return self.variant.plan if self.variant is not None else None

    @property
    def plans_made(self) -> int:
        """How many kinds of calls were planned."""
        return self._made

    @property
    def plans_dropped(self) -> int:
        """Plans that went because more than ``variants.MAX_PLANS`` kinds of calls came."""
        return self.cache.dropped

    @property
    def plans(self) -> list[PlannedCall]:
        """All kinds of calls so far, those of the last call first."""
        free = (call for calls in self._graphs for call in calls.spacious.values())
        return [*(PlannedCall(v.call, v.plan) for v in self.cache.variants()), *(PlannedCall(c, None) for c in free)]

    @property
    def budget(self) -> int:
        """Bytes that one forward and its backward may allocate. It is set as it is given to ``attach``: shares are of
        the last call. When it is set, only the solver runs again.
        """
        if not isinstance(self.terms.budget, int):
            raise InputError("the budget is a share, or what is free: it is known in bytes once a call was planned")
        return self.terms.budget

    @budget.setter
    def budget(self, budget: int | float | str) -> None:
        wanted = parse_budget(budget)
        if self.last is None:
            self.terms.budget = wanted
        else:
            self.last.set_budget(wanted)
        for calls in self._graphs:
            calls.spacious.clear()
            calls.binding.clear()

    def frontier(self) -> Frontier:
        """Time against memory for the last kind of call that was planned, as ``rockmate.frontier``."""
        if self.last is None or self.last.last is None:
            raise InputError(
                "no call was planned yet, or the budget does not bind, so there is no frontier: use "
                "rockmate.frontier(model, sample)"
            )
        return self.last.frontier()

    def detach(self) -> None:
        """The model runs as it did before ``attach``."""
        model = self._model()
        if model is not None and model.__dict__.get("_compiled_call_impl") is self:
            del model._compiled_call_impl
        if self._compiled is not None:
            torch._dynamo.eval_frame.reset_code(self._entry.__code__)  # type: ignore[attr-defined]
        self._graphs.clear()
        self.cache.clear()
        self._direct = self._compiled = self.last = None

    def __reduce__(self) -> Any:
        """Copies and pickles plan again at their first call."""
        return Attachment, (self.model, self.terms)

    def __repr__(self) -> str:
        budget = self.terms.budget
        size = show_bytes(budget) if isinstance(budget, int) else str(budget)
        return f"<rockmate.attach: {self.name}, {size}, {len(self.plans)} plans>"

    # -------------------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; ``torch.nn.Module.__call__`` calls this."""
        model = self.model
        if not torch.is_grad_enabled() or is_recorded() or getattr(self._inside, "on", False):
            return model._call_impl(*args, **kwargs)
        if is_transformed():
            leave_plan()
            return model._call_impl(*args, **kwargs)
        check_global_hooks()
        warn_of_saved_hooks()
        end_look()  # not within frames of TorchDynamo, which may record for the profiler themselves
        with self._entered():
            return self._run(model, args, kwargs)

    def plan_for(self, args: tuple[Any, ...], kwargs: dict[str, Any], saved: SavedPlan | None = None) -> None:
        """Plan calls with these arguments; nothing runs. ``saved``: this plan is taken."""
        model, self.saved = self.model, saved
        with self._entered(), torch.enable_grad():
            self._inside.planning = True
            try:
                self._run(model, args, kwargs)
            except Planned:
                return
            else:
                raise InputError(NOTHING_COMPUTED)
            finally:
                self._inside.planning, self.saved = False, None

    @property
    def only_plans(self) -> bool:
        """Whether this thread plans, and runs nothing."""
        return getattr(self._inside, "planning", False)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        self._inside.on = True
        try:
            yield
        finally:
            self._inside.on = False

    def _run(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._direct is None:
            import torch._dynamo
            from torch._dynamo.exc import TorchDynamoException

            if self._compiled is None:
                self._compiled = torch.compile(self._entry, backend=self._captured, fullgraph=True)
            try:
                with torch._dynamo.config.patch({**_SETTINGS, **_once()}), put_back_if_it_fails():
                    return self._compiled(model, args, kwargs)
            except TorchDynamoException as error:
                reason = error
            return self._run_directly(model, args, kwargs, reason)
        self.last = self._direct
        return self._direct.run(args, kwargs)

    def _captured(self, program: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        """The backend that TorchDynamo calls with what it has captured."""
        identity = identity_of(program)
        calls = next((calls for calls in self._graphs if identity and calls.identity == identity), None)
        if calls is None:
            calls = CapturedCalls(program, identity, self)
            self._graphs.append(calls)
        return torch._dynamo.disable(calls.call)  # type: ignore[no-any-return]

    def _run_directly(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: Exception
    ) -> Any:
        """TorchDynamo cannot capture a call as one graph: trace the model as a whole, and watch its Python."""
        direct = _Direct(model, self)
        try:
            direct.last = direct.variants(args, kwargs, self.saved)[0]
        except (GraphError, InputError) as error:
            raise error from reason
        self._direct = self.last = direct
        self.reason = _first_line(reason)
        LOG.info("%s is traced as a whole, since it cannot be captured as one graph: %s", self.name, self.reason)
        if self.only_plans:
            raise Planned
        return direct.run(args, kwargs)

    # ----------------------------------------------------------------------- what is said

    def described(self, names: list[str], values: list[Any]) -> tuple[str, ...]:
        """A call in a few words."""
        model = self.model
        if self._signature is None:
            self._signature = inspect.signature(type(model).forward)
        parameters = list(self._signature.parameters)[1:]

        def name_of(name: str) -> str:
            match = re.match(r"args\.(\d+)(.*)", name)
            if match and int(match[1]) < len(parameters):
                return parameters[int(match[1])] + match[2]
            return name.removeprefix("kwargs.").removeprefix("model.")

        return described([name_of(name) for name in names], values, model.training)

    def tell(self, variant: Variant) -> None:
        """Say that a plan was made."""
        self._made += variant.planner.saved is None
        LOG.info("%s", planned_line(self.name, variant.call, variant.plan, self._made, self._before))
        self._before = variant.call


class _Direct(WatchedCalls):
    """The calls of a model that is traced as a whole."""

    def __init__(self, model: torch.nn.Module, front: Attachment) -> None:
        super().__init__(model, front.terms, front.cache)
        self.front = front

    def described(self, leaves: list[Any]) -> tuple[str, ...]:
        """By the positions of arguments."""
        return self.front.described([f"input {k}" for k in range(len(leaves))], leaves)

    def planned(self, variant: Variant) -> None:
        """Say so."""
        self.front.tell(variant)


def _entry() -> Callable[..., Any]:
    """The function that TorchDynamo compiles: one of its own for each model, since captures are kept with its code."""

    def entry(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return model._call_impl(*args, **kwargs)

    name = f"entry_{next(_numbers)}"  # what TorchDynamo learns of a function, it knows by name and line
    return FunctionType(entry.__code__.replace(co_name=name), globals(), name)


_numbers = itertools.count()


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def attach(
    model: torch.nn.Module,
    budget: int | float | str,
    *,
    sample: Sample | None = None,
    sample_kwargs: dict[str, Any] | None = None,
    costs: str = "measured",
    loss_memory: int | None = None,
    on_infeasible: str = "error",
    time_limit: float | None = None,
    progress: bool | None = None,
) -> Attachment:
    """Train ``model`` under ``budget``, in place: from now on its calls with gradients run under a plan.

    The model stays what it is: its class, methods, state and attributes; copies and pickles of it are plain modules.
    Without ``sample`` a plan is made at the first call with gradients, and at the first of each new kind. Calls without
    gradients, and those for which the budget does not bind, run as they did before. ``on_infeasible``: "error" raises
    ``InfeasibleBudgetError`` where no plan fits the budget, "least" warns (``BudgetWarning``) and takes the plan of
    least memory. The other arguments are as for ``Rockmate``. Raises ``InputError`` for what cannot be used, and, at a
    call that is planned, ``GraphError`` for a model that cannot be traced.
    """
    from rockmate.module import checked_call, checked_limit, checked_module

    checked_module(model)
    if on_infeasible not in ("error", "least"):
        raise InputError(f'on_infeasible={on_infeasible!r}: give "error" or "least"')
    if attached(model) is not None:
        raise InputError(
            "the model is attached already: set the budget of what attach returned (rockmate.attached(model).budget), "
            "or rockmate.detach(model) first"
        )
    if model.__dict__.get("_compiled_call_impl") is not None:
        raise InputError("the model was compiled (model.compile()), and a plan runs operations one by one")
    terms = Terms(
        parse_budget(budget), costs, loss_memory, checked_limit(time_limit), progress, on_infeasible == "least"
    )
    attachment = Attachment(model, terms)
    be_heard()
    if sample is not None or sample_kwargs is not None:
        attachment.plan_for(*checked_call(model, () if sample is None else sample, sample_kwargs))
    model._compiled_call_impl = attachment
    return attachment


def attached(model: torch.nn.Module) -> Attachment | None:
    """What ``attach`` returned for ``model``; None if it is not attached."""
    found = model.__dict__.get("_compiled_call_impl")
    return found if isinstance(found, Attachment) else None


def detach(model: torch.nn.Module) -> None:
    """The model runs as it did before ``attach``. Raises ``InputError`` if it is not attached."""
    found = attached(model)
    if found is None:
        raise InputError("the model is not attached")
    found.detach()
