"""The input of rotor's dynamic program: a chain of measured stages, in integers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from solvers.errors import ProblemError
from solvers.tables import text_table


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a chain. Times have one unit, which the caller chooses; memory is in bytes. The paper's symbols:

    ``forward_time`` (u_f), ``backward_time`` (u_b). ``tail``: the part of the forward's behind the last tensor that the
    backward reads, where a run right before the backward stops. ``held``: bytes kept for the backward, without the
    stage's input and output. ``forward_peak`` (o_f): the most that a run allocates that keeps these, with the output.
    ``pass_peak``, ``stop_peak``: the same for a run that keeps nothing, and for one that stops with the last tensor
    that the backward reads. ``backward_peak`` (o_b): the most that the backward allocates beyond what was live before
    it. ``input_gradient`` (δ): bytes of the gradient of the input. ``parameter_gradients``: bytes of parameters'
    gradients that the backward makes and that stay. ``keeps_input``, ``keeps_output``: whether the backward reads them.
    ``draws``: the generators that runs draw from, as (identity, bytes of a state). ``state``: other bytes that are kept
    from the first run on for later runs. ``holds_input``, ``holds_output``: whether these stay from then to the end.
    """

    name: str
    forward_time: int
    tail: int
    backward_time: int
    held: int
    forward_peak: int
    pass_peak: int
    stop_peak: int
    backward_peak: int
    input_gradient: int
    parameter_gradients: int
    keeps_input: bool = True
    keeps_output: bool = False
    state: int = 0
    draws: tuple[tuple[int, int], ...] = ()
    holds_input: bool = False
    holds_output: bool = False


@dataclass(frozen=True)
class Chain:
    """Stages in order, and the values between them. Stage i maps x_i to x_{i+1}; L is the number of stages.

    ``values``: for each of x_0..x_L its storages as (identity, bytes); values that share memory share identities.
    Memory of the caller (x_0, parameters) has 0 bytes. ``output_gradient``: bytes of the gradient of x_L. ``loss``: the
    most other bytes that code behind the chain allocates. ``unit``: bytes of a printed slot. Raises ``ProblemError``.
    """

    stages: tuple[Stage, ...]
    values: tuple[tuple[tuple[int, int], ...], ...]
    output_gradient: int
    loss: int = 0
    unit: int = 1

    def __post_init__(self) -> None:
        if not self.stages or len(self.values) != len(self.stages) + 1:
            raise ProblemError("a chain has at least one stage, and one value more than stages")
        for i, s in enumerate(self.stages):
            if not 0 <= s.tail <= s.forward_time:
                raise ProblemError(f"stage {i} ({s.name}): tail is {s.tail}, no part of forward_time, {s.forward_time}")
            if s.stop_peak > s.forward_peak:
                peaks = f"stop_peak is {s.stop_peak} bytes, forward_peak {s.forward_peak}"
                raise ProblemError(f"stage {i} ({s.name}): a run that stops allocates no more than a full one: {peaks}")

    verify = __post_init__

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

    def __str__(self) -> str:
        """A table with a line for each stage; bytes are in slots of ``unit``, rounded up."""
        rows = [["stage", "u_f", "u_b", "a", "ā", "o_f", "o_b"]]
        for s, before, after in zip(self.stages, self.value_bytes, self.value_bytes[1:], strict=False):
            sizes = (-(-size // self.unit) for size in (before, s.held + after, s.pass_peak, s.backward_peak))
            rows.append([s.name, *map(str, (s.forward_time, s.backward_time, *sizes))])
        return f"{text_table(rows, [0])}\nslots of {self.unit} bytes, times in ns"
