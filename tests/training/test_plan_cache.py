"""The cache of plans, which several threads read and change at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import case, randn, square_loss

from rockmate import PlanningWarning, Rockmate
from rockmate.calls.runnable import MAX_PLANS, PlanCache

NONE: frozenset[str] = frozenset()


def runnable(name: str) -> Any:
    return SimpleNamespace(name=name, state=SimpleNamespace(code=name))


class Key:
    """Equal to all others, or to none; while it is compared, another thread changes the cache."""

    def __init__(self, meanwhile: Callable[[], None], equal: bool) -> None:
        self.meanwhile, self.equal = meanwhile, equal

    def __eq__(self, other: object) -> bool:
        thread = threading.Thread(target=self.meanwhile)
        thread.start()
        thread.join()
        return self.equal

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize("change", ["used", "add", "adapt", "replace"])
def test_a_thread_finds_what_was_there_when_it_began(change: str) -> None:
    cache = PlanCache()
    runnables = [runnable(name) for name in "abc"]
    changes: dict[str, Callable[[], None]] = {
        "used": lambda: cache.used(runnables[0]),
        "add": lambda: cache.add("key", NONE, runnable("d")),
        "adapt": lambda: cache.adapt(runnables[1], runnable("e")),
        "replace": lambda: cache.replace(runnables[2], runnable("f")),
    }
    for v in runnables:
        cache.add(Key(changes[change], equal=v is runnables[0]), NONE, v)
    assert cache.find("key", NONE) is runnables[0]
    for v in runnables[1:]:
        cache.replace(runnables[0], v)
    cache.for_another_budget("key", NONE)


def test_the_cache_drops_the_least_recently_used() -> None:
    cache = PlanCache()
    runnables = [runnable(str(k)) for k in range(MAX_PLANS + 2)]
    for k, v in enumerate(runnables[:MAX_PLANS]):
        cache.add(k, NONE, v)
    cache.used(runnables[0])
    with pytest.warns(PlanningWarning, match=f"more than {MAX_PLANS} kinds of calls") as warned:
        for k, v in enumerate(runnables[MAX_PLANS:], MAX_PLANS):
            cache.add(k, NONE, v)
    assert len(warned) == 1
    assert cache.dropped == 2
    assert [k for k in range(len(runnables)) if not cache.find(k, NONE)] == [1, 2]


def test_threads_with_calls_of_one_kind_plan_once() -> None:
    c = case("mlp")
    rk = Rockmate(c.model(), c.call(0)[0], "1 MiB", costs="flops")
    x = randn(64, 16, seed=1, requires_grad=True)
    start = threading.Barrier(3)

    def work(_: int) -> torch.Tensor:
        start.wait()
        (gradient,) = torch.autograd.grad(square_loss(rk(x)), x)
        return gradient

    with ThreadPoolExecutor(3) as threads:
        first, *others = threads.map(work, range(3))
    assert all(torch.equal(first, other) for other in others)
    assert len(rk._front.plans) == 2
