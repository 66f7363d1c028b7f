"""The schedule language: four steps.

- ``Run(i)``: run forward node i. All its data become live (older copies are replaced).
- ``Del(d)``: data d is no longer live.
- ``Loss()``: end of the forward phase; the caller computes the loss.
- ``Bwd(i)``: run the backward of node i.

``solvers.liveness`` makes a schedule of an order of runs and backwards; ``solvers.text`` prints schedules as
programs and parses them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """Read as: compute forward node ``node``; everything it makes is live afterwards."""

    node: int


@dataclass(frozen=True, slots=True)
class Del:
    """Read as: ``data`` is given back."""

    data: int


@dataclass(frozen=True, slots=True)
class Loss:
    """Read as: the forward phase is over; the caller's loss allocates and leaves the output gradients."""


@dataclass(frozen=True, slots=True)
class Bwd:
    """Read as: run the backward of ``node`` with what it reads."""

    node: int


Step = Run | Del | Loss | Bwd
Schedule = tuple[Step, ...]
