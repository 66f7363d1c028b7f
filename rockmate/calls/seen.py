"""A step of several graphs that is observed, and what it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from rkgb.device.kind import Moment
from rockmate.calls.look import StepLook
from rockmate.calls.member import Member
from rockmate.calls.released import Outputs, find_roots
from solvers.sequence import Stage

Mark = tuple[str, int]
"""A moment of a step: what is the case, and with which graph."""

Ran = tuple[Member, int]
"""A graph that ran, and the choice."""

Shown = tuple[tuple[Member, ...], tuple[Stage, ...], tuple[tuple[int, ...], ...]]
"""The members, the problem of the step and the choices in it."""


class SeenStep:
    """One step. ``marks``: the moments at which memory was noted. ``outputs``: of each graph that ran. ``gone``: at
    some marks, those of each that were let go, also of graphs that no backward reaches.
    """

    def __init__(self, look: StepLook) -> None:
        self.look = look
        self.marks: list[Mark] = []
        self.outputs: list[Outputs] = []
        self.gone: dict[Mark, list[frozenset[int]]] = {}
        look.begins = partial(find_roots, self.outputs)

    def mark(self, what: str, i: int) -> None:
        """Note the memory of now."""
        if self.look.mark():
            self.marks.append((what, i))
            if what in ("begin", "reach"):
                self.gone[what, i] = [outputs.let_go() for outputs in self.outputs]

    def peak(self, moments: list[Moment]) -> int:
        """The most bytes that the step took, without what planning took within it."""
        return max(m.peak for k, m in enumerate(moments) if k == len(self.marks) or self.marks[k][0] != "plan")

    @property
    def unread(self) -> tuple[frozenset[int], ...]:
        """The outputs of each graph that were let go when the backward came to it."""
        return tuple(self._gone(("reach", i), i) for i in range(len(self.outputs)))

    def _gone(self, mark: Mark, i: int) -> frozenset[int]:
        """The outputs of graph i that were let go by this mark; none where the step has no such mark."""
        return self.gone[mark][i] if mark in self.gone else frozenset()

    def _kept(self, ran: Sequence[Ran], mark: Mark, turn: Mark) -> int:
        """Bytes that the graphs ``ran`` kept, without outputs that were let go by ``mark`` or by the ``turn``
        from forward to backward. Those that go in between are counted as what is beside the graphs.
        """
        total = 0
        for j, (member, k) in enumerate(ran):
            total += member.base.choices[k].kept - member.base.spare(k, self._gone(mark, j) | self._gone(turn, j))
        return total

    def shows(self, ran: Sequence[Ran], reached: Mapping[int, tuple[int, int]], moments: list[Moment]) -> Shown | None:
        """What the step shows; None where moments are missing.

        ``ran``, ``reached``: see ``rockmate.calls.steps.Forward``.
        """
        at = {mark: k for k, mark in enumerate(self.marks)}
        complete = len(moments) == len(self.marks) + 1 and all(("reach", i) in at for i in reached)
        if not complete or not ran:
            return None
        expected = [i for i in reversed(range(len(ran))) if i in reached]
        in_order = list(reached) == expected
        following = dict(zip(reached, list(reached)[1:], strict=False))
        turn = "reach", next(iter(reached), -1)  # the backward begins
        stages, options = [], []
        for i, (member, k) in enumerate(ran):
            begin, end, member = moments[at["begin", i]], moments[at["end", i]], member.base
            next_mark = ("begin", i + 1) if i + 1 < len(ran) else turn
            choices = member.choices_in(self._gone(turn, i), self._gone(("reach", i), i), self.outputs[i].roots)
            at_end = member.choices[k].kept
            own, kept = choices[k], self._kept(ran[:i], ("begin", i), turn)
            before = max(begin.level - kept, begin.peak - kept - own.forward)
            peak = max(end.peak, moments[at["planned", i + 1]].peak) if ("planned", i + 1) in at else end.peak
            after = peak - self._kept(ran[:i], next_mark, turn) - at_end
            free = in_order and i in reached
            if i in reached:
                reach, (came, shared) = moments[at["reach", i]], reached[i]
                kept = self._kept(ran[:i], ("reach", i), turn)
                beside = reach.level - kept - (at_end - member.spare(k, self._gone(("reach", i), i))) - came
                later = beside + shared
                own_peak = max(beside + own.backward, later + own.later)
                if reach.peak - kept <= own_peak:  # its own backward took that, at most
                    rest = min(0, own_peak)
                else:
                    rest = reach.peak - self._kept(ran[:i], ("reach", following.get(i, i)), turn)
            else:  # it has no backward
                rest = min(before, after)
                beside, later = rest - own.backward, rest - own.later
            options.append(tuple(range(len(choices))) if free else (k,))
            stages.append(Stage(choices if free else (own,), before, after, beside, later, rest))
        return tuple(member.base for member, _ in ran), tuple(stages), tuple(options)
