"""Parts of a followed forward under ``torch.utils.checkpoint``: where that is the same, they run as if they were not.

In the first call of a kind the parts run as they do in eager mode, and each is judged by what it did. Parts whose
second run would be the same as the first run plainly from then on, so that the plan decides what runs again. The others
keep their checkpoint: those that write, that draw other numbers in their second run, that change what Python holds or
read what is changed later, and reentrant ones that share with others what has gradients.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch.utils import checkpoint

from rkgb.errors import UnsupportedError
from rkgb.probe.contexts import next_number
from rkgb.randomness import drawing_again, random_state, watched_devices
from rkgb.trace.other_draws import other_states
from rkgb.trees import tensor_leaves
from rockmate.calls.held import Held
from rockmate.follow.noting import Schema
from rockmate.follow.reentrant import PlainGraph, alike
from rockmate.follow.tape import Tape


class CheckpointedParts:
    """The checkpointed parts of one kind of call, in the order in which they come. ``plain``: whether each one runs
    without its checkpoint; ``preserves``: whether its second run drew the same numbers when that was found.
    """

    def __init__(self) -> None:
        self.plain: list[bool] = []
        self.preserves: list[bool] = []


class Unchecked:
    """Within, the checkpoints of one call run as ``parts`` says. ``found``: a part that had its checkpoint need not;
    ``stay``: one has to.
    """

    def __init__(self, parts: CheckpointedParts, model: torch.nn.Module, tape: Tape) -> None:
        self.parts, self.model, self.tape = parts, model, tape
        self.found = self.stay = False
        self._came: list[_Part] = []
        self._within = False  # a part with its checkpoint, whose inner parts keep theirs
        self._outer: Unchecked | None = None

    def __enter__(self) -> Unchecked:
        setattr(checkpoint, _NAME, _generator)
        setattr(checkpoint, _NAME_OF_REENTRANT, _Reentrant)
        self._outer, _HERE.call = getattr(_HERE, "call", None), self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        _HERE.call = self._outer
        for number, part in enumerate(self._came if kind is None else ()):
            if part.way == JUDGED:
                plain = part.alike and not part.differs(self.tape)
                self.parts.plain[number] |= plain
                self.found |= plain
                self.stay |= not plain
            elif part.way == PLAIN and (why := part.differs(self.tape)):
                raise _changed(why)

    def run(self, own: Iterator[None], function: Any, preserves: bool, usual: bool) -> Iterator[None]:
        """What runs around one part, which calls ``function``. ``own``: with its checkpoint; ``preserves``: its second
        run draws the same numbers; ``usual``: it is no selective one.
        """
        part = self._next(function, preserves, usual)
        if part.way == PLAIN:
            yield
            part.check(self.tape)
        elif part.way == JUDGED:
            with self._judged(part):
                yield from own
        else:
            yield from own

    def run_reentrant(self, function: Any, preserves: bool, args: tuple[Any, ...]) -> Any:
        """What a reentrant part returns."""
        part = self._next(function, preserves, usual=True)
        if part.way == PLAIN:
            result = part.call(args, self.tape)
            part.check(self.tape)
            return result
        if part.way == CHECKPOINTED:
            return _OWN_REENTRANT.apply(function, preserves, *args)
        devices = watched_devices(tensor_leaves(args))
        before = [random_state(d) for d in devices]
        with self._judged(part):
            result = _OWN_REENTRANT.apply(function, preserves, *args)
        if part.alike:  # as far as Python and what it writes tell; now without the checkpoint, and with gradients
            with drawing_again(devices, before):
                again = part.call(args, self.tape)
            part.over(self.tape)
            with torch._C._DisableTorchDispatch():  # no operation of the forward
                part.alike = alike(again, result)
        return result

    def _next(self, function: Any, preserves: bool, usual: bool) -> _Part:
        plain, number = self.parts.plain, len(self._came)
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        usual = usual and top is not None and top[0] == self.tape.pack  # others would pack what the checkpoint drops
        part = _Part(function, preserves, len(self.tape.ops), len(self.tape.data), usual)
        if number == len(plain):
            plain.append(False)
            self.parts.preserves.append(preserves)
            part.way = CHECKPOINTED if self._within else JUDGED
        elif plain[number] and usual and not self._within and preserves == self.parts.preserves[number]:
            part.way = PLAIN
        self._came.append(part)
        return part

    @contextlib.contextmanager
    def _judged(self, part: _Part) -> Iterator[None]:
        """While the part runs with its checkpoint for the first time."""
        self._within = True
        try:
            held, numbers = Held(self.model), (other_states(), _hooks(self.model))
            yield
        finally:
            self._within = False
        part.over(self.tape)
        kept = not held.one_way and not held.changed() and numbers == (other_states(), _hooks(self.model))
        part.alike, part.held = part.usual and kept and not part.effect(self.tape), held
        within = range(part.begin, part.end)
        read = (b for b in self.model.buffers() if any(k in within for k in self.tape.readers_of(b)))
        part.buffers = [(b, b._version) for b in read]


CHECKPOINTED, JUDGED, PLAIN = "checkpointed", "judged", "plain"


@dataclass
class _Part:
    """One part of a call, from operation ``begin`` to ``end``. ``first``: its first datum, ``last``: the one behind its
    last. ``way``: it runs with its checkpoint, does so for the first time, or runs without. ``alike``: it may run
    without. ``reruns``: whether each of its operations gave the same again when it was over. ``held``: what Python held
    then; ``buffers``: that it has read, and their versions. ``graph``: of a reentrant part that ran without.
    """

    function: Any
    preserves: bool
    begin: int
    first: int
    usual: bool
    way: str = CHECKPOINTED
    end: int = 0
    last: int = 0
    alike: bool = False
    reruns: tuple[bool, ...] = ()
    held: Held | None = None
    buffers: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    graph: PlainGraph | None = None
    cells: list[tuple[Any, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = [(cell, _content(cell)) for cell in _cells(self.function)]

    def over(self, tape: Tape) -> None:
        """It has run."""
        self.end, self.last = len(tape.ops), len(tape.data)
        self.reruns = tuple(op.reruns for op in tape.ops[self.begin : self.end])

    def call(self, args: tuple[Any, ...], tape: Tape) -> Any:
        """What its function returns, with gradients."""
        number = next_number()
        result = self.function(*args)
        self.graph = PlainGraph(args, tensor_leaves(result), number, tape)
        return result

    def check(self, tape: Tape) -> None:
        """It ran without its checkpoint. Raises ``UnsupportedError`` where that is not the same."""
        self.over(tape)
        if why := self.effect(tape):
            raise _changed(why)

    def effect(self, tape: Tape) -> str:
        """What its operations do whose second run would do more or something else; empty if nothing."""
        for op in tape.ops[self.begin : self.end]:
            schema = Schema.of(op.func)
            if op.draws_from_given or (schema.random and not self.preserves):
                return "draws numbers that its second run would not draw"
            if op.writes_outside or any(number < self.first for number in op.writes) or not schema.pure:
                return "writes into memory that was there before"
        return ""

    def differs(self, tape: Tape) -> str:
        """Why it is not the same without its checkpoint, as the whole forward shows; empty if it is."""
        if any(not _is_still(cell, content) for cell, content in self.cells) or (self.held and self.held.changed()):
            return "may read what gets another value after it, so that its second run computes something else"
        written = any(b._version != then for b, then in self.buffers)
        if written or self.reruns != tuple(op.reruns for op in tape.ops[self.begin : self.end]):
            return "reads memory that is written after it"
        if any(index >= self.end for datum in tape.data[self.first : self.last] for index in datum.writers):
            return "makes memory that is written after it"
        if self.graph is not None and (why := self.graph.differs(range(self.begin, self.end))):
            return why
        return ""


def _changed(why: str) -> UnsupportedError:
    return UnsupportedError(
        f"a part under torch.utils.checkpoint {why}, which it did not in the first call: remove the checkpoint, since "
        "a plan decides what runs again"
    )


def _cells(function: Any) -> Iterator[Any]:
    """The variables of functions around it that ``function`` reads, and functions that it has from there."""
    while isinstance(function, functools.partial):
        function = function.func
    cells = getattr(function, "__closure__", None) or ()
    yield from cells
    for content in (*(_content(cell)[0] for cell in cells), *(getattr(function, "__defaults__", None) or ())):
        if isinstance(content, FunctionType) and content is not function:
            yield from _cells(content)


def _content(cell: Any) -> tuple[Any, Any]:
    """What a variable is, and what is in it if it is a list or a dictionary."""
    try:
        content = cell.cell_contents
    except ValueError:  # it has no value now
        return None, None
    return content, content.copy() if isinstance(content, (list, dict, set)) else None


def _is_still(cell: Any, content: tuple[Any, Any]) -> bool:
    (now, within), (then, before) = _content(cell), content
    if now is not then or before is None:
        return now is then
    pairs = zip(within, before, strict=False)
    same = len(within) == len(before) and all(a is b for a, b in pairs)
    return same and (not isinstance(before, dict) or all(within[k] is v for k, v in before.items()))


def _hooks(model: torch.nn.Module) -> int:
    """How many hooks the parameters have."""
    return sum(len(p._backward_hooks or ()) for p in model.parameters())


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
        yield from call.run(own, function, preserves, context is checkpoint.noop_context_fn)


_NAME_OF_REENTRANT = "CheckpointFunction"
_OWN_REENTRANT: Any = getattr(checkpoint, _NAME_OF_REENTRANT)


class _Reentrant:
    """In the place of the function of autograd that is a reentrant part. Outside of followed calls it is that."""

    @staticmethod
    def apply(function: Any, preserves: bool, *args: Any) -> Any:
        """What the part returns."""
        call: Unchecked | None = getattr(_HERE, "call", None)
        if call is None or not torch.is_grad_enabled():
            return _OWN_REENTRANT.apply(function, preserves, *args)
        return call.run_reentrant(function, preserves, args)
