"""The backward of one call: the schedule's steps are taken as autograd comes to the nodes that they stand before."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from rkgb.program import in_mode
from rkgb.trace.capture import current_mode
from rockmate.calls.surroundings import RETAINED, graph_is_retained, running_in, runs_plainly
from rockmate.errors import GoneError
from rockmate.run.parts import left_out, staying_after, steps_between
from rockmate.run.store import Store
from solvers.schedule import Del, Run


class Backward:
    """Where the backwards of one call are in the schedule.

    ``next_stage``: whose steps come next. ``task``: autograd's number of the backward that runs, -1 between backwards;
    ``keeping``: it was called with retain_graph=True; ``thread``: where it runs; ``plain``: nothing but the mode
    differs there from the forward, and then ``mode`` is that thread's. ``retained``: the graph stays, and what the
    forward kept. ``skipped``: a part of the graph was left out, and what it needs stays. ``spent``: no slot is left, so
    that only autograd's own error can come. ``unreached``: nodes of outputs that a backward must reach for the budget
    to hold. ``arrived``: called once, when the first backward begins.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.program = store, store.program
        self.next_stage = 0
        self.task = -1
        self.keeping = False
        self.thread = 0
        self.plain, self.mode = False, store.program.mode
        self.retained = False
        self.skipped = False
        self.spent = False
        self.unreached: set[int] = set()
        self.arrived: Callable[[], None] | None = None

    # ------------------------------------------------------------------------- hooks of autograd

    def stop_before(self, i: int, results: list[torch.Tensor]) -> None:
        """Be called before the backward of node i, whose ``results`` these are."""

        before = partial(self.reach, i, self.program.stage_of[i])
        for function in dict.fromkeys(t.grad_fn for t in results):
            if function is not None:
                function.register_prehook(before)

    def watch_outputs(self, outputs: list[torch.Tensor]) -> None:
        """Know which outputs a backward leaves out, where that may exceed the budget."""

        def reached(node: int, _: Any) -> None:
            self.enter()
            self.unreached.discard(node)

        for node, k in self.program.ends.items():
            function = outputs[k].grad_fn
            if function is not None:
                self.unreached.add(node)
                function.register_prehook(partial(reached, node))

    # -------------------------------------------------------------------------- begin and end

    def enter(self) -> None:
        """A backward is here, perhaps a new one."""
        task = torch._C._current_graph_task_id()
        if task != self.task:
            if self.task >= 0:  # an error ended that one, or this one runs inside it
                self.end()
            self.task, self.thread, self.keeping = task, 0, graph_is_retained()
            if self.arrived is not None:
                arrived, self.arrived = self.arrived, None
                arrived()
            torch.autograd.Variable._execution_engine.queue_callback(self.over)

    def over(self) -> None:
        """Autograd calls this when a backward is over."""
        if self.unreached and not self.program.exceeding.isdisjoint((frozenset(), frozenset(self.unreached))):
            self.store.warn_unplanned("a backward left outputs out, and what the forward kept for them stayed")
        self.end()

    def end(self) -> None:
        """Another backward may come if the graph is not spent; it begins with what the forward kept."""
        self.task, self.next_stage = -1, 0
        self.spent = self.store.spent
        if self.spent:
            self.store.clear()
        else:
            self.store.as_after_forward()

    # ------------------------------------------------------------------------------- steps

    def reach(self, i: int, k: int, _gradients: Any = None) -> None:
        """The backward of node i is next: take the schedule's steps up to stage k."""
        self.enter()
        if k < self.next_stage or self.spent:
            return
        if self.keeping and not self.retained:
            self.retained = True
            self.store.warn_unplanned(RETAINED)
        foreseen = k == self.next_stage and i in self.program.stage_of
        self.skipped = self.skipped or not foreseen or left_out(self.store.slots, i)
        steps = self.program.before[k] if foreseen else steps_between(self.program, self.next_stage, k, i)
        staying = self._staying(i)
        with self._mode_of_runs():
            for step in steps:
                if isinstance(step, Run):
                    self._run(step.node, k)
                elif step.data in staying:
                    continue
                elif isinstance(step, Del):
                    self.store.live[step.data] = None
                    if self.skipped:
                        self.store.drop_from_slots(step.data)
                elif not self.retained:
                    self.store.hand_over(step.data)
        self.next_stage = k + 1

    def catch_up(self, i: int) -> None:
        """Node i reads what a stage makes whose own backward is left out: take the steps up to that stage."""
        if torch._C._current_graph_task_id() >= 0:
            k = sum(node >= i for node in self.program.stages) - 1
            if k >= 0:
                self.reach(i, k)

    def _run(self, i: int, k: int) -> None:
        """Run node i again in stage k; where that cannot be done, the error comes when a backward reads it."""
        try:
            self.store.run_again(i)
        except GoneError:
            return
        if i in self.store.random and not (self.retained or self.skipped) and (k, i) in self.program.final:
            del self.store.random[i]

    def _staying(self, i: int) -> Collection[int]:
        """What the forward kept and must not go when node i is reached."""
        if self.retained:
            return self.program.kept
        return staying_after(self.program, i, self.store.slots) if self.skipped else ()

    def _mode_of_runs(self) -> contextlib.AbstractContextManager[None]:
        """Nodes run as in the forward, whatever a backward runs under; that is asked once for each backward."""
        thread, mode = threading.get_ident(), self.program.mode
        if self.thread != thread:
            self.thread, self.plain, self.mode = thread, runs_plainly(self.store.settings), current_mode()
        return in_mode(mode, self.mode) if self.plain else running_in(mode, self.store.settings)
