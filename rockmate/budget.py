"""Amounts of memory as people write them, and as they are printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from numbers import Real
from typing import Protocol

import torch

from rkgb.warn import warn_once
from rockmate.errors import BudgetError, BudgetWarning
from solvers.units import show_at_least as show_at_least
from solvers.units import show_at_most as show_at_most
from solvers.units import show_bytes as show_bytes

_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1} | {
    f"{prefix}{end}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for end, base in (("ib", 1024), ("b", 1000), ("i", 1024), ("", 1024))
}
_AMOUNT = re.compile(r"\s*([0-9][0-9_.]*(?:e[+-]?[0-9]+)?|\.[0-9_]+)\s*([a-z]*|%)\s*")
_BYTES = 'give bytes as a number, or text such as "2 GiB" or "500 MB"'
_HOW = (
    f'{_BYTES}, a share of what a step takes without recomputation such as "60%", or "auto" for what the device has '
    "left for a step"
)

UNLIMITED = 2**60
"""Bytes in which every step fits as it is."""

FEWEST = 300
"""Numbers below are no bytes but GiB that somebody has counted: no step has so few bytes, and no GPU more GiB."""

MOST_GIB = 24
"""A text with a number above, up to 100, may have been meant as percent, too."""


class Planned(Protocol):
    """What the budget of a step is decided by: where it runs, and its peak if nothing runs again."""

    @property
    def device(self) -> torch.device: ...
    @property
    def eager_peak(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Budget:
    """What was asked for: ``size`` bytes, or a ``share`` of the peak without recomputation, or else "auto"."""

    size: int | None = None
    share: Decimal | None = None

    @property
    def is_auto(self) -> bool:
        """Whether it is what the device has left for a step."""
        return self.size is None and self.share is None

    def bytes(self, planned: Planned, room: Callable[[torch.device], int]) -> int:
        """Bytes for the step of ``planned``; "auto": what there is ``room`` for on its device."""
        if self.size is not None:
            return self.size
        if self.share is not None:
            return int(planned.eager_peak * self.share)
        return room(planned.device)

    def __str__(self) -> str:
        if self.size is not None:
            return show_bytes(self.size)
        return "auto" if self.share is None else f"{(100 * self.share).normalize():f}%"


def parse_budget(budget: object) -> Budget:
    """What ``budget`` stands for: a number of bytes, or text.

    Units: KiB, MiB, GiB and TiB are powers of 1024, kB, MB, GB and TB of 1000. Letters alone ("3g") are powers of
    1024, as those who write them read their GPU's memory. "60%": of the peak of the same step without recomputation.
    More than "100%" warns, as it binds for steps only that take more than the one that it is a share of.
    "auto": what the device has left for a step, as ``rockmate.memory`` counts it. Upper and lower case are the same.

    Raises ``BudgetError`` for anything else, and for a number below ``FEWEST`` without a unit: GiB were meant.
    """
    if isinstance(budget, str) and budget.strip().lower() == "auto":
        return Budget()
    amount, unit = _amount(budget, "budget", _HOW)
    if unit == "%":
        if not amount > 0:
            raise BudgetError(f"the budget {budget!r} is nothing: {_HOW}")
        if amount > 100:
            warn_once(
                f"the budget {budget!r} is more than the step takes that it is a share of, so nothing runs again "
                'there: it binds for larger steps only. Give less than "100%" to save memory, or bytes',
                BudgetWarning,
            )
        return Budget(share=amount / 100)
    if not unit and 0 < amount < FEWEST:
        percent = 100 * amount if amount < 1 else amount
        a_share = amount < 1 or (isinstance(budget, str) and MOST_GIB < amount <= 100)
        share = f' or "{percent.normalize():f}%"' if a_share else ""
        meant = f'"{amount.normalize():f} GiB"{share}'
        raise BudgetError(f"the budget {budget!r} is {amount:f} bytes, in which no step can be run: was {meant} meant?")
    return Budget(_whole(budget, amount * _UNITS[unit], "budget", _HOW))


def parse_bytes(given: object, what: str = "limit") -> int:
    """Bytes of a number, or of text with a unit as in ``parse_budget``; raises ``BudgetError`` for anything else.

    ``what`` it is called in the error.
    """
    amount, unit = _amount(given, what, _BYTES)
    if unit == "%":
        raise BudgetError(f"the {what} {given!r} is a share, and nothing says of what: {_BYTES}")
    if not unit and 0 < amount < FEWEST and (isinstance(given, str) or amount != int(amount)):
        raise BudgetError(f'the {what} {given!r} is {amount:f} bytes: was "{amount.normalize():f} GiB" meant?')
    return _whole(given, amount * _UNITS[unit], what, _BYTES)


def _amount(given: object, what: str, how: str) -> tuple[Decimal, str]:
    """A number and its unit. ``what`` it is called, and ``how`` it is to be given, are for the error."""
    if isinstance(given, bool) or not isinstance(given, (Real, str)):
        raise BudgetError(f"the {what} is of type {type(given).__name__}: {how}")
    try:
        if not isinstance(given, str):
            amount = Decimal(given) if isinstance(given, int) else Decimal(repr(float(given)))
            return (Decimal(0) if amount.is_nan() else amount), ""
        match = _AMOUNT.fullmatch(given.lower())
        if match and match[2] in (*_UNITS, "%"):
            return Decimal(match[1]), match[2]
    except InvalidOperation:
        pass
    raise BudgetError(f"the {what} {given!r} is no amount of memory: {how}")


def _whole(given: object, size: Decimal, what: str, how: str) -> int:
    if size >= 2**63:
        raise BudgetError(f"the {what} {given!r} is more than any device has: {how}")
    if size < 1:
        raise BudgetError(f"the {what} is {given} bytes, which no step can be run in: {how}")
    return int(size)
