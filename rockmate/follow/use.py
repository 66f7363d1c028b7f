"""How a step uses what a followed forward returned: what tells a loss from another one without a look at memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from rkgb.probe.contexts import next_number
from rockmate.follow.record import Use
from rockmate.follow.tape import Tape


class UseOfOutputs:
    """Sees the use of one call, from its return to the begin of its backward. ``then`` is called with it."""

    def __init__(self, tape: Tape, then: Callable[[Tape, Use], None]) -> None:
        self.then = then
        self.thread, self.first = threading.get_ident(), next_number()
        self.outside = _held(tape, set(tape.ledger.at.values()))  # a copy: storages may go meanwhile

    def begin(self, tape: Tape) -> None:
        """The backward has come to the first saved tensor."""
        nodes = next_number() - self.first if threading.get_ident() == self.thread else -1
        self.then(tape, Use(nodes, _held(tape, self.outside)))


def _held(tape: Tape, numbers: Iterable[int]) -> frozenset[int]:
    return frozenset(n for n in numbers if tape.ledger.is_held_outside(tape.data[n]))
