"""One followed forward, and what its backward reads: saved tensors are references to operations that run again.

``Tape`` is a dispatch mode, so it sees every operation below autograd, whatever Python or C++ calls it. An operation
that allocates memory is noted with its arguments. Autograd gets a ``Slot`` for each tensor in such memory. What a slot
refers to is held, or made again when the backward asks for it. A ``Policy`` decides which.
What cannot be made again is *pinned*: results of random operations and of operators that no schema of torch's
describes, and whatever was computed from memory that is written later. Source: tensors that are evicted and made
again, by operation, are those of Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

from rkgb.settings import settings
from rkgb.trace.capture import current_mode
from rockmate.calls.surroundings import running_in, runs_plainly
from rockmate.errors import GoneError
from rockmate.follow.record import Datum, Ledger, Op, Outside, Ref, Slot, Wrapped, changed, counter_of, formed
from rockmate.run.slots import form_of

_STATISTICS = frozenset({"running_mean", "running_var"})
_RATES = frozenset({"dropout_p", "dropout", "p"})
_REPLACING = frozenset({"set_", "resize_", "resize_as_"})
"""Operations that give a tensor other memory."""

_COLLECTIVE = frozenset({"c10d", "fsdp"})
"""Operators that write what they do not say they write: all their tensors but those that are called inputs."""


class Policy(Protocol):
    """What is held of a followed forward, and what is made again when."""

    def before(self, tape: Tape, index: int) -> None:
        """Operation ``index`` comes."""

    def after(self, tape: Tape, index: int, results: Sequence[Any]) -> None:
        """It has run."""

    def packed(self, tape: Tape, slot: Slot, t: torch.Tensor) -> None:
        """Autograd saves ``t``, for which it gets ``slot``."""

    def over(self, tape: Tape) -> None:
        """The forward has returned."""

    def asked(self, tape: Tape, slot: Slot) -> None:
        """The backward reads ``slot``."""

    def answered(self, tape: Tape, slot: Slot) -> None:
        """The backward has got what ``slot`` refers to."""

    def let_go(self, tape: Tape, datum: Datum) -> None:
        """One slot of ``datum`` is gone."""

    def keeps(self, datum: Datum) -> bool:
        """Whether ``datum``, which cannot be made again, is to be held."""

    def ended(self) -> None:
        """No slot is left."""

    def followed_by(self, policy: Policy) -> Policy:
        """What decides from now on, where ``policy`` is to take over."""


class Tape(TorchDispatchMode):
    """See the file's text. ``device``: whose memory is followed. ``ops``, ``data``: in the order in which they came.

    ``open``: the forward runs. ``slots``: how many there were. ``waits``: no backward has come to one.
    ``lasting``: the storages from outside that are there in the backward, too; None if all are. ``gathered``: an
    argument in each of the others, which come and go. What is made from these can be made again while they are there.
    """

    def __init__(self, device: torch.device, policy: Policy, lasting: frozenset[int] | None = None) -> None:
        super().__init__()
        self.device, self.policy, self.lasting = device, policy, lasting
        self.gathered: dict[int, Outside] = {}
        self.ops: list[Op] = []
        self.data: list[Datum] = []
        self.ledger = Ledger()
        self.slots = 0
        self.open = self.waits = True
        self.begins: Callable[[Tape], None] | None = None  # is called when a backward comes to the first slot
        self.settings, self._kernels = settings(), kernels()
        self._exposed: dict[int, torch.Tensor] = {}  # memory from outside that other libraries may write, by storage
        self._readers: dict[int, list[int]] = {}  # operations that have read memory from outside, by storage

    def __del__(self) -> None:
        for datum in self.data:  # who observes keeps the notes
            datum.base = None
        self.policy.ended()

    # ------------------------------------------------------------------------- the forward

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation, and note it."""
        kwargs = kwargs or {}
        if not self.open or not all(map(is_traceable_wrapper_subclass_type, types)):
            return func(*args, **kwargs)
        index = len(self.ops)
        self.policy.before(self, index)
        noting = _Noting(self, func, args, kwargs)
        if noting.writes or noting.writes_outside:
            self._before_writes(noting.writes, noting.writes_outside)
        reruns = noting.reruns() and kernels() == self._kernels
        given = (noting.args, noting.kwargs) if reruns else ((), {})
        op = Op(func, *given, tuple(noting.reads), tuple(noting.writes), reruns)
        if self.lasting is not None:
            self._note_gathered(op, noting)
        self.ops.append(op)
        began = time.perf_counter_ns()
        try:
            result = func(*args, **kwargs)
        except BaseException:
            self.ops.pop()  # the forward may go on without it
            raise
        op.nanoseconds = time.perf_counter_ns() - began
        results = list(_tensors(result))
        self._made(index, op, results, noting)
        for number in op.reads:
            self.data[number].readers.append(index)
        for key in noting.outside:
            self._readers.setdefault(key, []).append(index)
        for number in op.writes:
            self.data[number].writers.append(index)
            self.data[number].readers.clear()
        self.policy.after(self, index, results)
        return result

    def _made(self, index: int, op: Op, results: list[torch.Tensor], noting: _Noting) -> None:
        """Note what the operation has allocated."""
        found = []
        for position, t in enumerate(results):
            if not self.follows(t):
                continue
            storage = t.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self.ledger.at or noting.has(key) or not size:
                continue
            number = len(self.data)
            pinned = not op.reruns or bool(op.writes) or t.is_inference()
            self.data.append(datum := Datum(number, size, index, pinned, needs=self._needs(op)))
            if pinned and not t.is_inference():
                datum.counter = counter_of(t)
            self.ledger.add(storage, number, size)
            found.append((position, number))
        op.makes = tuple(found)
        if op.writes and (found or len(op.writes) > 1 or not op.reruns):
            op.reruns = False
            for number in op.writes:
                self.data[number].pinned = True

    def _note_gathered(self, op: Op, noting: _Noting) -> None:
        """Note which memory that comes and goes ``op`` reads."""
        op.gathered = frozenset(key for key in (*noting.outside, *noting.writes_outside) if key in self.gathered)
        if op.gathered or any(self._needs_of(n) for n in op.reads):
            needs = self._needs(op)
            for number in op.writes:
                self.data[number].needs |= needs

    def _needs(self, op: Op) -> frozenset[int]:
        if self.lasting is None:
            return op.gathered
        return op.gathered.union(*(self._needs_of(number) for number in op.reads))

    def _needs_of(self, number: int) -> frozenset[int]:
        datum = self.data[number]
        return frozenset() if datum.pinned else datum.needs

    def hand_on(self, datum: Datum, t: torch.Tensor) -> None:
        """``t`` of the datum is read: keep it if it was made from memory that is not there any more."""
        if not datum.pinned and not all(self.gathered[key].is_there for key in datum.needs):
            if datum.counter is None and not t.is_inference():
                datum.counter = counter_of(t)
            self.pin(datum)

    def outside(self, t: torch.Tensor, key: int, copied: bool) -> Outside:
        """An argument in memory that is not followed."""
        found = Outside(t, copied)
        if self.lasting is not None and key not in self.lasting:
            self.gathered.setdefault(key, found)
        return found

    def expose(self, t: torch.Tensor) -> None:
        """Another library gets the memory of ``t``, and may write into it from now on."""
        if not has_memory(t):
            return
        key = t.untyped_storage()._cdata
        number = self.ledger.at.get(key)
        if number is None:
            self._before_writes((), (key,))
            with torch._C._DisableTorchDispatch():
                self._exposed[key] = t.detach()
        else:
            self._before_writes((number,), ())
            self.pin(self.data[number])
            self.data[number].exposed = True

    def is_exposed(self, key: int, number: int | None) -> bool:
        """Whether other libraries may write into a storage, which is memory of datum ``number``."""
        return key in self._exposed if number is None else self.data[number].exposed

    def follows(self, t: torch.Tensor) -> bool:
        """Whether ``t`` lies in memory that is followed."""
        return t.device == self.device and has_memory(t)

    def _before_writes(self, written: Iterable[int], outside: Iterable[int]) -> None:
        """Memory is about to be written: what was computed from it cannot be computed again."""
        for number in written:
            for reader in self.data[number].readers:
                self._pin_results(reader)
        for key in outside:
            for reader in self._readers.pop(key, ()):
                self._pin_results(reader)

    def _pin_results(self, index: int) -> None:
        op = self.ops[index]
        if not op.reruns:
            return
        for number in (*(n for _, n in op.makes), *op.writes):
            self.pin(self.data[number])
        op.reruns = False

    def pin(self, datum: Datum) -> None:
        """Hold the datum, which cannot be made again from now on."""
        wanted = datum.slots or datum.readers
        if not datum.pinned and datum.base is None and wanted and self.policy.keeps(datum):
            self.hold(datum)
        datum.pinned = True

    def hold(self, datum: Datum) -> None:
        """Hold the datum from now on: as it is if it lives, else as it is made again."""
        storage = self.ledger.storage_of(datum.number)
        with torch._C._DisableTorchDispatch():
            if storage is None:
                self.make(datum)
                return
            base = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            datum.base = base if datum.counter is not None else base.clone()  # whose changes nobody would see

    # ------------------------------------------------------------------------- saved tensors

    def pack(self, t: torch.Tensor) -> Slot | Wrapped:
        """What autograd keeps in the place of ``t``."""
        if is_traceable_wrapper_subclass(t):
            return Wrapped(t, self.pack)
        slot = Slot(self, self.slots, t)
        self.slots += 1
        number = self.ledger.at.get(t.untyped_storage()._cdata) if self.follows(t) else None
        with torch._C._DisableTorchDispatch():
            if number is None:
                slot.held = t if t.is_leaf else t.detach()
                slot.counter = slot.held
            else:
                slot.datum, slot.form = self.data[number], form_of(t)
                slot.datum.slots += 1
                if not t.is_inference():
                    slot.counter = slot.datum.counter = counter_of(t)
            self.policy.packed(self, slot, t)
        return slot

    def unpack(self, slot: Slot | Wrapped) -> torch.Tensor:
        """The tensor that autograd saved, made again if it is not held."""
        if isinstance(slot, Wrapped):
            return slot.value(self.unpack)
        counter = slot.counter
        if counter is not None and not counter.is_inference() and counter._version != slot.version:
            shape = slot.form[1] if slot.form else slot.held.shape if slot.held is not None else ()
            raise changed(shape, slot.version, counter._version)
        datum = slot.datum
        with torch._C._DisableTorchDispatch():
            if not self.open:
                if self.waits and self.begins is not None:
                    self.begins(self)
                self.waits = False
                self.policy.asked(self, slot)
            if datum is None:
                assert slot.held is not None
                return slot.held
            base = datum.base
            if base is None:
                base = self.make(datum)
            t = formed(base, slot.form)
            if not self.open:
                self.policy.answered(self, slot)
        return t

    def decide_by(self, policy: Policy) -> None:
        """``policy`` takes over."""
        self.policy = self.policy.followed_by(policy)

    def close(self) -> None:
        """The forward has returned."""
        self.open = False
        self._readers.clear()
        self.policy.over(self)
        for datum in self.data:
            counter = datum.counter if datum.counter is not None else datum.base
            if datum.base is not None and counter is not None and not counter.is_inference():
                datum.version = counter._version

    # ------------------------------------------------------------------------- reruns

    def make(self, datum: Datum) -> torch.Tensor:
        """Make the datum again, from what is held. What is made on the way is held if a slot refers to it."""
        order = sorted(self._needed(datum))
        left: dict[int, int] = {}
        for index in order:
            for number in self.ops[index].reads:
                left[number] = left.get(number, 0) + 1
        made = {number for index in order for _, number in self.ops[index].makes if self.data[number].base is None}
        for index in order:
            self.run([index])
            for number in self.ops[index].reads:
                left[number] -= 1
                other = self.data[number]
                if not left[number] and number in made and not other.slots and other is not datum:
                    other.base = None
        assert datum.base is not None
        return datum.base

    def _needed(self, datum: Datum) -> set[int]:
        """The operations that make the datum from what is held."""
        found: set[int] = set()
        left = [datum]
        while left:
            other = left.pop()
            if other.base is not None or other.maker in found:
                continue
            if other.pinned:
                raise GoneError(
                    "a backward reads what cannot be made again, and is gone: call backward once for each forward, or "
                    "with retain_graph=True from the first time on"
                )
            ops = [other.maker, *other.writers]
            found.update(ops)
            left += [self.data[n] for index in ops for n in self.ops[index].reads if n != other.number]
        return found

    def run(self, ops: Iterable[int]) -> None:
        """Run operations again, in order."""
        if runs_plainly(self.settings):
            with torch.no_grad(), torch._C._DisableAutocast():
                self._run(ops)
        else:
            mode = replace(current_mode(), grad=False, autocast=())
            with running_in(mode, self.settings):
                self._run(ops)

    def _run(self, ops: Iterable[int]) -> None:
        for index in ops:
            op = self.ops[index]
            result = op.func(*self._values(op.args), **{k: self._value(v) for k, v in op.kwargs.items()})
            if op.makes:
                results = list(_tensors(result))
                for position, number in op.makes:
                    datum = self.data[number]
                    if datum.base is None:
                        datum.base, datum.version = results[position], None
                        self.ledger.add(results[position].untyped_storage(), number, datum.size)

    def _values(self, noted: Iterable[Any]) -> list[Any]:
        return [self._value(x) for x in noted]

    def _value(self, x: Any) -> Any:
        if type(x) is Ref:
            datum = self.data[x.datum]
            base = datum.base
            assert base is not None, "an operation that runs again reads what is not there"
            if datum.version is not None:
                counter = base if datum.counter is None else datum.counter
                if counter._version != datum.version:
                    raise changed(x.form[1], datum.version, counter._version)
            return formed(base, x.form)
        if type(x) is Outside:
            return x.value()
        return self._values(x) if type(x) is list else x


