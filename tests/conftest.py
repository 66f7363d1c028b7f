"""Tests plan for themselves: what they find on disk they have put there, in a folder of their own."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rkgb.warn
import rockmate.calls.structure
import solvers.chain.costs
from solvers.block.block import BlockView, Option
from solvers.block.ilp import Grid, TimeLimit, view_options
from solvers.chain.costs import SolvedViews

# Else pytest gives this logger handlers of its own, and torch writes a protocol in JSON of all that it captures.
logging.getLogger("torch.__trace").propagate = True

os.environ["ROCKMATE_CACHE"] = "off"  # before anything plans; programs that tests start inherit it


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said once in a process is said once in each test."""
    monkeypatch.setattr(rkgb.warn, "_said", set())


@pytest.fixture(autouse=True)
def _small_models_are_planned_as_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a run, where that can be. Programs that tests start run what takes little time, as users' do."""
    monkeypatch.setattr(rockmate.calls.structure, "_QUICK", 0)


SOLVED: SolvedViews = {}


@pytest.fixture(autouse=True)
def _blocks_are_solved_once(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The options of a block follow from its figures. Tests that plan one model share them, but for tests of solvers,
    and of searches whose time is limited.
    """

    def once(view: BlockView, grid: Grid, report: Callable[[float], None], limit: TimeLimit) -> tuple[Option, ...]:
        key = view.key, grid
        if limit.remaining() < math.inf:
            return view_options(view, grid, report, limit)
        if key not in SOLVED:
            SOLVED[key] = view_options(view, grid, report, limit)
        return SOLVED[key]

    if request.path.parent.name != "solvers":
        monkeypatch.setattr(solvers.chain.costs, "view_options", once)


FILES = itertools.count(1)


@pytest.fixture(autouse=True, scope="module")
def _the_collector_takes_all_back() -> Iterator[None]:
    """What is left out while tests run is collected behind each eighth file: to go through all takes half a second."""
    yield
    if next(FILES) % 8 == 0:
        gc.unfreeze()


@pytest.fixture(autouse=True)
def _the_collector_leaves_out_what_is_there(_the_collector_takes_all_back: None) -> None:
    """Measuring calls Python's collector, which would go through all that imports and earlier tests have left."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def accelerator() -> Iterator[Callable[..., Any]]:
    """Makes Accelerators, each as the first of its process."""
    accelerate = pytest.importorskip("accelerate")

    def make(**options: Any) -> Any:
        accelerate.state.AcceleratorState._reset_state(True)
        return accelerate.Accelerator(cpu=True, **options)

    yield make
    accelerate.state.AcceleratorState._reset_state(True)
