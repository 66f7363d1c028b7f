"""A chain of measured stages as rotor's dynamic program sees it: integers only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from solvers.errors import ProblemError


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a stage so that its backward can follow (F_all of the paper; way 0 keeps everything).

    ``held``: bytes that stay until the backward, the stage's input and output not counted. ``forward_peak``:
    the most that the run allocates, results included. ``refill_time``, ``refill_peak``: what is run again before
    the backward, and the most that it allocates; ``refilled``: bytes that are held then instead of ``held``.
    """

    held: int
    forward_peak: int
    refilled: int
    refill_time: int = 0
    refill_peak: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage; times in one unit of the caller's choice, memory in bytes. Paper's symbols in brackets.

    ``forward_time`` (u_f) is that of a whole run; ``tail_time`` is the part of it behind the last tensor that the
    backward reads: a run right before its own backward stops there. ``pass_peak`` (o_f): the most that a run
    keeping nothing allocates, the output included. ``stop_peak``: the same for way 0 when it stops before the tail.
    ``backward_time`` (u_b), ``backward_peak`` (o_b): the most that the backward adds to what is there when it starts.
    ``state``: bytes kept from the first run on for later runs (generator state). ``input_gradient``: bytes of the
    gradient that it passes on (δ). ``parameter_gradients``: bytes of gradients that it makes and that stay.
    ``keeps_input``, ``keeps_output``: whether way 0 keeps them for the backward. ``ways``: at least way 0.
    """

    name: str
    forward_time: int
    tail_time: int
    backward_time: int
    pass_peak: int
    stop_peak: int
    backward_peak: int
    input_gradient: int
    parameter_gradients: int
    ways: tuple[Way, ...]
    keeps_input: bool = True
    keeps_output: bool = False
    state: int = 0


@dataclass(frozen=True)
class Chain:
    """Stages in order, and the values between them.

    ``values``: for each x_0..x_L its storages as (identity, bytes); values that share memory share identities. What
    the caller holds anyway (x_0, parameters) has 0 bytes. ``output_gradient``: bytes of the gradient of x_L.
    ``loss``: bytes that what lies behind the chain allocates beside. ``unit``: bytes of a slot, for display.
    """

    stages: tuple[Stage, ...]
    values: tuple[tuple[tuple[int, int], ...], ...]
    output_gradient: int
    loss: int = 0
    unit: int = 1

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Raise ``ProblemError`` for what cannot be a chain."""
        if not self.stages or len(self.values) != len(self.stages) + 1:
            raise ProblemError("a chain has at least one stage, and one value more than stages")
        for i, stage in enumerate(self.stages):
            if not stage.ways:
                raise ProblemError(f"stage {i} ({stage.name}) has no way to run")
            if not 0 <= stage.tail_time <= stage.forward_time:
                raise ProblemError(f"stage {i} ({stage.name}): the tail takes more time than the whole run")

    @property
    def length(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @cached_property
    def value_bytes(self) -> tuple[int, ...]:
        """Bytes of x_0..x_L (a of the paper)."""
        return tuple(sum(size for _, size in value) for value in self.values)

    @cached_property
    def gradient_bytes(self) -> tuple[int, ...]:
        """Bytes of the gradients of x_0..x_L."""
        return (*(stage.input_gradient for stage in self.stages), self.output_gradient)

    @cached_property
    def parameter_gradients_after(self) -> tuple[int, ...]:
        """For each stage the bytes of parameter gradients that are there before its backward."""
        found = [0]
        for stage in reversed(self.stages[1:]):
            found.append(found[-1] + stage.parameter_gradients)
        return tuple(reversed(found))

    @property
    def state(self) -> int:
        """Bytes kept for later runs when no stage runs only once."""
        return sum(stage.state for stage in self.stages)

    def __str__(self) -> str:
        """One line a stage; bytes in slots of ``unit``, rounded up."""

        def slots(size: int) -> int:
            return -(-size // self.unit)

        rows: list[tuple[str, ...]] = [("stage", "u_f", "u_b", "a", "ā", "o_f", "o_b")]
        for i, s in enumerate(self.stages):
            kept = s.ways[0].held + self.value_bytes[i + 1]
            sizes = (self.value_bytes[i], kept, s.pass_peak, s.backward_peak)
            rows.append((s.name, str(s.forward_time), str(s.backward_time), *(str(slots(b)) for b in sizes)))
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = [
            "  ".join(
                text.ljust(w) if k == 0 else text.rjust(w) for k, (text, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join([*lines, f"slots of {self.unit} bytes, times in ns"])
