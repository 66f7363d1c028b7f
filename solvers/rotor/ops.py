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

``Fe_i:w`` with w > 0 keeps part of what the backward reads (way w of the stage) and makes the rest again before B_i.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import overload

from solvers.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Forward:
    """Run stage ``index`` forward. The subclasses differ in what they keep."""

    index: int


@dataclass(frozen=True, slots=True)
class Fn(Forward):
    """Run a stage, and keep its output only."""

    def __repr__(self) -> str:
        return f"Fn_{self.index}"

    def __str__(self) -> str:
        return f"F_∅^{self.index}"


@dataclass(frozen=True, slots=True)
class Fck(Forward):
    """Run a stage, and keep its input as a checkpoint."""

    def __repr__(self) -> str:
        return f"Fck_{self.index}"

    def __str__(self) -> str:
        return f"F_ck^{self.index}"


@dataclass(frozen=True, slots=True)
class Fe(Forward):
    """Run a stage, and keep what its backward reads: all of it (``way`` 0) or a part."""

    way: int = 0

    def __repr__(self) -> str:
        return f"Fe_{self.index}" + (f":{self.way}" if self.way else "")

    def __str__(self) -> str:
        return f"F_all^{self.index}" + (f":{self.way}" if self.way else "")


@dataclass(frozen=True, slots=True)
class B:
    """Run the backward of stage ``index``."""

    index: int

    def __repr__(self) -> str:
        return f"B_{self.index}"

    def __str__(self) -> str:
        return f"B^{self.index}"


@dataclass(frozen=True, slots=True)
class Loss:
    """Where the forward phase ends."""

    def __repr__(self) -> str:
        return "Loss"

    def __str__(self) -> str:
        return "L"


Operation = Fn | Fck | Fe | B | Loss

_PATTERN = re.compile(r"(?:(Fn|Fck|Fe|B)_(\d+)(?::(\d+))?|Loss)")


@dataclass(frozen=True, slots=True)
class Sequence:
    """An immutable list of operations; ``algorithm`` is the name of the algorithm that made it."""

    operations: tuple[Operation, ...]
    algorithm: str = ""

    @classmethod
    def parse(cls, text: str) -> Sequence:
        """The sequence whose ``repr`` is ``text``. ``ScheduleError`` names the first word that is no operation."""
        operations: list[Operation] = []
        for word in text.strip().strip("[]").split(","):
            match = _PATTERN.fullmatch(word.strip())
            if not match or (match[3] and match[1] != "Fe"):
                raise ScheduleError(f"{word.strip()!r} is no operation: Fn_i, Fck_i, Fe_i, Fe_i:w, B_i or Loss")
            if match[1] is None:
                operations.append(Loss())
            elif match[1] == "Fe":
                operations.append(Fe(int(match[2]), int(match[3] or 0)))
            else:
                kinds: dict[str, type[Fn] | type[Fck] | type[B]] = {"Fn": Fn, "Fck": Fck, "B": B}
                operations.append(kinds[match[1]](int(match[2])))
        return cls(tuple(operations))

    @overload
    def __getitem__(self, index: int) -> Operation: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Operation, ...]: ...
    def __getitem__(self, index: int | slice) -> Operation | tuple[Operation, ...]:
        return self.operations[index]

    def __len__(self) -> int:
        return len(self.operations)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def __repr__(self) -> str:
        return "[" + ", ".join(map(repr, self.operations)) + "]"

    def __str__(self) -> str:
        return " ".join(map(str, self.operations))
