"""The operations of a checkpointing sequence over a chain of stages, and the sequence itself.

Stage i maps value x_i to x_{i+1}; stages count from 0. Each operation has the name that rotor gives it, which
``repr`` shows and ``parse`` reads, and the notation of the paper (Beaumont et al., "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory", Inria RR-9302, 2019), which
``str`` shows:

    Fn_i    F_∅^i    run stage i, keep neither its input nor what its backward reads
    Fck_i   F_ck^i   run stage i, keep its input
    Fe_i    F_all^i  run stage i, keep what its backward reads
    Loss    L        end of the forward phase: what lies behind the chain runs, forward and backward
    B_i     B^i      run the backward of stage i
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Self

from solvers.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class OnStage:
    """An operation on stage ``index``, with the names that rotor and the paper give it."""

    index: int
    sign: ClassVar[str]

    def __repr__(self) -> str:
        return f"{type(self).__name__}_{self.index}"

    def __str__(self) -> str:
        return f"{self.sign}^{self.index}"


class Fn(OnStage):
    """Run a stage, and keep its output only."""

    sign = "F_∅"


class Fck(OnStage):
    """Run a stage, and keep its input as a checkpoint."""

    sign = "F_ck"


class Fe(OnStage):
    """Run a stage, and keep what its backward reads."""

    sign = "F_all"


class B(OnStage):
    """Run the backward of a stage."""

    sign = "B"


@dataclass(frozen=True, slots=True)
class Loss:
    """Where the forward phase ends."""

    def __repr__(self) -> str:
        return "Loss"

    def __str__(self) -> str:
        return "L"


Operation = Fn | Fck | Fe | B | Loss

_PATTERN = re.compile(r"(Fn|Fck|Fe|B)_(\d+)")
_KINDS: dict[str, type[Fn | Fck | Fe | B]] = {"Fn": Fn, "Fck": Fck, "Fe": Fe, "B": B}


def run_starts(operations: Iterable[Operation]) -> set[int]:
    """The stages that run again with the stage before them not run right before."""
    pairs = ((a, b) for a, b in pairwise(operations) if isinstance(b, Fn | Fck | Fe))
    return {b.index for a, b in pairs if not (isinstance(a, Fn | Fck | Fe) and a.index + 1 == b.index)}


class Sequence(tuple[Operation, ...]):
    """An immutable list of operations; ``algorithm`` is the name of the algorithm that made it."""

    algorithm: str

    def __new__(cls, operations: Iterable[Operation], algorithm: str = "") -> Self:
        made = super().__new__(cls, operations)
        made.algorithm = algorithm
        return made

    @classmethod
    def parse(cls, text: str) -> Sequence:
        """The sequence whose ``repr`` is ``text``. ``ScheduleError`` names the first word that is no operation."""
        operations: list[Operation] = []
        for word in map(str.strip, text.strip().strip("[]").split(",")):
            match = _PATTERN.fullmatch(word)
            if not match and word != "Loss":
                raise ScheduleError(f"{word!r} is no operation: Fn_i, Fck_i, Fe_i, B_i or Loss")
            operations.append(_KINDS[match[1]](int(match[2])) if match else Loss())
        return cls(operations)

    def __repr__(self) -> str:
        return "[" + ", ".join(map(repr, self)) + "]"

    def __str__(self) -> str:
        return " ".join(map(str, self))
