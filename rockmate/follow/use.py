"""How a step uses what a followed forward returned: what tells a loss from another one without a look at memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rockmate.calls.observe import sequence_number
from rockmate.follow.record import Use
from rockmate.follow.tape import Tape


class UseOfOutputs:
    """Sees the use of one call, from its return to the begin of its backward. ``then`` is called with it."""

    def __init__(self, tape: Tape, then: Callable[[Tape, Use], None]) -> None:
        self.then = then
        self.thread, self.first = threading.get_ident(), sequence_number()
        self.outside = frozenset(n for n in set(tape.ledger.at.values()) if _is_held_outside(tape, n))

    def begin(self, tape: Tape) -> None:
        """The backward has come to the first saved tensor."""
        nodes = sequence_number() - self.first if threading.get_ident() == self.thread else -1
        self.then(tape, Use(nodes, frozenset(n for n in self.outside if _is_held_outside(tape, n))))


def _is_held_outside(tape: Tape, number: int) -> bool:
    base = tape.data[number].base
    return tape.ledger.storage_of(number) is not None if base is None else tape.ledger.holders(base) > 0