@dataclass(frozen=True, slots=True)
class Schema:
    """What is known of an operator. ``names`` of its arguments, by position and by name; ``writes``: those that it
    writes. ``pure``: torch describes it, and it gives no tensor other memory. ``random``: it may draw numbers.
    ``trains``: it is a batch norm.
    """

    names: tuple[str, ...]
    writes: frozenset[str]
    pure: bool
    random: bool
    trains: bool

    @classmethod
    def of(cls, func: Any) -> Schema:
        """Of an operator; asking torch takes longer than a small operation."""
        known = _SCHEMAS.get(func)
        if known is None:
            schema = func._schema
            known = _SCHEMAS[func] = cls(
                tuple(a.name for a in schema.arguments),
                frozenset(a.name for a in schema.arguments if _is_written(a, func.namespace)),
                func.namespace in ("aten", "prims") and schema.name.partition("::")[2] not in _REPLACING,
                torch.Tag.nondeterministic_seeded in func.tags,
                "batch_norm" in schema.name,
            )
        return known


def _is_written(argument: Any, namespace: str) -> bool:
    if namespace in _COLLECTIVE:
        return "input" not in argument.name
    return argument.alias_info is not None and argument.alias_info.is_write


_SCHEMAS: dict[Any, Schema] = {}


def kernels() -> tuple[object, ...]:
    """Settings that forward may change for a part of itself, and which decide on kernels."""
    c = torch._C
    return c._get_mkldnn_enabled(), c._get_deterministic_algorithms(), c._get_float32_matmul_precision()


