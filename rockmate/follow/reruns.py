"""Operations of a followed forward that run again, with the arguments that they had in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from rkgb.settings import settings
from rkgb.trace.capture import current_mode
from rockmate.calls.surroundings import running_in, runs_plainly
from rockmate.errors import GoneError
from rockmate.follow.noting import flat
from rockmate.follow.record import Datum, Ledger, Op, Outside, Ref
from rockmate.run.slots import changed, formed


class Reruns:
    """Makes ``data`` of one forward again by its ``ops``, under the settings of now. ``gathered``: see ``Tape``."""

    def __init__(self, ops: list[Op], data: list[Datum], ledger: Ledger, gathered: dict[int, Outside]) -> None:
        self.ops, self.data, self.ledger, self.gathered, self.settings = ops, data, ledger, gathered, settings()
        self.limit: int | None = None  # bytes of data above which nothing is held that is made on the way

    def make(self, datum: Datum, among: frozenset[int] | None = None) -> torch.Tensor:
        """Make the datum again, from what is held. What is made on the way is held if a slot refers to it, the last
        of it if there is a ``limit``.

        ``among``: and it is one of these.
        """
        found, wanted = self._needed(datum)
        order = sorted(found)
        left: dict[int, int] = {}
        for index in order:
            for number in self.ops[index].reads:
                left[number] = left.get(number, 0) + 1
        made = {number for index in order for _, number in self.ops[index].makes if self.data[number].base is None}
        behind: deque[Datum] = deque()  # that the operations to come do not read
        for index in order:
            makes = [n for _, n in self.ops[index].makes]
            self.run([index], wanted.union(n for n in makes if self.data[n].slots and not self.data[n].writers))
            for number in self.ops[index].reads:
                left[number] -= 1
                other = self.data[number]
                if left[number] or number not in made or other is datum:
                    continue
                if other.slots and (among is None or number in among):
                    behind.append(other)
                else:
                    other.base = None
            while behind and self.limit is not None and self.ledger.live > self.limit:
                behind.popleft().base = None
        assert datum.base is not None
        return datum.base

    def can_make(self, numbers: Collection[int]) -> bool:
        """Whether all these data can be held, where the others go that can be made again."""
        left, seen = list(numbers), set(numbers)
        while left:
            datum = self.data[left.pop()]
            if datum.base is not None and (datum.pinned or datum.number in numbers):
                continue
            if datum.number in numbers and self.ledger.storage_of(datum.number) is not None:
                continue
            if datum.pinned:
                return False
            ops = [self.ops[index] for index in (datum.maker, *datum.writers)]
            if not all(self.gathered[key].is_there for op in ops for key in op.gathered):
                return False
            found = {n for op in ops for n in op.reads} - seen
            left += found
            seen |= found
        return True

    def _needed(self, datum: Datum) -> tuple[set[int], set[int]]:
        """The operations that make the datum from what is held, and the data that they make for it."""
        found: set[int] = set()
        wanted: set[int] = set()
        left = [datum]
        while left:
            other = left.pop()
            if other.base is not None or other.number in wanted:
                continue
            if other.pinned:
                raise GoneError(
                    "a backward reads what cannot be made again, and is gone: call backward once for each forward, or "
                    "with retain_graph=True from the first time on"
                )
            wanted.add(other.number)
            ops = [other.maker, *other.writers]
            found.update(ops)
            left += [self.data[n] for index in ops for n in self.ops[index].reads if n != other.number]
        return found, wanted

    def run(self, ops: Sequence[int], wanted: Collection[int]) -> None:
        """Run operations again, in order, below autograd: as they ran, some in another way where gradients are on.

        Of what they make, the ``wanted`` data are held.
        """
        below, grad = torch._C._AutoDispatchBelowAutograd(), torch.is_grad_enabled()
        try:
            if runs_plainly(self.settings):
                with torch._C._DisableAutocast(), below:
                    self._run(ops, wanted)
            else:
                with running_in(replace(current_mode(), autocast=()), self.settings), below:
                    self._run(ops, wanted)
        finally:
            torch.set_grad_enabled(grad)

    def _run(self, ops: Sequence[int], wanted: Collection[int]) -> None:
        for index in ops:
            op = self.ops[index]
            torch._C._set_grad_enabled(op.grad)
            result = op.func(*self._values(op.args), **{k: self._value(v) for k, v in op.kwargs.items()})
            if op.makes:
                results = list(flat(result))
                for position, number in op.makes:
                    datum = self.data[number]
                    if datum.base is None and number in wanted and not datum.pinned:
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
                    raise changed(f"a tensor of shape {list(x.form[1])}", counter, datum.version)
            return formed(base, x.form)
        if type(x) is Outside:
            return x.value()
        return self._values(x) if type(x) is list else x
