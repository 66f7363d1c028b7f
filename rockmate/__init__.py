"""Train PyTorch models within a memory budget, at the least possible recomputation.

    import rockmate

    handle = rockmate.attach(model, "8 GiB")  # from now on the model trains under a plan, in place
    print(handle.plan)

What people use:

- ``attach(model, budget)`` plans a model in place; ``attached(model)`` and ``detach(model)`` belong to it.
- ``Rockmate(model, sample, budget)`` is a module beside the model, planned at once. ``rk.plan`` is its ``Plan``.
- ``frontier(model, sample)`` returns what budgets cost in time; it prints as a table, and ``.plot()`` draws it.
- ``estimate(model, sample, sizes)`` predicts what batches or lengths take that are never run.
- ``measure_peak(step)`` measures what a step takes, ``measure_step(step)`` what each of its operations takes.

Budgets are bytes, or text: "8 GiB", "60%" of the step without recomputation, "auto". Errors that can be caught are
``RockmateError`` and ``GraphError``. The same on a command line: ``rockmate --help``.
"""

from importlib import import_module, metadata
from typing import Any

from rkgb.errors import GraphError, MeasureError, MismatchError, TraceError, UnsupportedError
from rockmate.attach import attach, attached, detach
from rockmate.calls.attachment import Attachment
from rockmate.errors import (
    BudgetError,
    BudgetWarning,
    GoneError,
    HookError,
    InfeasibleBudgetError,
    InputError,
    PieceError,
    PlanError,
    PlanningWarning,
    RockmateError,
)
from rockmate.estimate import Estimate, SizeEstimate, estimate
from rockmate.measure import measure_peak, measure_step
from rockmate.module import Rockmate, frontier
from rockmate.planning.plan import Plan
from rockmate.run.watch import MeasuredStep

try:
    __version__ = metadata.version("rockmate")  # that of pyproject.toml
except metadata.PackageNotFoundError:  # a copy of the sources that was not installed
    __version__ = "unknown"


def __getattr__(name: str) -> Any:
    """``rockmate.rotor`` is imported when it is first used."""
    if name == "rotor":
        return import_module("rockmate.rotor")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Attachment",
    "BudgetError",
    "BudgetWarning",
    "Estimate",
    "GoneError",
    "GraphError",
    "HookError",
    "InfeasibleBudgetError",
    "InputError",
    "MeasureError",
    "MeasuredStep",
    "MismatchError",
    "PieceError",
    "Plan",
    "PlanError",
    "PlanningWarning",
    "Rockmate",
    "RockmateError",
    "SizeEstimate",
    "TraceError",
    "UnsupportedError",
    "attach",
    "attached",
    "detach",
    "estimate",
    "frontier",
    "measure_peak",
    "measure_step",
]
