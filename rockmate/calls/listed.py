"""The kinds of calls of a model, as users see them: each under a name of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from rockmate.follow.plan import FollowedPlan
from rockmate.planning.plan import Plan


@dataclass(frozen=True)
class PlannedCall:
    """A kind of call, in a few words for each of its inputs, and its plan; None if the budget does not bind for it.

    ``name``: the words of ``call`` in one text. Where they do not tell kinds apart, as in two calls that differ in what
    the model's Python reads, those after the first are numbered: "x float32[8, 64], train (2)".
    """

    call: tuple[str, ...] = field(repr=False)
    plan: Plan | FollowedPlan | None
    name: str


def named(kinds: Iterable[tuple[float, tuple[str, ...], Plan | FollowedPlan | None]]) -> list[PlannedCall]:
    """Kinds of calls in the order in which they are given; those of the same words are numbered as the number before
    them rises.
    """
    kinds = list(kinds)
    found = [PlannedCall(call, plan, ", ".join(call)) for _, call, plan in kinds]
    known: Counter[str] = Counter()
    for k in sorted(range(len(found)), key=lambda k: kinds[k][0]):
        name = found[k].name
        known[name] += 1
        if known[name] > 1:
            found[k] = replace(found[k], name=f"{name} ({known[name]})")
    return found
