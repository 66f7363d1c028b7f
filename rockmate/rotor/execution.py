"""Runs a chain of functions by a checkpointing sequence, under autograd.

The forward phase runs every stage once and leaves the autograd graph of eager mode. For stages that the sequence keeps
(Fe), autograd holds the saved tensors; for all others it holds slots (``rockmate/rotor/stages.py``). When the backward
comes to the output of a stage, before it copies a gradient, the sequence is run up to that stage's backward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch

from rkgb.program import in_mode
from rkgb.randomness import RandomSource, set_random_state
from rkgb.settings import settings
from rkgb.storages import versions_of
from rkgb.trace.capture import current_mode
from rkgb.trace.other_draws import NUMPY, PYTHON, other_states
from rkgb.trees import tensors_of
from rockmate.calls.surroundings import running_in, runs_plainly
from rockmate.rotor.inspection import DRAWS_OTHERS, in_place_message
from rockmate.rotor.parts import Function, Held, Moment
from rockmate.rotor.stages import Stage, States
from solvers.rotor.ops import B, Fck, Fe, Loss, OnStage, Operation, Sequence, run_starts
from solvers.rotor.walk import check_order


class Call:
    """One forward and its backward, by the operations of ``sequence``.

    ``layers``: earlier moments of the stages. ``names``: of the stages; if given, every operation is announced on
    stderr. ``preserve``: whether a recompute draws the same random numbers.
    """

    def __init__(self, layers: Many[Moment], sequence: Sequence, names: Many[str] | None, preserve: bool) -> None:
        end = sequence.index(Loss())
        self.forward_part, self.todo = cast(tuple[tuple[OnStage, ...], ...], (sequence[:end], sequence[end + 1 :]))
        self.names, self.preserve = names, preserve
        self.stages = [Stage(layer, preserve) for layer in layers]
        self.stored: dict[int, Held] = {}
        self.starts, self.aside = run_starts(sequence), States()
        self.mode, self.settings = replace(current_mode(), grad=True), settings()
        self.caches = bool(self.mode.autocast) and torch.is_autocast_cache_enabled()

    def forward(self, x: Any) -> Any:
        """Run the forward phase on ``x``; the output of the last stage, with history."""
        stopping = {a.index for a, b in pairwise(self.todo) if isinstance(a, Fe) and b == B(a.index)}
        self.start, known, others = Held(x), set[RandomSource](), other_states()
        for i, (operation, stage) in enumerate(zip(self.forward_part, self.stages, strict=True)):
            self._announce(operation)
            if isinstance(operation, Fe):
                x = stage.first(x, None)
                continue
            if isinstance(operation, Fck):
                self.stored[i] = Held(x)
            known = set() if i in self.starts else known
            versions = versions_of(before := tensors_of(x))
            output = stage.first(x, partial(self.prepare, i), i in stopping, known)
            known |= (stage.generators or {}).keys()
            if versions != versions_of(before):
                raise ValueError(in_place_message(f"layer {i} ({stage.name})"))
            self._await(i, output)
            x = output
            del output, before  # the next stage may be the last to read it
        self.others_drawn = other_states() != others  # by a layer, or another thread
        return x

    def _await(self, i: int, output: Any) -> None:
        """Prepare the backward of stage ``i`` when it comes to ``output``. The graph does not keep this call for it."""
        call = weakref.ref(self)

        def comes(_: Any) -> None:
            if (now := call()) is not None and B(i) in now.todo:
                now.prepare(i)

        for function in filter(None, (t.grad_fn for t in tensors_of(output))):
            function.register_prehook(comes)

    def prepare(self, i: int, index: int | None = None) -> None:
        """Run the sequence up to the backward of stage ``i``, so that its slots are filled, ``index`` among them.

        Autocast, grad mode and settings of torch are those of the forward meanwhile.
        """
        with in_mode(self.mode) if runs_plainly(self.settings) else running_in(self.mode, self.settings):
            end = self.todo.index(B(i)) if B(i) in self.todo else 0
            now, self.todo = self.todo[: end + 1], self.todo[end:]
            others = other_states() if self.others_drawn and self.preserve else None
            try:
                for operation, following in pairwise(now):
                    self._take(i, operation, following)
                if index is not None and self.stages[i].slots[index] is None:
                    self._from_start(i)
            finally:
                self._restore_generators()
            if others is not None and other_states() != others:
                raise RuntimeError(
                    f"{self.stages[i].name}, or a layer before, {DRAWS_OTHERS.format(f'{PYTHON} or {NUMPY}')}"
                )

    def _take(self, i: int, operation: OnStage, following: OnStage) -> None:
        """An operation of the backward phase, before that of stage ``i``."""
        k = operation.index
        if not isinstance(operation, B) and k > i:  # the backward of that stage was not needed, or read no saved tensor
            self.stored.pop(k, None)
            return
        self._announce(operation)
        if isinstance(operation, B):
            self._restore_generators()
            self.stages[k].clear()
            self.stored.pop(k + 1, None)
            return
        x = (self.stored[k] if isinstance(operation, Fck) else self.stored.pop(k)).read(self.stages[k].name)
        stage, keeps = self.stages[k], isinstance(operation, Fe)
        with self._caching():
            x = stage.fill(x, following != B(k), self.aside) if keeps else stage.again(x, self.aside)
        if keeps:
            stage.release_states()
        if x is not None:
            self.stored[k + 1] = Held(x)

    def _from_start(self, i: int) -> None:
        """Fill the slots of stage ``i`` from the chain's input, for a backward that the sequence does not provide for:
        a second one, or one in another order.
        """
        x = self.start.read(self.stages[0].name)
        with self._caching():
            for stage in self.stages[:i]:
                x = stage.again(x, self.aside)
            self.stages[i].fill(x, False, self.aside)

    def _restore_generators(self) -> None:
        """What runs again has drawn: the caller's generators are as before."""
        for source, state in self.aside.items():
            set_random_state(source, state)
        self.aside.clear()

    @contextmanager
    def _caching(self) -> Iterator[None]:
        """While a stage runs again, autocast keeps copies of weights as in the forward, if it has no others."""
        if not self.caches:
            yield
            return
        keeps, alone = torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting() == 1
        torch.set_autocast_cache_enabled(keeps or alone)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(keeps)
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    def _announce(self, operation: OnStage) -> None:
        if self.names:
            sys.stderr.write(f"{operation!r} {self.names[operation.index]}\n")


