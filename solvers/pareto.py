"""Selections among solutions that trade one figure for another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def front(found: Iterable[T], figures: Callable[[T], tuple[float, float]]) -> list[T]:
    """Those that no other beats in both figures: the first one rises, the second one falls."""
    best: list[T] = []
    for x in sorted(found, key=figures):
        if not best or figures(x)[1] < figures(best[-1])[1]:
            best.append(x)
    return best


def evenly(found: Sequence[T], most: int) -> Sequence[T]:
    """At most ``most`` of what was found, at even distances, both ends among them."""
    if len(found) <= most:
        return found
    return [found[k * (len(found) - 1) // (most - 1)] for k in range(most)]


def undominated(found: Iterable[T], figures: Callable[[T], tuple[float, ...]]) -> list[T]:
    """Those that no other beats in all figures, by rising figures; of equal ones the first."""
    best: list[tuple[tuple[float, ...], T]] = []
    for x in sorted(found, key=figures):
        mine = figures(x)
        if not any(all(a <= b for a, b in zip(other, mine, strict=True)) for other, _ in best):
            best.append((mine, x))
    return [x for _, x in best]
