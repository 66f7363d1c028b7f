"""One followed forward, and what its backward reads: saved tensors are references to operations that run again.

``Tape`` is a dispatch mode, so it sees every operation below autograd, whatever Python or C++ calls it. An operation
that allocates memory is noted with its arguments. Autograd gets a ``Slot`` for each tensor in such memory. What a slot
refers to is held, or made again when the backward asks for it. A ``Policy`` decides which.
What cannot be made again is *pinned*: results of random operations and of operators that no schema of torch's
describes, and whatever was computed from memory that is written later, or that is not followed and was written: another
call writes that again before the backward of this one. Source: tensors that are evicted and made
again, by operation, are those of Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

from rkgb.errors import UnsupportedError, runs_functions
from rkgb.settings import settings
from rkgb.storages import counter_of, has_memory
from rkgb.trace.lines import user_line
from rockmate.follow.noting import Noting, flat
from rockmate.follow.policy import Policy
from rockmate.follow.record import Datum, Ledger, Op, Outside, Slot, Wrapped
from rockmate.follow.reruns import Reruns
from rockmate.run.slots import changed, form_of, formed


class Tape(TorchDispatchMode):
    """See the file's text. ``device``: whose memory is followed. ``ops``, ``data``: in the order in which they came.

    ``open``: the forward runs. ``slots``: how many there were; ``asks``: how often backwards within the forward have
    read one that has a datum. ``lasting``: the storages from outside that are there in the backward, too; None if all
    are. ``gathered``: an argument in each of the others, which come and go. What is made from these can be made again
    while they are there.
    """

    supports_higher_order_operators = True  # they come here, and are refused

    def __init__(self, device: torch.device, policy: Policy, lasting: frozenset[int] | None = None) -> None:
        super().__init__()
        self.device, self.policy, self.lasting = device, policy, lasting
        self.gathered: dict[int, Outside] = {}
        self.ops: list[Op] = []
        self.data: list[Datum] = []
        self.ledger = Ledger()
        self.slots = self.asks = 0
        self.open = True
        self.begins: Callable[[Tape], None] | None = None  # is called when a backward comes to the first slot
        self.reruns = Reruns(self.ops, self.data, self.ledger, self.gathered)
        self._exposed: dict[int, torch.Tensor] = {}  # memory from outside that other libraries may write, by storage
        self._given: dict[int, torch.Tensor] = {}  # leaves that got other memory, by identity
        self._readers: dict[int, list[int]] = {}  # operations that have read memory from outside, by storage
        self._written = WeakValueDictionary[int, torch.UntypedStorage]()  # memory from outside that forward has written

    def __del__(self) -> None:
        for datum in self.data:  # who observes keeps the notes
            datum.base = None
        self.policy.ended(self)

    # ------------------------------------------------------------------------- the forward

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation, and note it."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            raise runs_functions(func.name(), f" at {user_line()}")
        if not self.open or not all(map(is_traceable_wrapper_subclass_type, types)):
            return func(*args, **kwargs)
        index = len(self.ops)
        self.policy.before(self, index)
        noting = Noting(self, func, args, kwargs)
        if noting.writes or noting.writes_outside:
            self._before_writes(noting.writes, noting.writes_outside)
            self._written.update(noting.writes_outside)
        reruns = noting.reruns() and settings() == self.reruns.settings  # which decide on kernels
        reruns = reruns and not any(key in self._written and key not in self.gathered for key in noting.outside)
        given = (noting.args, noting.kwargs) if reruns else ((), {})
        op = Op(func, *given, tuple(noting.reads), tuple(noting.writes), reruns, torch.is_grad_enabled())
        op.writes_outside, op.draws_from_given = bool(noting.writes_outside), noting.draws_from_given()
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
        results = list(flat(result))
        self._made(index, op, results, noting)
        for number in op.reads:
            self.data[number].readers.append(index)
        for key in noting.outside:
            self._readers.setdefault(key, []).append(index)
        for number, key in noting.writes.items():
            datum = self.data[number]
            datum.writers.append(index)
            datum.readers.clear()
            if datum.base is not None and datum.base.untyped_storage()._cdata != key:  # a copy of what was there before
                datum.base = None
                self.hold(datum)
        self.policy.after(self, index, results)
        return result

    def _made(self, index: int, op: Op, results: list[torch.Tensor], noting: Noting) -> None:
        found = []
        for position, t in enumerate(results):
            if not self.follows(t):
                continue
            storage = t.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if not size or key in self.ledger.at or key in noting.outside or key in noting.writes_outside:
                continue
            number = len(self.data)
            pinned = not op.reruns or bool(op.writes) or t.is_inference()
            self.data.append(datum := Datum(number, size, index, pinned, needs=self._needs(op)))
            if pinned:
                datum.count_writes(t)
            self.ledger.add(storage, number, size)
            found.append((position, number))
        op.makes = tuple(found)
        if op.writes and (found or len(op.writes) > 1 or not op.reruns):
            op.reruns = False
            for number in op.writes:
                self.data[number].pinned = True

    def _note_gathered(self, op: Op, noting: Noting) -> None:
        """Note which memory that comes and goes ``op`` reads."""
        op.gathered = frozenset(key for key in (*noting.outside, *noting.writes_outside) if key in self.gathered)
        needs = self._needs(op)
        for number in op.writes:
            self.data[number].needs |= needs

    def _needs(self, op: Op) -> frozenset[int]:
        """Storages that have to be there for it to run again."""
        read = (self.data[number] for number in op.reads)
        return op.gathered.union(*(datum.needs for datum in read if not datum.pinned))

    def hand_on(self, datum: Datum, t: torch.Tensor) -> None:
        """``t`` of the datum is read: keep it if it was made from memory that is not there any more."""
        if not datum.pinned and not all(self.gathered[key].is_there for key in datum.needs):
            self._pin_living(datum, t)

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
        with torch._C._DisableTorchDispatch():
            if number is None:
                self._before_writes((), (key,))
                self._exposed[key] = t.detach()
            else:
                self._before_writes((number,), ())
                self._pin_living(self.data[number], t)
                self.data[number].exposed = True

    def give(self, t: torch.Tensor) -> None:
        """``t`` gets other memory. What autograd saves before an operation is the tensor itself, whose memory is read
        in the backward, while results and views that it saves keep what they lie in. Raises ``UnsupportedError`` where
        that cannot be told of what it has saved.
        """
        key = t.untyped_storage()._cdata
        number = self.ledger.at.get(key) if self.follows(t) else None
        saved = not t.is_leaf and key in self._readers
        if number is not None and id(t) not in self._given:
            saved = self.data[number].slots > sum(name == "_saved_result" for name in dir(t.grad_fn))
        if saved:
            raise UnsupportedError(
                f"{user_line()} gives a tensor of shape {list(t.shape)} other memory (.data = …) after autograd saved "
                "it for the backward, which reads the new values in eager mode and the old ones under a plan. Compute "
                "another tensor, x = x + (new - x).detach(), or do it before the tensor is read"
            )
        if t.is_leaf:
            self._given[id(t)] = t

    def is_exposed(self, key: int, number: int | None) -> bool:
        """Whether other libraries may write into a storage, which is memory of datum ``number``."""
        return key in self._exposed if number is None else self.data[number].exposed

    def readers_of(self, t: torch.Tensor) -> list[int]:
        """The operations that have read memory of ``t`` since it was written."""
        key = t.untyped_storage()._cdata
        number = self.ledger.at.get(key) if self.follows(t) else None
        return self._readers.get(key, []) if number is None else self.data[number].readers

    def held_outside(self, numbers: Iterable[int]) -> frozenset[int]:
        """Those of these data that somebody else holds, too."""
        return frozenset(n for n in numbers if self.ledger.is_held_outside(self.data[n]))

    def follows(self, t: torch.Tensor) -> bool:
        """Whether ``t`` lies in memory that is followed."""
        return t.device == self.device and has_memory(t)

    def _before_writes(self, written: Iterable[int], outside: Iterable[int]) -> None:
        """Memory is about to be written: what was computed from it cannot be computed again."""
        readers = [self.data[number].readers for number in written]
        readers += [self._readers.pop(key, []) for key in outside]
        for op in (self.ops[index] for indices in readers for index in indices):
            for number in (*(n for _, n in op.makes), *op.writes) if op.reruns else ():
                self.pin(self.data[number])
            op.reruns = False

    def pin(self, datum: Datum) -> None:
        """Hold the datum, which cannot be made again from now on."""
        if not datum.pinned and datum.base is None and self._serves(datum) and self.policy.keeps(self, datum):
            self.hold(datum)
        datum.pinned = True

    def _serves(self, datum: Datum) -> bool:
        """Whether a backward may read the datum, or something that is made again from it."""
        left, seen = [datum], {datum.number}
        while left:
            other = left.pop()
            if other.slots or (other is not datum and self.ledger.copies.get(other.number)):
                return True
            made = {n for k in other.readers for n in (*(n for _, n in self.ops[k].makes), *self.ops[k].writes)} - seen
            left += (self.data[n] for n in made if not self.data[n].pinned)
            seen |= made
        return False

    def _pin_living(self, datum: Datum, t: torch.Tensor) -> None:
        """As ``pin``, for a datum of which ``t`` lives: it is held as it is, with what others write into it."""
        datum.count_writes(t)
        self.pin(datum)

    def hold(self, datum: Datum, among: frozenset[int] | None = None) -> None:
        """Hold the datum from now on: as it lives, or else as it is made again. ``among``: see ``Reruns.make``."""
        storage = self.ledger.storage_of(datum.number)
        with torch._C._DisableTorchDispatch():
            if storage is None:
                self.reruns.make(datum, among)
                return
            datum.base = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            if datum.counter is None:  # nobody would see that it changes
                datum.base = datum.base.clone()
                self.ledger.add(datum.base.untyped_storage(), datum.number, datum.size)

    # ------------------------------------------------------------------------- saved tensors

    def pack(self, t: torch.Tensor) -> Slot | Wrapped:
        if is_traceable_wrapper_subclass(t):
            return Wrapped(t, self.pack)
        slot = Slot(self, self.slots, t)
        self.slots += 1
        followed = self.follows(t) and id(t) not in self._given
        number = self.ledger.at.get(t.untyped_storage()._cdata) if followed else None
        with torch._C._DisableTorchDispatch():
            if number is None:
                slot.counter = t if t.is_leaf else t.detach()
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
            shape = slot.form[1] if slot.form else counter.shape
            raise changed(f"a tensor of shape {list(shape)}", counter, slot.version)
        datum = slot.datum
        with torch._C._DisableTorchDispatch():
            if self.begins is not None:
                begins, self.begins = self.begins, None
                begins(self)
            self.policy.asked(self, slot)
            if datum is None:
                assert counter is not None
                return counter
            t = formed(self.reruns.make(datum) if datum.base is None else datum.base, slot.form)
            self.asks += self.open
            self.policy.answered(self, slot)
        return t

    def close(self) -> None:
        self.open = False
        self._readers.clear()
        self.policy.over(self)
        for datum in self.data:
            counter = datum.counter if datum.counter is not None else datum.base
            if datum.base is not None and counter is not None and not counter.is_inference():
                datum.version = counter._version
