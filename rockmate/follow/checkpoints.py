"""Parts of a followed forward under ``torch.utils.checkpoint``: where that is the same, they run as if they were not.

In the first call of a kind the parts run as they do in eager mode, and each is judged by what it did. Parts whose
second run would be the same as the first run plainly from then on, so that the plan decides what runs again. The others
keep their checkpoint: reentrant ones, and those that write, that draw other numbers in their second run, or that change
what Python holds.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint

from rkgb.errors import UnsupportedError
from rockmate.calls.held import Held
from rockmate.follow.noting import Schema
from rockmate.follow.record import Op
from rockmate.follow.tape import Tape


class CheckpointedParts:
    """The checkpointed parts of one kind of call, in the order in which they come. ``plain``: whether each one runs
    without its checkpoint.
    """

    def __init__(self) -> None:
        self.plain: list[bool] = []


class Unchecked:
    """Within, the checkpoints of one call run as ``parts`` says. ``found``: a part that had its checkpoint need not;
    ``stay``: one has to.
    """

    def __init__(self, parts: CheckpointedParts, model: torch.nn.Module, tape: Tape) -> None:
        self.parts, self.model, self.tape = parts, model, tape
        self.found = self.stay = False
        self._came = 0
        self._within = False  # a part with its checkpoint, whose inner parts keep theirs
        self._outer: Unchecked | None = None

    def __enter__(self) -> Unchecked:
        setattr(checkpoint, _NAME, _generator)
        setattr(checkpoint, _NAME_IN_REENTRANT, _in_reentrant)
        self._outer, _HERE.call = getattr(_HERE, "call", None), self
        return self

    def __exit__(self, *_: Any) -> None:
        _HERE.call = self._outer

    def run(self, own: Iterator[None], preserves: bool, usual: bool) -> Iterator[None]:
        """What runs around one part. ``own``: with its checkpoint; ``preserves``: its second run draws the same
        numbers; ``usual``: it is no selective one.
        """
        number, self._came, tape = self._came, self._came + 1, self.tape
        op, datum = len(tape.ops), len(tape.data)
        known = number < len(self.parts.plain)
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        usual = usual and top is not None and top[0] == tape.pack  # others would pack what the checkpoint drops
        if known and self.parts.plain[number] and usual and not self._within:
            yield
            if why := _effect(tape.ops[op:], datum, preserves):
                raise UnsupportedError(
                    f"a part under torch.utils.checkpoint {why}, which it did not in the first call: remove the "
                    "checkpoint, since a plan decides what runs again"
                )
            return
        if known or self._within:
            if not known:
                self.parts.plain.append(False)
            yield from own
            return
        self._within = True
        self.parts.plain.append(False)
        try:
            held, numbers = Held(self.model), _numbers()
            yield from own
        finally:
            self._within = False
        kept = not held.one_way and not held.changed() and numbers == _numbers()
        if kept and usual and not _effect(tape.ops[op:], datum, preserves):
            self.parts.plain[number] = self.found = True
        else:
            self.stay = True


_HERE = threading.local()
"""``call``: the followed call that this thread is in."""

_NAME = "_checkpoint_without_reentrant_generator"
_OWN: Callable[..., Iterator[None]] = getattr(checkpoint, _NAME)


def _generator(function: Any, preserves: bool, context: Any, *rest: Any, **kwargs: Any) -> Iterator[None]:
    """In the place of torch's generator, of which torch takes one step before ``function`` runs, and one behind.
    Outside of followed calls it does the same.
    """
    own = _OWN(function, preserves, context, *rest, **kwargs)
    call: Unchecked | None = getattr(_HERE, "call", None)
    if call is None or not torch.is_grad_enabled():
        yield from own
    else:
        yield from call.run(own, preserves, context is checkpoint.noop_context_fn)


_NAME_IN_REENTRANT = "check_backward_validity"
_OWN_IN_REENTRANT: Callable[[Any], None] = getattr(checkpoint, _NAME_IN_REENTRANT)


def _in_reentrant(inputs: Any) -> None:
    """In the place of what torch calls in the forward of each reentrant part."""
    if (call := getattr(_HERE, "call", None)) is not None:
        call.stay = True
    _OWN_IN_REENTRANT(inputs)


def _effect(ops: list[Op], first: int, preserves: bool) -> str:
    """What the operations of a part do whose second run would do more or something else; empty if nothing.
    ``first``: its first datum. ``preserves``: its second run draws the same numbers.
    """
    for op in ops:
        schema = Schema.of(op.func)
        if op.draws_from_given or (schema.random and not preserves):
            return "draws numbers that its second run would not draw"
        if op.writes_outside or any(number < first for number in op.writes) or not schema.pure:
            return "writes into memory that was there before"
    return ""


def _numbers() -> tuple[Any, ...]:
    """The states of Python's and NumPy's generators, which a checkpoint does not put back."""
    numpy: Any = sys.modules.get("numpy.random")
    legacy = () if numpy is None else numpy.get_state()
    return random.getstate(), *(x.tobytes() if hasattr(x, "tobytes") else x for x in legacy)
