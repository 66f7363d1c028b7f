"""Calls of a module that is traced as a whole, whose Python is watched for what would make it run otherwise."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

from rkgb.sample import Call
from rockmate.calls.calls import Calls, L
from rockmate.calls.families import Family
from rockmate.calls.front import Front
from rockmate.calls.held import undone_if_it_fails
from rockmate.calls.keys import call_key
from rockmate.calls.python_state import Place, PythonState, find
from rockmate.calls.state import check_wrappers, module_key, watched_hooks
from rockmate.calls.variants import Variant
from rockmate.planning.planner import Planner
from rockmate.progress import Report


class WatchedCalls(Calls):
    """A plan is used for calls for which all that the module's Python can read is as it was at planning."""

    def __init__(self, module: torch.nn.Module, front: Front) -> None:
        super().__init__(module, front)
        self._unwatched: set[Place] = set()

    def kind(self, call: Call) -> tuple[Hashable, frozenset[str]]:
        """As in ``Calls``; attributes of modules, classes, hooks and ties are part of the key."""
        modules, missing = module_key(self.module)
        return (call_key(call.leaves, call.spec), modules), missing

    def sizeless(self, call: Call) -> Hashable:
        """As in ``Calls``."""
        return call_key(call.leaves, call.spec, sized=False), module_key(self.module)[0]

    def resized_planner(
        self, call: Call, latest: Callable[[Family], L | None], report: Report
    ) -> tuple[Planner, L] | None:
        """None: at other sizes the module's Python may do otherwise in ways that change gradients and no value, so that
        each size is traced.
        """
        return None

    def fitting(self, found: list[Variant], call: Call) -> list[Variant]:
        """Those for which the objects that the code can read are as they were."""
        now = {v.state.code: find(self.module, call.leaves, v.state.code) for v in found if v.state}
        return [v for v in found if v.state and v.state.changed(now[v.state.code]) <= self._unwatched]

    @contextmanager
    def planning(self, call: Call) -> Iterator[None]:
        """Hooks are watched. What forward itself changes is no reason to plan again."""
        check_wrappers(self.module)
        before = [PythonState(code, find(self.module, call.leaves, code)) for code in self.cache.codes()]
        with undone_if_it_fails(self.module), super().planning(call), watched_hooks(self.module):
            yield
        for state in before:
            self._unwatched |= state.changed(find(self.module, call.leaves, state.code))

    def state_of(self, planner: Planner, call: Call) -> PythonState | None:
        """What the code that ran can read."""
        code = planner.graphs.D.structure.code
        code = next((known for known in self.cache.codes() if known.reads_as(code)), code)
        return PythonState(code, find(self.module, call.leaves, code))
