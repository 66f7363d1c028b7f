"""Costs and schedules that the ranks of a job share, with a store in one process in the place of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from rockmate.planning.disk import Disk, Places, Ranks, places_of


def number(content: dict[str, Any]) -> int:
    """What is made of a content; raises for what is no number."""
    if not isinstance(content["number"], int):
        raise ValueError(f"{content} has no number")
    return content["number"]


def test_the_first_rank_decides() -> None:
    store = dist.HashStore()
    first, second = (Places(None, Ranks(store)) for _ in range(2))
    assert first.read("a", number) is None
    assert first.keep("a", {"number": 1}, number, 1) == 1
    assert second.keep("a", {"number": 2}, number, 2) == 1, "found meanwhile, and given up for the first one"
    assert second.read("a", number) == first.read("a", number) == 1
    assert second.read("b", number) is None


def test_what_is_on_one_ranks_disk_is_offered_to_all(tmp_path: Path) -> None:
    store = dist.HashStore()
    with_file, without = Places(Disk(tmp_path), Ranks(store)), Places(None, Ranks(store))
    Places(Disk(tmp_path), None).keep("a", {"number": 1}, number, 1)
    assert without.read("a", number) is None
    assert with_file.read("a", number) == 1
    assert without.read("a", number) == 1


def test_what_another_rank_offers_is_checked(tmp_path: Path) -> None:
    store = dist.HashStore()
    store.set("rockmate/a", '{"number": "one"}')
    store.set("rockmate/b", "no JSON")
    places = Places(Disk(tmp_path), Ranks(store))
    assert places.read("a", number) is None
    assert places.keep("a", {"number": 2}, number, 2) == 2
    assert places.read("a", number) == 2, "from the disk"
    assert places.read("b", number) is None
    assert places.keep("b", {"number": 3}, number, 3) == 3


class Broken:
    """The store of a job whose first rank has ended."""

    def check(self, _: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")

    def compare_set(self, *_: str) -> bytes:
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_fails_is_as_none() -> None:
    places = Places(None, Ranks(Broken()))
    assert places.read("a", number) is None
    assert places.keep("a", {"number": 1}, number, 1) == 1


def test_one_process_shares_with_nobody(tmp_path: Path) -> None:
    assert places_of(None) is None
    assert places_of(Disk(tmp_path)) == Places(Disk(tmp_path), None)
