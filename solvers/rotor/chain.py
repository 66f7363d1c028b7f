"""The input of rotor's dynamic program: a chain of measured stages, in integers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from solvers.errors import ProblemError


@dataclass(frozen=True, slots=True)
class Runs:
    """Times of a stage's runs, each as it takes place in a step.

    ``whole`` (u_f): the first run, if autograd keeps what the backward reads. ``passing``: any run that keeps nothing.
    ``filling``: a run after the loss that recomputes what the backward reads, and the output. ``stopping``: the same
    without the output, which ends with the last tensor that the backward reads. No run that makes the output takes less
    than ``whole``.
    """

    whole: int
    passing: int
    filling: int
    stopping: int

    @classmethod
    def alike(cls, time: int, tail: int = 0) -> Runs:
        """All runs take ``time``, of which ``tail`` comes after the last tensor that the backward reads."""
        return cls(time, time, time, time - tail)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a chain. Times have one unit, which the caller chooses; memory is in bytes. The paper's symbols:

    ``runs``: times of its forward. ``backward_time`` (u_b). ``held``: bytes kept for the backward, without the stage's
    input and output. ``forward_peak`` (o_f): the most that a run allocates that keeps these, the output included.
    ``pass_peak``, ``stop_peak``: the same for a run that keeps nothing, and for one that stops with the last tensor
    that the backward reads. ``backward_peak`` (o_b): the most that the backward allocates beyond what was live before
    it. ``input_gradient`` (δ): bytes of the gradient of the input. ``parameter_gradients``: bytes of parameters'
    gradients that the backward makes and that stay. ``keeps_input``, ``keeps_output``: whether the backward reads them.
    ``state``: bytes of generator state, kept from the first run on for later runs.
    """

    name: str
    runs: Runs
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
            runs = stage.runs
            if min(runs.passing, runs.filling) < runs.whole or not 0 <= runs.stopping <= runs.filling:
                raise ProblemError(
                    f"stage {i} ({stage.name}): of whole runs the one that keeps everything is the shortest: {runs}"
                )
            if stage.stop_peak > stage.forward_peak:
                raise ProblemError(
                    f"stage {i} ({stage.name}): a run that stops is the start of a full one, so it allocates "
                    f"no more: stop_peak is {stage.stop_peak} bytes, forward_peak {stage.forward_peak}"
                )

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
        behind = [stage.parameter_gradients for stage in reversed(self.stages[1:])]
        return tuple(accumulate(behind, initial=0))[::-1]

    def __str__(self) -> str:
        """A table with a line for each stage; bytes are in slots of ``unit``, rounded up."""

        rows: list[tuple[object, ...]] = [("stage", "u_f", "u_b", "a", "ā", "o_f", "o_b")]
        for i, s in enumerate(self.stages):
            kept = s.held + self.value_bytes[i + 1]
            sizes = (-(-size // self.unit) for size in (self.value_bytes[i], kept, s.pass_peak, s.backward_peak))
            rows.append((s.name, s.runs.whole, s.backward_time, *sizes))
        first, *rest = (max(len(str(text)) for text in column) for column in zip(*rows, strict=True))
        lines = (
            "  ".join([f"{name:<{first}}", *(f"{text:>{width}}" for text, width in zip(texts, rest, strict=True))])
            for name, *texts in rows
        )
        return "\n".join([*lines, f"slots of {self.unit} bytes, times in ns"])
