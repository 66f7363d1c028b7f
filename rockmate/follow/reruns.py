"""Operations of a followed forward that run again, with the arguments that they had in it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from rkgb.settings import settings
from rkgb.trace.capture import current_mode
from rockmate.calls.surroundings import running_in, runs_plainly
from rockmate.errors import GoneError
from rockmate.follow.noting import flat
from rockmate.follow.record import Datum, Ledger, Op, Outside, Ref, needed_for
from rockmate.run.slots import changed, formed


class Reruns:
    """Makes ``data`` of one forward again by its ``ops``, under the settings of now. ``gathered``: see ``Tape``."""

    def __init__(self, ops: list[Op], data: list[Datum], ledger: Ledger, gathered: dict[int, Outside]) -> None:
        self.ops, self.data, self.ledger, self.gathered, self.settings = ops, data, ledger, gathered, settings()
        self.limit: int | None = None  # bytes of data above which nothing is held that is made on the way

    def make(self, datum: Datum, among: frozenset[int] | None = None) -> torch.Tensor:
        """Make the datum again, from what is held. What is made on the way is held if a slot refers to it, the last
        of it if there is a ``limit``, and what the last operation makes: a backward mostly reads all of that.

        ``among``: and it is one of these.
        """
        found, wanted = self._needed(datum)
        order = sorted(found)
        left = Counter(number for index in order for number in self.ops[index].reads)
        made = {number for index in order for _, number in self.ops[index].makes if self.data[number].base is None}
        behind: deque[Datum] = deque()  # that the operations to come do not read

        def unread(index: int) -> set[int]:
            return {n for _, n in self.ops[index].makes if n in made and not left[n] and not self.data[n].writers}

        def make_room() -> None:
            while behind and self.limit is not None and self.ledger.live > self.limit:
                other = behind.popleft()  # and what was made with it: for one alone, all would be made again
                for number in {other.number} | unread(other.maker) - {datum.number}:
                    self.data[number].base = None

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
            if index != order[-1]:
                behind.extend(self.data[n] for n in unread(index) - left.keys() - {datum.number})
            make_room()
        assert datum.base is not None
        return datum.base

    def can_make(self, numbers: Collection[int]) -> bool:
        """Whether all these data can be held, where the others go that can be made again."""

        def there(datum: Datum) -> bool:
            wanted = datum.number in numbers
            held = datum.base is not None and (datum.pinned or wanted)
            return held or (wanted and self.ledger.storage_of(datum.number) is not None)

        for datum in needed_for(self.ops, self.data, numbers, there):
            gathered = (self.gathered[key] for index in datum.makers for key in self.ops[index].gathered)
            if datum.pinned or not all(outside.is_there for outside in gathered):
                return False
        return True

    def _needed(self, datum: Datum) -> tuple[set[int], set[int]]:
        """The operations that make the datum from what is held, and the data that they make for it."""
        found: set[int] = set()
        wanted: set[int] = set()
        for other in needed_for(self.ops, self.data, [datum.number], lambda d: d.base is not None):
            if other.pinned:
                raise GoneError(
                    "a backward reads what cannot be made again, and is gone: call backward once for each forward, or "
                    "with retain_graph=True from the first time on"
                )
            wanted.add(other.number)
            found.update(other.makers)
        return found, wanted

    def run(self, ops: Sequence[int], wanted: Collection[int]) -> None:
        """Run operations again, in order, below autograd: as they ran, some in another way where gradients are on.

        Of what they make, the ``wanted`` data are held.
        """
        plainly = runs_plainly(self.settings)
        mode = (
            torch._C._DisableAutocast() if plainly else running_in(replace(current_mode(), autocast=()), self.settings)
        )
        with mode, torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(torch.is_grad_enabled()):
            for index in ops:
                op = self.ops[index]
                torch._C._set_grad_enabled(op.grad)
                result = op.func(*map(self._value, op.args), **{k: self._value(v) for k, v in op.kwargs.items()})
                results = list(flat(result)) if op.makes else []
                for position, number in op.makes:
                    datum = self.data[number]
                    if datum.base is None and number in wanted and not datum.pinned:
                        datum.base, datum.version = results[position], None
                        self.ledger.add(results[position].untyped_storage(), number, datum.size)

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
        return [self._value(y) for y in x] if type(x) is list else x
