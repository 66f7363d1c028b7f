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
    backward. ``refilled``: bytes kept after these reruns, in place of ``held``. ``run_time``: of a run in this way; for
    way 0, ``Stage.runs`` says it.
    """

    held: int
    forward_peak: int
    refilled: int
    refill_time: int = 0
    refill_peak: int = 0
    run_time: int = 0


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

    ``runs``: times of its forward. ``pass_peak`` (o_f): the most that a run allocates if it keeps nothing, the output
    included. ``stop_peak``: the same for way 0 if it stops with the last tensor that the backward reads.
    ``backward_time`` (u_b). ``backward_peak`` (o_b): the most that the backward allocates beyond what was live before
    it. ``state``: bytes of generator state, kept from the first run on for later runs. ``input_gradient`` (δ): bytes of
    the gradient of the input. ``parameter_gradients``: bytes of parameters' gradients that the backward makes and that
    stay. ``keeps_input``, ``keeps_output``: whether way 0 keeps them for the backward. ``ways``: way 0 and others.
    """

    name: str
    runs: Runs
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

    @property
    def forward_time(self) -> int:
        """u_f: the time of the first run, if autograd keeps what the backward reads."""
        return self.runs.whole

    def run_time(self, way: int, *, first: bool) -> int:
        """The time of a run in ``way``, the ``first`` one or one after the loss, if the output is wanted."""
        if way:
            return self.ways[way].run_time
        return self.runs.whole if first else self.runs.filling


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
            runs, ways = stage.runs, stage.ways[1:]
            others = (runs.passing, runs.filling, *(way.run_time for way in ways))
            if min(others) < runs.whole or not 0 <= runs.stopping <= runs.filling:
                raise ProblemError(
                    f"stage {i} ({stage.name}): of whole runs the one that keeps everything is the shortest: {runs}"
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
