"""What is noted of a followed forward: operations below autograd, and the memory that they make and read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from rkgb.storages import alias_of, counter_of
from rockmate.errors import GoneError
from rockmate.run.slots import Form, changed


class Ref(NamedTuple):
    """An argument that lies in memory of a datum."""

    datum: int
    form: Form


class Outside:
    """An argument in memory that was there before the forward, or is not followed.

    ``version``: how often it was written when the operation ran. ``copied``: reruns get a copy, since the operation
    writes into it (running statistics of a batch norm).
    """

    __slots__ = ("copied", "tensor", "version")

    def __init__(self, t: torch.Tensor, copied: bool) -> None:
        self.tensor = alias_of(t)  # ``t`` itself may be given other memory (t.data = …)
        self.version = 0 if t.is_inference() else t._version
        self.copied = copied

    @property
    def is_there(self) -> bool:
        """Whether its memory has its bytes: that of sharded parameters is there while they are gathered."""
        return not self.tensor.numel() or self.tensor.untyped_storage().nbytes() > 0

    def value(self) -> torch.Tensor:
        """The tensor for a rerun. Raises ``RuntimeError`` where it was written since, ``GoneError`` where its memory is
        not there.
        """
        t = self.tensor
        if not self.is_there:
            raise GoneError(
                f"a backward needs a sharded parameter of shape {list(t.shape)} to compute something again, and it is "
                "not gathered then: run the backward of each layer as a whole"
            )
        if self.copied:
            return t.clone()
        if not t.is_inference() and t._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(t.shape)} that the forward read was changed in place before the backward "
                f"that reads it again: it is at version {t._version}, expected version {self.version}. Change it after "
                "the backward."
            )
        return t


@dataclass(slots=True)
class Op:
    """One operation. ``args`` and ``kwargs`` have ``Ref`` and ``Outside`` in the place of tensors.

    ``makes``: (position among the results, datum) of what it allocates. ``reads`` and ``writes``: data. ``reruns``:
    whether it gives the same when it runs again. ``gathered``: storages that it reads, whose memory comes and goes.
    ``nanoseconds``: that it took. ``writes_outside``: it writes into memory that is not followed. ``draws_from_given``:
    it draws from a generator among its arguments. ``grad``: gradients were on, which some kernels ask.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    reruns: bool
    grad: bool
    makes: tuple[tuple[int, int], ...] = ()
    gathered: frozenset[int] = frozenset()
    nanoseconds: int = 0
    writes_outside: bool = False
    draws_from_given: bool = False


OpForm = tuple[Any, ...]
"""What an operation is, sizes and numbers apart: its function, the data that it reads, writes and makes, and whether it
gives the same again.
"""


def form_of_op(op: Op) -> OpForm:
    """What ``op``, which has just run, is."""
    return op.func, op.reads, op.writes, op.makes, op.reruns


@dataclass(slots=True, eq=False)
class Datum:
    """Memory that one operation of the forward allocates. ``size``: bytes. ``base``: a tensor in it, if it is held.

    ``maker`` allocates it; ``writers`` write into it later, in order. ``readers``: operations that have read it since.
    ``slots``: tensors in it that autograd's graph refers to. ``pinned``: it cannot be made again. ``exposed``: other
    libraries may write into it. ``counter``: has its version counter; ``version``: what that was when the forward
    returned, None where nobody else can write into ``base``. ``needs``: storages that have to be there for it to be
    made again.
    """

    number: int
    size: int
    maker: int
    pinned: bool
    base: torch.Tensor | None = None
    writers: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)
    slots: int = 0
    exposed: bool = False
    counter: torch.Tensor | None = None
    version: int | None = None
    needs: frozenset[int] = frozenset()

    @property
    def makers(self) -> tuple[int, ...]:
        """The operations that make it again."""
        return self.maker, *self.writers

    def count_writes(self, t: torch.Tensor) -> None:
        """``t`` in its memory says from now on when that is written."""
        if self.counter is None and not t.is_inference():
            self.counter = counter_of(t)

    @property
    def is_written_again(self) -> bool:
        """Whether its maker alone does not make it again."""
        return bool(self.writers) and not self.pinned


