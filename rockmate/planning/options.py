"""How plans are made: what users choose beside the model and the budget."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import inf
from numbers import Integral
from typing import Any

from rkgb.cost.measure import check_costs
from rockmate.budget import parse_bytes
from rockmate.errors import InputError
from rockmate.planning.disk import Disk, disk_of
from solvers import Problem, solver_names


@dataclass(frozen=True)
class PlanOptions:
    """How a plan is made, as for ``Rockmate``. Raises ``InputError`` for what cannot be used.

    ``loss_memory``: bytes. ``time_limit``: seconds that the search for one plan, or for a frontier, may take.
    ``solver``: its name in ``solvers.solver_names``. ``disk``: where costs and schedules are kept, if anywhere.
    ``compile``: whether light operations run as compiled pieces.
    """

    costs: str = "measured"
    loss_memory: int | None = None
    time_limit: float = inf
    solver: str = "auto"
    disk: Disk | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        check_costs(self.costs, InputError)
        if self.solver not in (names := solver_names(Problem)):
            raise InputError(
                f"solver={self.solver!r}: choose one of {', '.join(names)}, or register one (solvers.register)"
            )
        if not isinstance(self.compile, bool):
            raise InputError(f"compile={self.compile!r}: give True or False")


def options_of(
    costs: str = "measured",
    loss_memory: int | str | None = None,
    time_limit: float | None = None,
    solver: str = "auto",
    cache: bool | str | os.PathLike[str] | None = True,
    compile: bool = False,
) -> PlanOptions:
    """The options as users give them to ``Rockmate``, ``attach`` and the backend of ``torch.compile``."""
    return PlanOptions(costs, checked_loss(loss_memory), checked_limit(time_limit), solver, disk_of(cache), compile)


def checked_limit(time_limit: float | None) -> float:
    """Seconds; infinite if there is no limit."""
    if time_limit is None:
        return inf
    if isinstance(time_limit, bool) or not isinstance(time_limit, (int, float)) or not time_limit > 0:
        raise InputError(f"time_limit={time_limit!r}: give a positive number of seconds, or None for no limit")
    return float(time_limit)


def checked_loss(loss_memory: Any) -> int | None:
    """Bytes; None for the usual room."""
    if loss_memory is None:
        return None
    if isinstance(loss_memory, str):
        return parse_bytes(loss_memory, "room for the loss (loss_memory)")
    if isinstance(loss_memory, bool) or not isinstance(loss_memory, Integral) or loss_memory < 0:
        raise InputError(
            f'loss_memory={loss_memory!r}: give whole bytes, 0 or more, or text such as "200 MiB", or None for the '
            "usual room"
        )
    return int(loss_memory)
