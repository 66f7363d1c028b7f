"""Parts of a followed forward under ``torch.utils.checkpoint``: where that is the same, they run as if they were not.

In the first call of a kind the parts run as they do in eager mode, and each is judged by what it did. Parts whose
second run would be the same as the first run plainly from then on, so that the plan decides what runs again. The others
keep their checkpoint: those that write, that draw other numbers in their second run, that change what Python holds or
read what is changed later, and reentrant ones that share with others what has gradients.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from rkgb.errors import UnsupportedError
from rkgb.probe.contexts import functions_of, next_number
from rkgb.program import same
from rkgb.randomness import drawing_again, random_state, watched_devices
from rkgb.trace.other_draws import other_states
from rkgb.trees import tensor_leaves
from rockmate.calls.rehearsal import Held
from rockmate.follow.noting import schema_of
from rockmate.follow.tape import Tape

Parts = list[bool | None]
"""The checkpointed parts of one kind of call, in the order in which they come: None for one that keeps its checkpoint,
and for others whether the second run drew the same numbers when it was found that they need none.
"""


class Unchecked:
    """Within, the checkpoints of one call run as ``parts`` says. ``found``: a part that had its checkpoint need not;
    ``stay``: one has to.
    """

    def __init__(self, parts: Parts, model: torch.nn.Module, tape: Tape) -> None:
        self.parts, self.model, self.tape = parts, model, tape
        self.found = self.stay = False
        self._came: list[_Part] = []
        self._within = False  # a part with its checkpoint, whose inner parts keep theirs
        self._outer: Unchecked | None = None

    def __enter__(self) -> Unchecked:
        setattr(checkpoint, _NAME, _generator)
        setattr(checkpoint, _NAME_OF_REENTRANT, _Reentrant)
        self._outer, _here.call = _here.call, self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        _here.call = self._outer
        for number, part in enumerate(self._came if kind is None else ()):
            if part.way == JUDGED:
                if part.alike and not part.differs(self.tape):
                    self.parts[number], self.found = bool(part.preserves), True
                else:
                    self.stay = True
            elif part.way == PLAIN and (why := part.differs(self.tape)):
                raise _changed(why)

    def run(
        self, own: Iterator[None], function: Any, args: Iterable[Any], preserves: bool, usual: bool
    ) -> Iterator[None]:
        """What runs around one part, which calls ``function`` with ``args``. ``own``: with its checkpoint;
        ``preserves``: its second run draws the same numbers; ``usual``: it is no selective one.
        """
        part = self._next(function, args, preserves, usual)
        if part.way == PLAIN:
            yield
            part.check(self.tape)
        else:
            with self._judged(part) if part.way == JUDGED else contextlib.nullcontext():
                yield from own

    def run_reentrant(self, function: Any, preserves: bool, args: tuple[Any, ...]) -> Any:
        part = self._next(function, args, preserves, usual=True)
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
                part.alike = _alike(again, result)
        return result

    def _next(self, function: Any, args: Iterable[Any], preserves: bool, usual: bool) -> _Part:
        number = len(self._came)
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        usual = usual and top is not None and top[0] == self.tape.pack  # others would pack what the checkpoint drops
        ops, data = len(self.tape.ops), len(self.tape.data)
        part = _Part(function, preserves, range(ops, ops), range(data, data), usual)
        part.read += [(x, _content(x)) for x in args if isinstance(x, _CONTAINERS)]
        if number == len(self.parts):
            self.parts.append(None)
            part.way = CHECKPOINTED if self._within else JUDGED
        elif usual and not self._within and bool(preserves) is self.parts[number]:
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
        read = (b for b in self.model.buffers() if any(k in part.ops for k in self.tape.readers_of(b)))
        part.buffers = [(b, b._version) for b in read]


class PlainGraph:
    """The graph that a reentrant part has without its checkpoint. Within one, autograd runs a backward of its own from
    the ``results`` to the tensors among the arguments, and adds to the gradients of leaves at once.

    ``beyond``: it uses what was computed before, and is no argument. ``readers``: the operations that read each tensor
    to which it adds more than one gradient, or whose gradient stays.
    """

    def __init__(self, args: tuple[Any, ...], results: list[torch.Tensor], first: int, tape: Tape) -> None:
        """``first``: the sequence number of the first node that it may have."""
        arguments = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
        at = {(t.grad_fn, t.output_nr): t for t in arguments if t.grad_fn is not None}
        uses: Counter[tuple[Any, int]] = Counter()
        # Without arguments its results have no gradients; of one that comes twice, gradients are added apart.
        self.beyond = not arguments or len({id(t) for t in arguments}) < len(arguments)
        self.readers: list[list[int]] = []
        for function in functions_of([t for t in results if t.requires_grad], first):
            if (leaf := getattr(function, "variable", None)) is not None:
                self.readers.append(tape.readers_of(leaf))
                continue
            uses.update((f, k) for f, k in function.next_functions if f is not None and f._sequence_nr() < first)
        self.beyond |= not uses.keys() <= at.keys()
        self.readers += [tape.readers_of(at[edge]) for edge, count in uses.items() if count > 1 and edge in at]

    def differs(self, within: range) -> str:
        """Why gradients are others with the checkpoint; empty if they are not. ``within``: the part's operations."""
        if self.beyond:
            return "needs the gradients of no tensor that it is given, or of others"
        if any(not readers or not all(k in within for k in readers) for readers in self.readers):
            return "shares tensors with others, so that gradients are added in another order"
        return ""