class _Noting:
    """One operation, as it is noted. ``reads``, ``writes``: data.
    ``outside``, ``writes_outside``: storages of other memory. ``pure``: it may give the same again.
    """

    __slots__ = ("args", "kwargs", "outside", "pure", "rates", "reads", "schema", "tape", "trains", "writes",
                 "writes_outside")  # fmt: skip

    def __init__(self, tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tape = tape
        self.schema = schema = Schema.of(func)
        self.reads: dict[int, None] = {}
        self.outside: dict[int, None] = {}
        self.writes: dict[int, None] = {}
        self.writes_outside: dict[int, None] = {}
        self.pure, self.rates, self.trains = schema.pure, [], False  # type: ignore[var-annotated]
        if schema.trains:
            given = dict(zip(schema.names, args, strict=False)) | kwargs
            self.trains = bool(given.get("training", given.get("train", True)))
        self.args = tuple([self._of(x, schema.names[k]) for k, x in enumerate(args)])
        self.kwargs = {key: self._of(x, key) for key, x in kwargs.items()}

    def reruns(self) -> bool:
        """Whether it gives the same again."""
        random = self.schema.random and not (self.rates and all(rate == 0 for rate in self.rates))
        return self.pure and not random and (self.trains or not self.writes_outside)

    def has(self, key: int) -> bool:
        """Whether a storage from outside is among its arguments."""
        return key in self.outside or key in self.writes_outside

    def _of(self, x: Any, name: str) -> Any:
        if isinstance(x, torch.Tensor):
            if is_traceable_wrapper_subclass(x):  # its class takes the operation apart
                self.pure = False
                return [self._tensor(t, name) for t in _tensors(x)]
            return self._tensor(x, name)
        if type(x) in (list, tuple):
            return [self._of(y, name) for y in x]
        if name in _RATES:
            self.rates.append(x)
        return x

    def _tensor(self, t: torch.Tensor, name: str) -> Any:
        tape, statistics = self.tape, self.trains and name in _STATISTICS
        if not has_memory(t):
            self.pure = False
            return Outside(t, False)
        key = t.untyped_storage()._cdata
        number, form = tape.ledger.at.get(key), form_of(t)
        if number is not None and tape.lasting is not None and isinstance(t, torch.nn.Parameter):
            tape.ledger.leave(key, tape.data[number].size)  # a sharded parameter's, which its first use allocates
            number = None
        if tape.is_exposed(key, number):
            self.pure = False
        writes = statistics or name in self.schema.writes
        if number is None:
            (self.writes_outside if writes else self.outside)[key] = None
            return tape.outside(t, key, statistics)
        if tape.lasting is not None:
            tape.hand_on(tape.data[number], t)
        if writes:
            self.writes[number] = None
        self.reads[number] = None
        return Ref(number, form)


def has_memory(t: torch.Tensor) -> bool:
    """Whether ``t`` lies in one storage, in strides."""
    return t.layout == torch.strided and not t.is_nested and torch._C._has_storage(t)


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    """The tensors among the results of an operation, those of which others are made taken apart."""
    if isinstance(result, torch.Tensor):
        if is_traceable_wrapper_subclass(result):
            for name in result.__tensor_flatten__()[0]:
                yield from _tensors(getattr(result, name))
        else:
            yield result
    elif isinstance(result, (list, tuple)):
        for x in result:
            yield from _tensors(x)
