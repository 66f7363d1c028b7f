"""What ranks have seen of steps of several graphs, with a store in one process in the place of theirs."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from rockmate.calls import shared
from rockmate.calls.shared import SharedStages
from rockmate.planning.places import Places, Ranks
from solvers.sequence import Choice, Stage

FIRST = (Stage((Choice(10, 20, 30, 5),), 1, 2, 3, 4, -5), Stage((Choice(1, 2, 3, 4),), 6, 7, 8, 9, 10))
SECOND = (replace(FIRST[0], before=7, rest=-6), replace(FIRST[1], later=2))
THIRD = (replace(FIRST[0], rest=-4), FIRST[1])
OPTIONS = ((0,), (0,))


def on_each_rank(store: dist.Store, ranks: int) -> list[SharedStages]:
    """As in processes of their own."""
    found = []
    for _ in range(ranks):
        shared._made.clear()
        found.append(SharedStages.of(Places(None, Ranks(store)), FIRST, OPTIONS))
    return found


def test_all_plan_for_the_most_that_any_has_seen() -> None:
    a, b, c = on_each_rank(dist.HashStore(), 3)
    assert not a.is_new()
    a.add(FIRST)
    b.add(SECOND)
    most = (replace(FIRST[0], before=7), FIRST[1])
    assert b.stages == most
    assert a.stages == FIRST, "until its next step begins"
    assert a.is_new() and a.stages == most
    assert not a.is_new()
    c.add(THIRD)
    assert b.is_new() and a.is_new()
    assert a.stages == b.stages == c.stages == (replace(most[0], rest=-4), FIRST[1])
    b.add(SECOND)
    assert not a.is_new(), "it is nothing more"


def test_models_and_steps_are_told_apart() -> None:
    store = dist.HashStore()
    (a,) = on_each_rank(store, 1)
    a.add(FIRST)
    another = SharedStages.of(Places(None, Ranks(store)), FIRST, OPTIONS)
    assert not another.is_new(), "attached later, perhaps with another loss"
    (other,) = on_each_rank(store, 1)
    assert other.is_new()
    assert not SharedStages.of(
        Places(None, Ranks(store)), (replace(FIRST[0], choices=FIRST[1].choices), FIRST[1]), OPTIONS
    ).is_new()
    assert not SharedStages.of(Places(None, Ranks(store)), FIRST, ((1,), (0,))).is_new()