def needed_for(
    ops: Sequence[Op], data: Sequence[Datum], wanted: Iterable[int], there: Callable[[Datum], bool] = lambda _: False
) -> Iterator[Datum]:
    """The ``wanted`` data and all that they are made from, each once, back to what cannot be made again and in front
    of what is ``there``.
    """
    left, seen = [*wanted], set[int]()
    while left:
        datum = data[left.pop()]
        if datum.number not in seen and not there(datum):
            seen.add(datum.number)
            yield datum
            left += () if datum.pinned else [n for index in datum.makers for n in ops[index].reads]


class Use(NamedTuple):
    """What is known when the backward comes to the forward's first saved tensor. ``nodes``: how many other code has
    added to autograd's graph, -1 if that is not known. ``held``: data that somebody outside holds.
    """

    nodes: int
    held: frozenset[int]


class Ledger:
    """Which storages live now. ``at``: their data, by storage; ``live``: their bytes; ``copies``: how many of each
    datum. ``deaths``: the data of storages that have gone, in order.
    """

    def __init__(self) -> None:
        self.at: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        self.live = 0
        self.deaths: list[int] = []
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, storage: torch.UntypedStorage, number: int, size: int) -> None:
        """``storage`` is memory of datum ``number``."""
        key = storage._cdata
        self.at[key] = number
        self.copies[number] = self.copies.get(number, 0) + 1
        self.live += size
        # The callback must not own the ledger, which owns the reference.
        self._refs[key] = weakref.ref(storage, partial(_gone, weakref.ref(self), key, size))

    def leave(self, key: int, size: int) -> None:
        """A storage is memory of no datum any more."""
        del self._refs[key]
        number = self.at.pop(key)
        self.deaths.append(number)
        self.copies[number] -= 1
        self.live -= size

    def storage_of(self, number: int) -> torch.UntypedStorage | None:
        """A storage of the datum that lives, whoever holds it."""
        found = (self._refs[key]() for key, other in self.at.items() if other == number)
        return next((s for s in found if s is not None), None)

    def is_held_outside(self, datum: Datum) -> bool:
        """Whether somebody else holds a tensor in its memory: ``base`` is ours."""
        copies = self.copies.get(datum.number, 0)
        return copies > 1 or (copies == 1 and not self.is_held_here_alone(datum))

    def is_held_here_alone(self, datum: Datum) -> bool:
        """Whether no tensor beside ``base`` lies in its storage."""
        uses: Callable[[int], int] = torch._C._storage_Use_Count
        # base, and Python's object
        return datum.base is not None and uses(datum.base.untyped_storage()._cdata) <= 2


def _gone(ledger: weakref.ref[Ledger], key: int, size: int, _: Any) -> None:
    found = ledger()
    if found is not None:
        found.leave(key, size)


class Slot:
    """What autograd keeps in the place of a tensor that it would save. ``number``: how many came before it.

    ``datum``: where the tensor lies, as ``form`` says. ``counter``: has its version counter; without a datum it is the
    tensor itself.
    """

    __slots__ = ("counter", "datum", "form", "number", "tape", "version")

    def __init__(self, tape: Any, number: int, t: torch.Tensor) -> None:
        self.tape, self.number = tape, number
        self.version = 0 if t.is_inference() else t._version
        self.datum: Datum | None = None
        self.form: Form = ()
        self.counter: torch.Tensor | None = None

    def __del__(self) -> None:
        if self.datum is not None:
            self.datum.slots -= 1
            self.tape.policy.let_go(self.tape, self.datum)


class Wrapped:
    """What autograd keeps in the place of a tensor that is made of others (a DTensor): a slot for each of these.

    Integers stay as they are: a nested tensor's shape is told from others by which tensor says where its rows are.
    """

    __slots__ = ("form", "kind", "parts", "ref", "version")

    def __init__(self, t: Any, pack: Callable[[torch.Tensor], Any]) -> None:
        names, context = t.__tensor_flatten__()
        self.kind, self.form = type(t), (context, t.size(), t.stride())
        self.parts: dict[str, Any] = {name: getattr(t, name) for name in names}
        for name, x in self.parts.items():
            if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()):
                self.parts[name] = pack(x)
        self.ref, self.version = weakref.ref(t), t._version

    def value(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """The tensor. ``unpack``: of a slot. Raises ``RuntimeError`` where it was changed."""
        t = self.ref()
        if t is not None and t._version != self.version:
            raise changed(f"a tensor of shape {list(t.shape)}", t, self.version)
        parts = {name: unpack(x) if isinstance(x, (Slot, Wrapped)) else x for name, x in self.parts.items()}
        made: torch.Tensor = self.kind.__tensor_unflatten__(parts, *self.form)
        return made
