"""The judge of checkpointing sequences: it follows a sequence over a chain, and computes peak and time.

Shares no code with the algorithms. Memory is counted by storage, so values that share memory count once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from solvers.errors import ScheduleError
from solvers.rotor.chain import Chain
from solvers.rotor.ops import B, Fck, Fe, Fn, Loss, Operation, Sequence


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

    @property
    def tightest(self) -> Moment:
        """The first operation that reaches the peak."""
        return next(m for m in self.moments if m.peak == self.peak)


def walk_sequence(chain: Chain, sequence: Sequence) -> Walked:
    """Walk ``sequence`` over ``chain``. Raises ``ScheduleError`` where an operation lacks what it reads."""
    walker = _Walker(chain)
    operations = sequence.operations
    for k, operation in enumerate(operations):
        walker.step(operation, operations[k + 1] if k + 1 < len(operations) else None)
    if walker.next_backward >= 0:
        raise ScheduleError(f"the sequence ends before B_{walker.next_backward}")
    base = sum(s.runs.whole + s.backward_time for s in chain.stages)
    return Walked(max(m.peak for m in walker.moments), walker.time, base, tuple(walker.moments))


@dataclass
class _Walker:
    chain: Chain
    held: Counter[int] = field(default_factory=Counter)
    level: int = 0
    time: int = 0
    current: int | None = 0
    stored: set[int] = field(default_factory=set)
    enabled: set[int] = field(default_factory=set)
    states: set[int] = field(default_factory=set)
    moments: list[Moment] = field(default_factory=list)
    in_forward: bool = True
    output_again: int = 0

    def __post_init__(self) -> None:
        self.sizes = {storage: size for value in self.chain.values for storage, size in value}
        self.next_backward = self.chain.length - 1
        self.hold(0)

    def hold(self, i: int) -> None:
        for storage in self._storages(i):
            self.held[storage] += 1
            if self.held[storage] == 1:
                self.level += self.sizes[storage]

    def drop(self, i: int) -> None:
        for storage in self._storages(i):
            self.held[storage] -= 1
            if self.held[storage] == 0:
                self.level -= self.sizes[storage]

    def _storages(self, i: int) -> Iterable[int]:
        return {storage for storage, _ in self.chain.values[i]}

    def step(self, operation: Operation, following: Operation | None) -> None:
        if isinstance(operation, Loss):
            peak = self._loss()
        elif isinstance(operation, B):
            peak = self._backward(operation)
        else:
            peak = self._forward(operation, following == B(operation.index))
        self.moments.append(Moment(operation, peak, self.level, self.time))

    def _forward(self, operation: Fn | Fck | Fe, last: bool) -> int:
        i = operation.index
        if not 0 <= i < self.chain.length:
            raise ScheduleError(f"{operation!r}: the chain has {self.chain.length} stages")
        stage = self.chain.stages[i]
        if isinstance(operation, Fe) and i in self.enabled:
            raise ScheduleError(f"{operation!r}: what its backward reads is there already")
        self._fetch(operation)
        stops = False
        if isinstance(operation, Fe):
            stops = last and not self.in_forward
            peak = self.level + (stage.stop_peak if stops else stage.forward_peak)
            runs = stage.runs
            self.time += runs.stopping if stops else runs.whole if self.in_forward else runs.filling
            self.enabled.add(i)
            self.level += stage.held
            if stage.keeps_input:
                self.hold(i)
            if i in self.stored:
                self.stored.remove(i)
                self.drop(i)
        else:
            # The state is kept by the first run, and put aside by those that draw again.
            peak = self.level + stage.pass_peak + stage.state
            self.time += stage.runs.passing
            if isinstance(operation, Fck) and i not in self.stored:
                self.stored.add(i)
                self.hold(i)
            elif isinstance(operation, Fn) and i in self.stored:
                self.stored.remove(i)
                self.drop(i)
        self._remember(i, stage.state, last_run=isinstance(operation, Fe))
        self._advance(i, stops, isinstance(operation, Fe) and stage.keeps_output)
        return peak

    def _remember(self, i: int, state: int, last_run: bool) -> None:
        """Generator state of stage i is kept from its first run to its last."""
        if last_run and i in self.states:
            self.states.remove(i)
            self.level -= state
        elif not last_run and i not in self.states:
            self.states.add(i)
            self.level += state

    def _fetch(self, operation: Fn | Fck | Fe) -> None:
        i = operation.index
        if self.current != i:
            if i not in self.stored:
                raise ScheduleError(f"{operation!r}: its input is not there")
            if self.current is not None:
                self.drop(self.current)
            self.hold(i)
            self.current = i

    def _advance(self, i: int, stops: bool, keeps_output: bool) -> None:
        if keeps_output and i == self.chain.length - 1 and not self.in_forward:
            self.output_again = self.chain.value_bytes[-1]  # the caller holds that of the first run
            self.level += self.output_again
        elif keeps_output:
            self.hold(i + 1)
        if stops:
            self.current = None
        else:
            self.hold(i + 1)
            self.current = i + 1
        self.drop(i)

    def _loss(self) -> int:
        if not self.in_forward:
            raise ScheduleError("Loss: the forward phase is over")
        if self.current != self.chain.length:
            raise ScheduleError("Loss: the last stage has not run")
        self.in_forward = False
        self.current = None  # the caller holds the output to the end
        self.level += self.chain.output_gradient
        return self.level + self.chain.loss

    def _backward(self, operation: B) -> int:
        i = operation.index
        if self.in_forward:
            raise ScheduleError(f"{operation!r}: before Loss")
        if i != self.next_backward:
            raise ScheduleError(f"{operation!r}: the next backward is B_{self.next_backward}")
        if i not in self.enabled:
            raise ScheduleError(f"{operation!r}: what it reads is not there")
        if self.current is not None:
            self.drop(self.current)
            self.current = None
        stage = self.chain.stages[i]
        self.enabled.remove(i)
        self.time += stage.backward_time
        self._remember(i, stage.state, last_run=True)
        peak = self.level + stage.backward_peak
        self.level += self.chain.gradient_bytes[i] - self.chain.gradient_bytes[i + 1] - stage.held
        self.level += stage.parameter_gradients
        if stage.keeps_input:
            self.drop(i)
        if self.output_again:
            self.level, self.output_again = self.level - self.output_again, 0
        elif stage.keeps_output:
            self.drop(i + 1)
        self.next_backward -= 1
        return peak
