"""What stands in the place of an attached model's calls: each is captured by TorchDynamo, or followed."""

from __future__ import annotations

import contextlib
import inspect
import re
import time
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch

from rkgb.errors import GraphError, MeasureError, UnsupportedError
from rkgb.sample import Call
from rkgb.trace.other_draws import draws_put_back
from rkgb.trees import tensors_of
from rkgb.warn import warn, warn_once
from rockmate.calls.capture import Capture
from rockmate.calls.captured_calls import Planned
from rockmate.calls.handle import Handle
from rockmate.calls.keys import call_key
from rockmate.calls.look import Look, LookInTheWay, end_look, others_looks_paused
from rockmate.calls.others import unwatch_layers
from rockmate.calls.reasons import internal_error, reason_of
from rockmate.calls.rehearsal import put_back, rehearse
from rockmate.calls.surroundings import (
    IN_TRANSFORMS,
    any_is_gone,
    check_global_hooks,
    function_mode,
    hooks_of,
    is_recorded,
    is_transformed,
    leave_plan,
    modes_suspended,
    saved_hooks,
    warn_of_saved_hooks,
    without_global_hooks,
    witnesses,
)
from rockmate.calls.unguarded import is_overridden
from rockmate.errors import BudgetWarning, InfeasibleBudgetError, InputError, PlanError, PlanningWarning, RockmateError
from rockmate.follow.engine import Followed
from rockmate.follow.following import is_followed
from rockmate.planning.artefact import SavedPlan
from rockmate.planning.checks import gets_sizes
from rockmate.planning.prepare import NOTHING_COMPUTED, cannot_be_called
from rockmate.planning.wrappers import OwnCall, compiled_parts
from rockmate.tell import described
from solvers.interrupts import Heeded, check

_SWITCHED_OFF = (
    "TorchDynamo, which is to capture it, is switched off (TORCHDYNAMO_DISABLE, torch._dynamo.config.disable), or told "
    "by torch.compiler.set_stance to capture nothing new"
)

MOST_FAILING = 256
"""Kinds of calls that the model itself refused, of which that is remembered."""

MOST_BEGINNINGS = 4
"""Times that a call is tried as one graph, at most: hooks may be added and removed in every step."""


