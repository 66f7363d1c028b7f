"""The judge of checkpointing sequences: it follows a sequence over a chain, and computes peak and time.

Shares no code with the algorithms. Memory is counted by storage, so values that share memory count once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest

from solvers.errors import ScheduleError
from solvers.rotor.chain import Chain, Stage
from solvers.rotor.ops import B, Fck, Fe, Fn, Loss, Operation, Sequence, run_starts


@dataclass(frozen=True, slots=True)
class Moment:
    """One operation: most bytes in use while it runs, bytes in use after it, and the time at which it ends."""

    operation: Operation
    peak: int
    after: int
    end: int


@dataclass(frozen=True, slots=True)
class Walked:
    """The costs of a sequence. ``peak``: bytes. ``time``: in the chain's unit. ``base``: time without recomputation."""

    peak: int
    time: int
    base: int
    moments: tuple[Moment, ...]

    @property
    def overhead(self) -> float:
        """Recompute time as a fraction of the time without recomputation."""
        return (self.time - self.base) / self.base if self.base else 0.0


def walk_sequence(chain: Chain, sequence: Sequence) -> Walked:
    """Walk ``sequence`` over ``chain``. Raises ``ScheduleError`` where an operation lacks what it reads."""
    walker = _Walker(chain, sequence)
    for operation, following in zip_longest(sequence, sequence[1:]):
        walker.step(operation, following)
    if walker.next_backward >= 0:
        raise ScheduleError(f"the sequence ends before B_{walker.next_backward}")
    base = sum(s.forward_time + s.backward_time for s in chain.stages)
    return Walked(max(m.peak for m in walker.moments), walker.time, base, tuple(walker.moments))


def check_order(length: int, sequence: Sequence) -> None:
    """Raise ``ScheduleError`` where ``sequence`` cannot run over ``length`` stages."""
    walk_sequence(Chain((Stage("", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),) * length, (((0, 0),),) * (length + 1), 0), sequence)


class _Walker:
    """``there``: values from which a stage can run. ``enabled``: stages whose backward has what it reads. ``states``:
    by stage, the generators whose states are kept from its first run to its last, and their bytes. ``set``: those that
    stages set, or leave as the next stage found them, when they run again. ``aside``: the caller's states of these,
    until the next backward.
    """

    def __init__(self, chain: Chain, sequence: Sequence) -> None:
        self.chain = chain
        self.starts = run_starts(sequence)
        again = ((-2, chain.value_bytes[-1]),)  # a last output beside that of the first run, which the caller holds
        self.values = [dict(value) for value in (*chain.values, again)]
        self.output = chain.length
        self.held: Counter[int] = Counter()
        self.level = self.time = 0
        self.there = {0}
        self.enabled: set[int] = set()
        self.states: dict[int, dict[int, int]] = {}
        self.set: set[int] = set()
        self.aside: dict[int, int] = {}
        self.moments: list[Moment] = []
        self.in_forward = True
        self.next_forward, self.next_backward = 0, chain.length - 1
        self.hold(0)

    def hold(self, i: int, times: int = 1) -> None:
        """x_i is held once more, or once less (-1)."""
        for storage, size in self.values[i].items():
            before = self.held[storage]
            self.held[storage] += times
            if not (before and self.held[storage]):
                self.level += times * size

    def step(self, operation: Operation, following: Operation | None) -> None:
        if isinstance(operation, Loss):
            peak = self._loss()
        elif isinstance(operation, B):
            peak = self._backward(operation)
        else:
            peak = self._forward(operation, following == B(operation.index) and not self.in_forward)
        self.moments.append(Moment(operation, peak, self.level, self.time))

    def _forward(self, operation: Fn | Fck | Fe, is_last: bool) -> int:
        i, keeps = operation.index, isinstance(operation, Fe)
        if not 0 <= i < self.chain.length:
            raise ScheduleError(f"{operation!r}: the chain has {self.chain.length} stages")
        if self.in_forward and i != self.next_forward:
            raise ScheduleError(f"{operation!r}: stage {self.next_forward} has to run")
        self.next_forward += 1
        if keeps and i in self.enabled:
            raise ScheduleError(f"{operation!r}: what its backward reads is there already")
        if i not in self.there:
            raise ScheduleError(f"{operation!r}: its input is not there")
        stage, stops = self.chain.stages[i], keeps and is_last
        self.time += stage.forward_time - (stage.tail if stops else 0)
        lasting = stage.state + sum(self._states_of(i, keeps).values())
        if keeps:
            peak = self.level + (stage.stop_peak if stops else stage.forward_peak)
            self.enabled.add(i)
            self.level += stage.held
            self.hold(i, int(stage.keeps_input))
        else:
            peak = self.level + stage.pass_peak + (lasting if self.in_forward else stage.state)
        if keeps != self.in_forward:  # the first run keeps the states, the last one lets them go
            self.level += lasting if self.in_forward else -lasting
        if keeps and stage.keeps_output:
            if i == self.chain.length - 1 and not self.in_forward:
                self.output += 1
            self.hold(self.output if i == self.chain.length - 1 else i + 1)
        if self.in_forward:
            self.hold(i, int(stage.holds_input))
            self.hold(i + 1, int(stage.holds_output))
        if not stops:
            self.there.add(i + 1)
            self.hold(i + 1)
        if not isinstance(operation, Fck):
            self._drop(i)
        return peak

    def _states_of(self, i: int, keeps: bool) -> dict[int, int]:
        """The generator states that the first run of stage i keeps, as no stage before it sets them. Later runs do."""
        own = self.states.get(i, {})
        if not self.in_forward:
            self.level += sum(size for g, size in own.items() if g not in self.aside)
            self.aside |= own
        elif not keeps:
            self.set = set() if i in self.starts else self.set
            own = self.states[i] = {g: size for g, size in self.chain.stages[i].draws if g not in self.set}
            self.set |= own.keys()
        return own

    def _drop(self, i: int) -> None:
        if i in self.there:
            self.there.remove(i)
            self.hold(i, -1)

    def _loss(self) -> int:
        if not self.in_forward:
            raise ScheduleError("Loss: in the backward phase")
        if self.chain.length not in self.there:
            raise ScheduleError(f"Loss: {self.next_forward} of {self.chain.length} stages have run")
        self.in_forward = False
        self.there.remove(self.chain.length)  # the caller holds the output to the end
        self.level += self.chain.output_gradient
        return self.level + self.chain.loss

    def _backward(self, operation: B) -> int:
        i = operation.index
        if self.in_forward:
            raise ScheduleError(f"{operation!r}: in the forward phase")
        if i != self.next_backward:
            raise ScheduleError(f"{operation!r}: the next backward is B_{self.next_backward}")
        if i not in self.enabled:
            raise ScheduleError(f"{operation!r}: what it reads is not there")
        self._drop(i + 1)
        self.level -= sum(self.aside.values())
        self.aside.clear()
        stage, gradients = self.chain.stages[i], self.chain.gradient_bytes
        self.enabled.remove(i)
        self.time += stage.backward_time
        peak = self.level + stage.backward_peak
        self.level += gradients[i] - gradients[i + 1] + stage.parameter_gradients - stage.held
        self.hold(i, -int(stage.keeps_input))
        self.hold(self.output if i == self.chain.length - 1 else i + 1, -int(stage.keeps_output))
        self.next_backward -= 1
        return peak
