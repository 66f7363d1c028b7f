"""The input of rotor's dynamic program: a chain of measured stages, in integers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from solvers.errors import ProblemError


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a stage whose backward follows (F_all of the paper). Way 0 keeps all that the backward reads.

    ``held``: bytes kept until the backward, without the stage's input and output. ``forward_peak``: the most bytes that
    the run allocates, results included. ``refill_time``, ``refill_peak``: time and most bytes of the reruns before the
    backward. ``refilled``: bytes kept after these reruns, in place of ``held``.
    """

    held: int
    forward_peak: int
    refilled: int
    refill_time: int = 0
    refill_peak: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a chain. Times have one unit, which the caller chooses; memory is in bytes. The paper's symbols:

    ``forward_time`` (u_f): that of a whole run. ``tail_time``: the part of it after the last tensor that the backward
    reads; a run right before its own backward stops there. ``pass_peak`` (o_f): the most that a run allocates if it
    keeps nothing, the output included. ``stop_peak``: the same for way 0 if it stops before the tail.
    ``backward_time`` (u_b). ``backward_peak`` (o_b): the most that the backward allocates beyond what was live before
    it. ``state``: bytes of generator state, kept from the first run on for later runs. ``input_gradient`` (δ): bytes of
    the gradient of the input. ``parameter_gradients``: bytes of parameters' gradients that the backward makes and that
    stay. ``keeps_input``, ``keeps_output``: whether way 0 keeps them for the backward. ``ways``: way 0 and others.
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
    """Stages in order, and the values between them. Stage i maps x_i to x_{i+1}; L is the number of stages.

    ``values``: for each of x_0..x_L its storages as (identity, bytes); values that share memory share identities.
    Memory of the caller (x_0, parameters) has 0 bytes. ``output_gradient``: bytes of the gradient of x_L. ``loss``: the
    most other bytes that the code behind the chain allocates. ``unit``: bytes of a slot, for display. Raises
    ``ProblemError`` for what cannot be a chain.
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
        """For each stage, the bytes of parameters' gradients that are live before its backward."""
        bytes_after = [0]
        for stage in reversed(self.stages[1:]):
            bytes_after.append(bytes_after[-1] + stage.parameter_gradients)
        return tuple(reversed(bytes_after))

    @property
    def state(self) -> int:
        """Bytes of generator states if all stages run again."""
        return sum(stage.state for stage in self.stages)

    def __str__(self) -> str:
        """A table with a line for each stage; bytes are in slots of ``unit``, rounded up."""

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