def _alike(ours: Any, theirs: Any) -> bool:
    """Whether two results are equal, bit for bit, and have gradients alike."""
    (mine, form), (others, other) = pytree.tree_flatten(ours), pytree.tree_flatten(theirs)
    return form == other and all(map(_equal, mine, others))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.requires_grad == b.requires_grad and same(a, b)
    return type(a) is type(b) and bool(a is b or a == b)


CHECKPOINTED, JUDGED, PLAIN = "checkpointed", "judged", "plain"


@dataclass
class _Part:
    """One part of a call, with its ``ops`` and ``data``. ``way``: it runs with its checkpoint, does so for the first
    time, or runs without. ``alike``: it may run without. ``reruns``: whether each of its operations gave the same again
    when it was over. ``held``: what Python held then; ``buffers``: that it has read, and their versions. ``graph``: of
    a reentrant part that ran without.
    """

    function: Any
    preserves: bool
    ops: range
    data: range
    usual: bool
    way: str = CHECKPOINTED
    alike: bool = False
    reruns: tuple[bool, ...] = ()
    held: Held | None = None
    buffers: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    graph: PlainGraph | None = None
    read: list[tuple[Any, list[Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self.read = [(cell, _content(cell)) for cell in _cells(self.function)]

    def over(self, tape: Tape) -> None:
        self.ops, self.data = range(self.ops.start, len(tape.ops)), range(self.data.start, len(tape.data))
        self.reruns = tuple(tape.ops[k].reruns for k in self.ops)

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
        for op in (tape.ops[k] for k in self.ops):
            schema = schema_of(op.func)
            if op.draws_from_given or (schema.random and not self.preserves):
                return "draws numbers that its second run would not draw"
            if op.writes_outside or any(number < self.data.start for number in op.writes) or not schema.pure:
                return "writes into memory that was there before"
        return ""

    def differs(self, tape: Tape) -> str:
        """Why it is not the same without its checkpoint, as the whole forward shows; empty if it is."""
        if any(not _are_same(_content(x), then) for x, then in self.read) or (self.held and self.held.changed()):
            return "may read what gets another value after it, so that its second run computes something else"
        written = any(b._version != then for b, then in self.buffers)
        if written or self.reruns != tuple(tape.ops[k].reruns for k in self.ops):
            return "reads memory that is written after it"
        if any(index >= self.ops.stop for n in self.data for index in tape.data[n].writers):
            return "makes memory that is written after it"
        return "" if self.graph is None else self.graph.differs(self.ops)


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


_CONTAINERS = (list, dict, set)


def _content(x: Any) -> list[Any]:
    """What a variable is, or ``x``, and what is in it if it is a list, a set or a dictionary."""
    try:
        content = x.cell_contents if isinstance(x, CellType) else x
    except ValueError:  # it has no value now
        content = None
    within = content if isinstance(content, _CONTAINERS) else ()
    return [content, *within, *(within.values() if isinstance(within, dict) else ())]


def _are_same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))


def _hooks(model: torch.nn.Module) -> int:
    """How many hooks the parameters have."""
    return sum(len(p._backward_hooks or ()) for p in model.parameters())


class _Here(threading.local):
    call: Unchecked | None = None  # the followed call that this thread is in


_here = _Here()

_NAME = "_checkpoint_without_reentrant_generator"
_OWN: Callable[..., Iterator[None]] = getattr(checkpoint, _NAME)


def _generator(function: Any, preserves: bool, context: Any, *rest: Any, **kwargs: Any) -> Iterator[None]:
    """In the place of torch's generator, of which torch takes one step before ``function`` runs, and one behind.
    Outside of followed calls it does the same.
    """
    own = _OWN(function, preserves, context, *rest, **kwargs)
    if _here.call is not None and torch.is_grad_enabled():
        args = (*rest[3:], *kwargs.values())  # behind how it is checked
        own = _here.call.run(own, function, args, preserves, context is checkpoint.noop_context_fn)
    yield from own


_NAME_OF_REENTRANT = "CheckpointFunction"
_OWN_REENTRANT: Any = getattr(checkpoint, _NAME_OF_REENTRANT)


class _Reentrant:
    """In the place of the function of autograd that is a reentrant part. Outside of followed calls it is that."""

    @staticmethod
    def apply(function: Any, preserves: bool, *args: Any) -> Any:
        if _here.call is not None and torch.is_grad_enabled():
            return _here.call.run_reentrant(function, preserves, args)
        return _OWN_REENTRANT.apply(function, preserves, *args)