class CheckpointOptim(torch.autograd.Function):
    """``CheckpointOptim.apply(functions, sequence, names, preserve_rng_state, *arg)``: run a chain by a sequence.

    ``functions``: the stages, each from one value to the next. ``sequence``: Fn, Fck, Fe, B and Loss. ``names``: of the
    functions; if given, every operation is announced on stderr. ``preserve_rng_state``: whether a stage that runs again
    draws the same random numbers. ``arg``: one tensor, or several, which the first stage gets as a tuple.

    It returns the output of the last stage in the autograd graph of eager mode, for programs that bring their own
    sequence. Raises ``ValueError`` for operations in an order that cannot run and for too few names, ``AttributeError``
    for what is no operation.
    """

    @classmethod
    def apply(
        cls,
        functions: Many[Function],
        sequence: Sequence | Many[Operation],
        names: Many[str] | None,
        preserve_rng_state: bool,
        *arg: Any,
    ) -> Any:
        """The output of the last function."""
        operations = Sequence(sequence)
        for operation in operations:
            if not isinstance(operation, Operation):
                raise AttributeError(f"{operation!r} is no operation of a sequence (Fn, Fck, Fe, B, Loss)")
        check_order(len(functions), operations)
        if names and len(names) != len(functions):
            raise ValueError(f"there are {len(functions)} functions and {len(names)} names: give each a name, or None")
        layers = [*map(Moment, functions)]
        return Call(layers, operations, names, preserve_rng_state).forward(arg[0] if len(arg) == 1 else arg)
