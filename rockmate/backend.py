"""The backend "rockmate" of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rkgb.warn import warn_once
from rockmate.budget import parse_budget
from rockmate.calls.captured_calls import CapturedCalls
from rockmate.calls.front import Front
from rockmate.calls.terms import Terms, is_least
from rockmate.errors import BudgetError, BudgetWarning, InputError
from rockmate.pieces.inductor import check_compiler
from rockmate.planning.options import options_of
from rockmate.tell import be_heard

if TYPE_CHECKING:
    from torch import fx

_OPTIONS = frozenset(
    {"budget", "costs", "loss_memory", "on_infeasible", "time_limit", "solver", "progress", "cache", "compile"}
)

_frames: dict[
    int, tuple[Any, Any]
] = {}  # of the options of each call of torch.compile: these, and what was captured first


def rockmate(
    program: fx.GraphModule, examples: list[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """``torch.compile(model, backend="rockmate", options={"budget": "8 GiB"})``: each captured graph under the budget.

    Other options are arguments of ``attach``. Captures need ``fullgraph=True`` for the budget to hold: where there are
    several graphs each has the budget for itself, of which a ``BudgetWarning`` tells. ``attach`` has no such limit.
    Raises ``BudgetError`` without a budget, and ``InputError`` for options that there are not.
    """
    given = dict(options or {})
    if "budget" not in given:
        raise BudgetError('the backend "rockmate" needs options={"budget": "8 GiB"}')
    if unknown := sorted(given.keys() - _OPTIONS):
        raise InputError(
            f'the backend "rockmate" has no option {unknown[0]!r}: there are {", ".join(sorted(_OPTIONS))}'
        )
    least = is_least(given.pop("on_infeasible", "error"))
    budget, progress = parse_budget(given.pop("budget")), given.pop("progress", None)
    terms = Terms(budget, options_of(**given), progress, least)
    if terms.options.compile:
        check_compiler(next((x.device for x in examples if isinstance(x, torch.Tensor)), torch.device("cpu")))
    _look_for_breaks(options)
    be_heard()
    calls = CapturedCalls(program, Front("a graph", terms))
    return torch._dynamo.disable(calls.call)  # type: ignore[no-any-return]


def _look_for_breaks(options: Any) -> None:
    """Warn where one call of torch.compile has captured several graphs."""
    frame = getattr(torch._guards.CompileContext.current_compile_id(), "frame_id", None)
    first = _frames.setdefault(id(options), (options, frame))[1]
    if frame != first:
        warn_once(
            "torch.compile captured several graphs (graph breaks), and each has the whole budget for itself: use "
            "fullgraph=True to see why, or rockmate.attach(model, budget), which plans the model as one",
            BudgetWarning,
        )
