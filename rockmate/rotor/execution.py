"""Runs a chain of functions by a checkpointing sequence, under autograd.

The forward phase runs every stage once and leaves the autograd graph of eager mode. For stages that the sequence keeps
(Fe), autograd holds the saved tensors; for all others it holds slots (``rockmate/rotor/stages.py``). When the backward
reads the first slot of a stage, the sequence is run up to that stage's backward.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

from rkgb.program import in_mode
from rkgb.settings import settings
from rkgb.trace.capture import current_mode
from rockmate.calls.surroundings import running_in, runs_plainly
from rockmate.rotor.checks import in_place_message
from rockmate.rotor.parts import Parts
from rockmate.rotor.stages import Stage
from rockmate.rotor.values import Function, Held, versions_of
from solvers.rotor.ops import B, Fck, Fe, Fn, Loss, Operation, Sequence


class Call:
    """One forward and its backward, by the operations of ``sequence``.

    ``names``: of the stages; if given, every operation is announced on stderr. ``preserve_rng_state``: whether a
    recompute draws the same random numbers. ``parts``: those of the stages, if they are known.
    """

    def __init__(
        self,
        functions: Many[Function],
        sequence: Sequence | Many[Operation],
        names: Many[str] | None = None,
        preserve_rng_state: bool = True,
        parts: Many[Parts] = (),
    ) -> None:
        operations = tuple(sequence)
        end = next((k for k, op in enumerate(operations) if isinstance(op, Loss)), len(operations))
        self.forward_part, self.backward_part = operations[:end], operations[end + 1 :]
        self.names = names
        self.position = 0
        self.stages = [Stage(f, preserve_rng_state, p) for f, p in zip_longest(functions, parts)]
        self.stored: dict[int, Held] = {}
        self.current: tuple[int, Any] | None = None
        self.start: Held | None = None
        self.mode, self.settings = replace(current_mode(), grad=True), settings()

    def forward(self, x: Any) -> Any:
        """Run the forward phase on ``x``; the output of the last stage, with history.

        Raises ``ValueError`` for operations in an order that cannot run, ``AttributeError`` for an object that is no
        operation.
        """
        self.start = Held.of(x)
        done = 0
        for position, operation in enumerate(self.forward_part):
            if isinstance(operation, B):
                raise ValueError(f"{operation!r} stands in the forward phase, at position {position}")
            if not isinstance(operation, (Fn, Fck, Fe)):
                raise AttributeError(f"{operation!r} is no operation of a sequence (Fn, Fck, Fe, B, Loss)")
            i = operation.index
            if i != done or i >= len(self.stages):
                raise ValueError(f"{operation!r} stands where stage {done} of {len(self.stages)} has to run")
            self._announce(operation)
            if isinstance(operation, Fe):
                x = self.stages[i].keep_all(x)
            else:
                if isinstance(operation, Fck):
                    self.stored[i] = Held.of(x)
                x = self._first(i, x)
            done += 1
        if done < len(self.stages):
            raise ValueError(f"the sequence runs {done} of {len(self.stages)} stages before Loss")
        return x

    def _first(self, i: int, x: Any) -> Any:
        stage = self.stages[i]
        versions = versions_of(x)
        output = stage.first(x, partial(self.prepare, i))
        if versions != versions_of(x):
            raise ValueError(in_place_message(i, self._name(i)))
        return output

    def prepare(self, i: int, index: int) -> None:
        """Run the sequence up to the backward of stage ``i``, so that its slots are filled, ``index`` among them.

        Autocast, grad mode and settings of torch are those of the forward meanwhile.
        """
        with in_mode(self.mode) if runs_plainly(self.settings) else running_in(self.mode, self.settings):
            self._prepare(i, index)

    def _prepare(self, i: int, index: int) -> None:
        todo = self.backward_part
        while B(i) in todo[self.position :] and todo[self.position] != B(i):
            operation = todo[self.position]
            following = todo[self.position + 1] if self.position + 1 < len(todo) else None
            self.position += 1
            if isinstance(operation, Loss):
                raise ValueError(f"{operation!r} stands in the backward phase")
            if isinstance(operation, B):
                self._announce(operation)
                self.stages[operation.index].clear()
                self.current = None
            elif operation.index <= i:
                self._announce(operation)
                self._rerun(operation, following == B(operation.index))
            else:  # the backward of that stage was not needed, or read no saved tensor
                self.stored.pop(operation.index, None)
        if self.stages[i].slots[index] is None:
            self._from_start(i)
        self._drop_unread()

    def _drop_unread(self) -> None:
        """Release the inputs of the next stages whose backward reads no saved tensor: no slot will ask for them."""
        todo = self.backward_part[self.position :]
        for backward, run, following in zip(todo[0::2], todo[1::2], todo[2::2], strict=False):
            if not isinstance(backward, B) or not isinstance(run, Fe) or following != B(run.index):
                break
            if self.stages[run.index].slots:
                break
            self.stored.pop(run.index, None)

    def _rerun(self, operation: Fn | Fck | Fe, last: bool) -> None:
        i = operation.index
        if self.current is not None and self.current[0] == i:
            x = self.current[1]
        elif i in self.stored:
            x = self.stored[i].read(self._name(i))
        else:
            raise ValueError(f"{operation!r} stands where its input is not there")
        self.current = None
        if isinstance(operation, Fck):
            self.stored.setdefault(i, Held.of(x))
        else:
            self.stored.pop(i, None)
        stage = self.stages[i]
        if not isinstance(operation, Fe):
            x = stage.skim(x)
        else:
            x = stage.fill(x, not last)
            stage.release_states()
        self.current = None if x is None else (i + 1, x)

    def _from_start(self, i: int) -> None:
        """Fill the slots of stage ``i`` from the chain's input, for a backward that the sequence does not provide for:
        a second one, or one in another order.
        """
        assert self.start is not None
        x = self.start.read(self._name(0))
        for stage in self.stages[:i]:
            x = stage.skim(x)
        self.stages[i].fill(x, False)

    def _name(self, i: int) -> str:
        return self.names[i] if self.names else type(self.stages[i].function).__name__

    def _announce(self, operation: Operation) -> None:
        if self.names:
            index = getattr(operation, "index", None)
            sys.stderr.write(f"{operation!r} {'' if index is None else self.names[index]}\n")
