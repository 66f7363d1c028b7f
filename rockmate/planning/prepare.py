"""From a module to a planner: trace, measure, and state the problem."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from rkgb.cost.measure import Known
from rkgb.errors import GraphError, UnsupportedError
from rkgb.graphs import S_graph
from rkgb.pipeline import Shows, make_all_graphs
from rkgb.sample import Call, Sample, call_of
from rkgb.trace.operators import WritesSeen
from rkgb.trace.preserved import drop_saved, preserved
from rkgb.trace.written import put_back
from rockmate.errors import CannotBeCalledError, InputError, PlanError
from rockmate.planning.artefact import SavedPlan
from rockmate.planning.options import PlanOptions
from rockmate.planning.planner import Planner, missing_gradients, phase_of
from rockmate.planning.problem import problem_of, usual_room
from rockmate.progress import Report, silent

NOTHING_COMPUTED = (
    "the model returns no tensor that it computes from this sample, so there is nothing to plan: check what "
    "its forward returns, and the mode that it is in"
)

_ON_A_LEAF = "leaf Variable that requires grad is being used in an in-place operation"


@dataclass
class _Clock:
    """Tells ``report`` of the progress, and keeps the seconds of each phase that is over."""

    report: Report
    seconds: dict[str, float] = field(default_factory=dict)
    _phase: str = ""
    _start: float = 0.0

    def __call__(self, phase: str, part: float) -> None:
        self.report(phase, part)
        if phase == self._phase:
            return
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] = now - self._start
        self._phase, self._start = phase, now


def make_planner(
    model: torch.nn.Module,
    sample: Sample,
    options: PlanOptions,
    report: Report = silent,
    saved: SavedPlan | None = None,
    known_of: Callable[[S_graph], Known] = lambda _: Known(),
    shown: Shows = lambda: None,
) -> Planner:
    """Trace and measure ``model`` on ``sample``; with a ``saved`` plan, the figures are those of its file.

    ``report``: who is told of the progress, then and when it solves. ``known_of``: what is known of the costs of a
    graph. ``shown``: see ``rkgb.make_all_graphs``.
    Raises what ``rkgb.make_all_graphs`` raises, ``InputError`` where the model cannot be called with the sample or
    computes nothing, and ``PlanError`` where ``saved`` is not for this model.
    """
    call, clock = call_of(sample), _Clock(report)
    with _told_in_terms_of(model, call):
        if saved is None:
            graphs = make_all_graphs(model, call, costs=options.costs, report=clock, known_of=known_of, shown=shown)
        else:
            clock("load", 0.0)
            graphs = saved.graphs(model, call, shown)
    if not graphs.S.nodes:
        raise InputError(NOTHING_COMPUTED)
    clock("solve", 0.0)
    seconds = clock.seconds
    if saved is None and "measure" in seconds:
        seconds[phase_of(graphs.known)] = seconds.pop("measure")
    room = saved.room if saved else usual_room(graphs.K, options.loss_memory)
    missing = missing_gradients(model)
    if saved is not None:
        if made := missing - saved.missing:  # gradients that the backward makes, and that were there
            raise PlanError(
                f"the plan in {saved.path} was made when {', '.join(sorted(made))} had gradients, which now have none: "
                "their gradients would not fit. Make a plan anew, or zero_grad(set_to_none=False) first."
            )
        missing = saved.missing
    with nullcontext() if saved is None else saved.unchanged():
        problem = problem_of(graphs, room, options.costs)
    return Planner(graphs, problem, room, options, missing, saved, seconds, report)


@contextmanager
def _told_in_terms_of(model: torch.nn.Module, call: Call) -> Iterator[None]:
    """What goes wrong is told in terms of the model and its call."""
    try:
        yield
    except (GraphError, RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        if _ON_A_LEAF in str(error):
            raise UnsupportedError(
                "forward changes an input in place (as ReLU(inplace=True) on it would) where gradients pass, and "
                "plans start from inputs as they are: let it work on a copy (x = x.clone()), or plan only the "
                "submodules behind the change."
            ) from error
        if not isinstance(error, GraphError) or error.__cause__ is not None:  # else it says what is wrong
            _check_call(model, call, error)
        raise


def _check_call(model: torch.nn.Module, call: Call, error: Exception) -> None:
    """After tracing failed: ``InputError`` if the model itself cannot be called with the sample."""
    seen = WritesSeen()
    try:
        with torch.enable_grad(), drop_saved(), preserved(model, call.tensors), put_back(model, seen), seen:
            model(*call.args, **call.kwargs)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as own:
        raise cannot_be_called(call, own) from error


def cannot_be_called(call: Call, own: Exception) -> CannotBeCalledError:
    """The error for a sample with which the model itself raises ``own``."""
    too_many = isinstance(own, TypeError) and "positional argument" in str(own)
    only = " Give what forward takes, without the batch's targets." * too_many
    return CannotBeCalledError(
        f"the model cannot be called with this sample: {type(own).__name__}: {own}. "
        f"The sample was passed as {len(call.args)} positional and {len(call.kwargs)} keyword arguments.{only}"
    )
