"""Train PyTorch models within a memory budget, at the least possible recomputation."""

from rkgb.cost.memory import measure_peak
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
    PlanError,
    PlanningWarning,
    RockmateError,
    VariantLimitError,
)
from rockmate.estimate import Estimate, SizeEstimate, estimate
from rockmate.module import Rockmate, frontier
from rockmate.planning.plan import Plan

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
    "MismatchError",
    "Plan",
    "PlanError",
    "PlanningWarning",
    "Rockmate",
    "RockmateError",
    "SizeEstimate",
    "TraceError",
    "UnsupportedError",
    "VariantLimitError",
    "attach",
    "attached",
    "detach",
    "estimate",
    "frontier",
    "measure_peak",
]
