"""Python's garbage collector while much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rkgb.collector import CollectingRarely


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_thresholds_come_back_when_the_last_one_leaves() -> None:
    gc.set_threshold(700, 10, 10)
    rarely = CollectingRarely()
    with rarely:
        inside = gc.get_threshold()
        assert inside[0] > 700
        with rarely:
            assert gc.get_threshold() == inside
        assert gc.get_threshold() == inside
    assert gc.get_threshold() == (700, 10, 10)
    with pytest.raises(KeyError), rarely:
        raise KeyError
    assert gc.get_threshold() == (700, 10, 10)


def test_what_others_set_stays() -> None:
    rarely = CollectingRarely()
    gc.set_threshold(0, 10, 10)  # off
    with rarely:
        assert gc.get_threshold()[0] == 0
    gc.set_threshold(10**6, 5, 5)
    with rarely:
        assert gc.get_threshold() == (10**6, 5, 5)
        gc.set_threshold(300, 5, 5)
    assert gc.get_threshold() == (300, 5, 5)