class Attachment(Handle, OwnCall):
    """What ``attach`` returns: the plans of a model, and its calls."""

    # -------------------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; ``torch.nn.Module.__call__`` calls this."""
        model, self.called = self.model, True
        if self._runs_as_it_is(model):
            return model._call_impl(*args, **kwargs)
        warn_of_saved_hooks()
        call = Call(args, kwargs)
        key = Look.current and self._kind_of(call)
        try:  # the result is no local variable, since TorchDynamo may hold this frame
            return self._run_beside(model, call, key in self._run_before)
        except LookInTheWay:
            return self._run_beside(model, call, False)
        finally:
            if key is not None:
                self._run_before.add(key)

    def _runs_as_it_is(self, model: torch.nn.Module) -> bool:
        """Whether a call that comes now is none that is planned."""
        if is_recorded() or is_followed() or getattr(self.inside, "on", False) or not torch.is_grad_enabled():
            return True
        mode = function_mode()
        beside = f"under the TorchFunctionMode {mode}" if mode else saved_hooks()
        if where := IN_TRANSFORMS if is_transformed() else beside:
            leave_plan(where)
            return True
        if self._hooks and self._begun < MOST_BEGINNINGS and any_is_gone(self._hooks):
            self._begin_again()
        if self._refused:
            return True
        check_global_hooks()
        self._lazy = self._lazy and gets_sizes(model, self.name)
        return self._lazy

    def _run_beside(self, model: torch.nn.Module, call: Call, planned: bool) -> Any:
        """Run a call while another one may be looked at. ``planned``: there is a plan, as far as that is known."""
        with (
            others_looks_paused(planned),
            self._entered(),
            without_global_hooks(),
            modes_suspended() as self.inside.modes,
        ):
            return self._run(model, call)

    def plan_for(self, call: Call, saved: SavedPlan | None = None) -> None:
        """Plan such calls; nothing runs. ``saved``: this plan is taken."""
        check_global_hooks()
        end_look()  # not within frames of TorchDynamo: see ``check_no_look``
        model, self.saved = self.model, saved
        with self._entered(), torch.enable_grad(), draws_put_back():
            self.inside.planning = True
            try:
                self._run(model, call)
            except Planned:
                return
            else:
                raise InputError(NOTHING_COMPUTED)
            finally:
                self.inside.planning, self.saved = False, None

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        self.inside.on = True
        self.inside.began, self.inside.captured = time.perf_counter(), False  # see Front.capture_seconds
        try:
            with Heeded():
                yield
        finally:
            self.inside.on = False

    def _run(self, model: torch.nn.Module, call: Call) -> Any:
        self.inside.witnesses, self.inside.call = witnesses(len(self.modes)), call
        try:
            return self._run_in_its_way(model, call)
        except InfeasibleBudgetError as error:  # without the frames of TorchDynamo
            raise self.explained(error, self.terms.is_auto) from None
        finally:
            self.inside.call = None

    def _run_in_its_way(self, model: torch.nn.Module, call: Call) -> Any:
        """As one graph, or followed."""
        try:
            _check_tensors(call, self.device)
        except UnsupportedError as error:
            return self._run_unplanned(model, call, error)
        self._begin_step(call.tensors)
        followed = self._followed is not None
        if not self.only_plans and (kind := self._roomy.kind(model, call, followed)) is not None:
            return self._roomy.run_own(kind, model, call)
        if self._followed is not None:
            self.ran_freely = False
            return self._followed.run(model, call)
        if self._failing and not self.only_plans and (failing := self._kind_of(call)) in self._failing:
            result = self._roomy.held(model, call)
            self._failing.discard(failing)
            return result
        try:
            self.inside.ran = False  # whether the capture is over, and what it made runs
            result = self._capture.run(model, call)
        except Exception as error:
            check()  # what the handler of a signal raised is no reason to follow the model
            if self._capture.never:
                return self._run_unplanned(model, call, UnsupportedError(self._capture.never))
            refused = isinstance(error, GraphError) and not isinstance(error, MeasureError)
            if self.inside.ran and not refused:  # something of what was captured has run
                raise
            self.inside.captured, self._hooks = True, hooks_of(model)
            why = self.inside.internal = internal_error(error)
            why = why or reason_of(error)
            self.log.debug("%s was not captured as one graph", self.name, exc_info=error)
        else:
            if not self.inside.ran and any(t.requires_grad for t in tensors_of(result)):
                if self.only_plans:
                    raise InputError(f"{self.name} cannot be planned: {_SWITCHED_OFF}. Switch it on")
                warn_once(f"{self.name} runs as it is, with no plan and no budget: {_SWITCHED_OFF}", BudgetWarning)
            return result
        if self.only_plans:
            return self._rehearse(model, call, why)
        return self._begin(why, partial(self._run_in_its_way, model, call))

    def _kind_of(self, call: Call) -> Hashable:
        return call_key(call.leaves, call.spec), self.model.training

    def _begin(self, why: str, run: Callable[[], Any]) -> Any:
        """TorchDynamo captures no one graph of this call: from now on the model's own Python runs, and is followed. If
        the module itself refuses the call, all stays as it was, and such calls are captured again when one succeeds.
        """
        before, self.reason = self.reason, why
        if parts := compiled_parts(self.model):
            raise UnsupportedError(
                f"{self.name} is not one graph ({self.reason}), and its submodule {parts[0]!r} was compiled, which no "
                "plan runs: give the module as it was before torch.compile"
            )
        self._followed = Followed(self, self.reason)
        self._followed.solving.spent = self.capture_seconds()
        try:
            result = run()
        except (RockmateError, GraphError):
            self._capture.clear()
            raise
        except Exception:
            self._followed, self.reason = None, before
            if len(self._failing) < MOST_FAILING:
                self._failing.add(self._kind_of(self.inside.call))
            raise
        self._capture.clear()
        self.log.info("%s is followed operation by operation: %s", self.name, self.reason)
        if self.inside.internal:
            warn_once(
                f"{self.name} could not be captured as one graph, by a defect of torch or of rockmate "
                f"({self.inside.internal}). Training goes on, and its forward is followed operation by operation. "
                "Please report this, with what the logger 'rockmate' says at level DEBUG",
                PlanningWarning,
            )
        if self.terms.options.compile:
            self.log.info("%s runs eager kernels: pieces are compiled where a call is captured", self.name)
        return result

    def _rehearse(self, model: torch.nn.Module, call: Call, why: str) -> None:
        """A call is no one graph, and a plan is wanted ahead of the first step: train on the sample, and put all back.

        Raises ``Planned``.
        """
        if self.saved is not None:
            raise PlanError(
                f"{self.name} is not captured as one graph ({why}), and a saved plan is for one: give a budget"
            )
        self.inside.planning, self.rehearses = False, True
        try:
            with put_back(model, call):
                self._begin(why, partial(self._train_on, model, call, self.terms.options.loss_memory))
        except (RockmateError, GraphError):
            raise
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise cannot_be_called(call, error) from error
        finally:
            self.inside.planning, self.rehearses = True, False
        if self.plan is None:
            raise UnsupportedError(
                f"no plan came of training {self.name} on the sample for some steps: it is not captured as one graph "
                f"({self.reason}), and its steps could not be observed (another thread than the main one, a profiler, "
                "or no gradient). Attach it without a sample, or plan in the main thread."
            )
        raise Planned

    def _train_on(self, model: torch.nn.Module, call: Call, loss_memory: int | None) -> None:
        """Train on the sample, ``call``, until there is a plan. Where none fits with the usual room for a loss, one
        without it serves until a step has shown what the loss takes. Each step makes the gradients that are missing.
        """
        leaves = [t for t in (*model.parameters(), *call.tensors) if t.is_leaf and t.grad is None]

        def run() -> Any:
            for t in leaves:
                t.grad = None
            return self._run_in_its_way(model, call)

        try:
            rehearse(run, lambda: self.plan is not None, loss_memory)
        except InfeasibleBudgetError as error:
            if loss_memory is not None or self._followed is None:
                raise
            self._followed.kinds.clear()
            try:
                rehearse(run, lambda: self.plan is not None, 0)
            except InfeasibleBudgetError:
                raise error from None  # the least that is stated is to hold with a loss, too

    def _begin_again(self) -> None:
        """Forget that calls are not one graph: a hook, which may have been the reason, was removed."""
        if self._followed is not None and self.terms.settled:
            self.terms.budget = self.terms.asked
        self._forget()
        self._capture, self._hooks, self.reason, self._refused = Capture(self), [], "", False
        self._begun += 1

    def _run_unplanned(self, model: torch.nn.Module, call: Call, error: Exception) -> Any:
        """No plan can be made: the model runs as it is from now on, if the terms allow that."""
        if not self.terms.least or self.only_plans:
            raise error from None
        self._refused = True
        unwatch_layers(model, self)
        warn(f"{self.name} cannot be planned, and runs as it is from now on, with no budget: {error}", BudgetWarning)
        return model._call_impl(*call.args, **call.kwargs)

    # ----------------------------------------------------------------------- what is said

    def described(self, names: list[str], values: list[Any]) -> tuple[str, ...]:
        model = self.model
        parameters = inspect.signature(type(model).forward).parameters.values()
        given = [p for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]

        def name_of(name: str) -> str:
            match = re.match(r"args\.(\d+)(.*)", name)
            at = int(match[1]) + 1 if match else 0  # the first one is the module
            if match and given and given[-1].kind is given[-1].VAR_POSITIONAL and at >= len(given) - 1:
                return f"{given[-1].name}[{at - len(given) + 1}]{match[2]}"
            if match and at < len(given):
                return given[at].name + match[2]
            return re.sub(r"\b_(modules|parameters|buffers)\.", "", name.removeprefix("kwargs.").removeprefix("model."))

        return described([name_of(name) for name in names], values, model.training)


def _check_tensors(call: Call, device: Callable[[list[torch.Tensor]], torch.device]) -> None:
    """Raise ``UnsupportedError`` for arguments that no plan can be for. ``device``: where the model lies."""
    if any(t.is_meta for t in call.tensors) and (place := device(call.tensors)).type != "meta":
        raise InputError(f"an input is on the meta device, where it has no values: make it on {place}, as the model is")
    if any(t.is_nested for t in call.tensors):
        raise UnsupportedError(
            "a nested tensor is among the inputs, whose parts have sizes of their own: give a padded tensor and a "
            "mask, or attach the submodules that get other tensors"
        )
    if name := next((type(t).__name__ for t in call.tensors if is_overridden(t)), None):
        raise UnsupportedError(
            f"an input is a {name}, whose __torch_function__ a plan would not call: give x.as_subclass(torch.Tensor), "
            "or attach the submodules that get plain tensors"
        )
