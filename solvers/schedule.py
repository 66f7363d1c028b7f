"""The schedule language: four steps.

- ``Run(i)``: run forward node i. All its data are live then; older copies are replaced.
- ``Del(d)``: delete data d.
- ``Loss()``: end of the forward phase; the caller computes the loss.
- ``Bwd(i)``: run the backward of node i.

``solvers.liveness`` adds deletions to an order of runs and backwards. ``solvers.text`` prints and parses schedules.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """Run forward node ``node``; everything it makes is live afterwards."""

    node: int


@dataclass(frozen=True, slots=True)
class Del:
    """Delete ``data``: its memory is free afterwards."""

    data: int


@dataclass(frozen=True, slots=True)
class Loss:
    """The forward phase is over. The caller computes the loss, which leaves the gradients of the outputs."""


@dataclass(frozen=True, slots=True)
class Bwd:
    """Run the backward of ``node``."""

    node: int


Step = Run | Del | Loss | Bwd
Schedule = tuple[Step, ...]
