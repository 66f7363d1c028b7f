"""The step before, until the next one begins: whether it was as those that were observed."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from rockmate.calls.observe import sequence_number
from rockmate.calls.sequence import GraphSequence

MOST_ODD = 3
"""Steps of a sequence that may differ from those that were observed, as at the end of an epoch, until every step is
observed until one of their kind was."""


@dataclass
class PastStep:
    """A step of ``sequence``, None while that is not known.

    ``gaps``: members, by their place, and how many nodes the code before each added to autograd's graph. ``observed``:
    it was; ``new``: and it was not as those before. ``behind``: the nodes that code behind the last graph added, the
    loss above all; None until that is known. ``captured``: TorchDynamo captured some of it, and added nodes of its own.
    """

    sequence: GraphSequence | None = None
    gaps: list[tuple[int, int]] = field(default_factory=list)
    observed: bool = False
    new: bool = False
    behind: int | None = None
    captured: bool = False

    def __post_init__(self) -> None:
        self.thread, self.number = threading.get_ident(), sequence_number()

    def begin(self, place: int) -> None:
        """A graph begins."""
        self.gaps.append((place, sequence_number() - self.number))

    def end(self) -> None:
        """It ends."""
        self.number = sequence_number()

    def backward(self) -> None:
        """The backward comes to the last graph, before anything runs again. On a GPU it does so in another thread,
        which knows nothing of what this one added; but then what runs again is added in that thread, too.
        """
        if self.behind is None and self.thread == threading.get_ident():
            self.behind = sequence_number() - self.number

    def over(self) -> bool:
        """The next step begins. Of an observed step: whether its sequence is sure again. Of another: whether it was of
        a new kind, for which the plan may not count enough.
        """
        sequence = self.sequence
        if sequence is None or self.thread != threading.get_ident():
            return False
        behind = sequence_number() - self.number if self.behind is None else self.behind
        found = {*self.gaps, (len(sequence.members), behind)}
        new = not found <= sequence.gaps
        if self.observed:
            sequence.gaps |= found
            return sequence.unsure and (self.new or new or sequence.odd < MOST_ODD)
        return new and not self.captured and sequence.leaves_roots_out
