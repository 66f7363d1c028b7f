"""Read and print amounts of memory."""

from __future__ import annotations

import re
from numbers import Real

from rockmate.errors import BudgetError

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{end}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for end, base in (("ib", 1024), ("b", 1000), ("i", 1024))
}
_HOW = 'give bytes as a number, or text such as "2 GiB" or "500 MB"'
_SHARE = "; for a share of what the model takes without a plan, multiply rockmate.frontier(model, sample).max_budget"


def parse_budget(budget: int | float | str | None) -> int:
    """Bytes of ``budget``: a number, or text with a unit (KiB, MiB, GiB, TiB: powers of 1024; kB, MB, …: of 1000)."""
    if isinstance(budget, bool) or not isinstance(budget, (Real, str)):
        raise BudgetError(f"the budget is a {type(budget).__name__}: {_HOW}")
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", budget.lower())
        if not match or match[2] not in _UNITS:
            share = _SHARE if "%" in budget else ""
            raise BudgetError(f"the budget {budget!r} is no amount of memory: {_HOW}{share}")
        try:
            size = float(match[1]) * _UNITS[match[2]]
        except ValueError as error:
            raise BudgetError(f"the budget {budget!r} is no amount of memory: {_HOW}") from error
    else:
        size = budget if isinstance(budget, int) else float(budget)
    if 0 < size < 1:
        raise BudgetError(f"the budget is {budget} bytes, less than one: {_HOW}{_SHARE}")
    if not 0 < size < 2**63:
        raise BudgetError(f"the budget is {budget} bytes, which no step can be run in: {_HOW}")
    return int(size)


def show_bytes(size: float) -> str:
    """ "12.3 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
