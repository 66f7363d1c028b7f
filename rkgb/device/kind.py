"""What the packages need of a kind of device. The kinds are in ``rkgb/device/cpu.py`` and ``rkgb/device/cuda.py``."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from math import inf
from typing import Any, ClassVar, NamedTuple

import torch

from rkgb.device.roofline import Roofline

PRECISE = ("all", "matmul", "conv", "rnn")
"""The groups of operations for which torch has a precision of float32, on each kind of device."""

precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter


class Setting(NamedTuple):
    """Functions that read and write one setting of torch; it is left alone if there is none to ``write`` it."""

    read: Callable[[], Hashable]
    write: Callable[[Any], object] | None = None


def setting_of_precision(backend: str, operations: str) -> Setting:
    """The precision of float32 in a group of operations."""
    write = torch._C._set_fp32_precision_setter
    return Setting(partial(precision, backend, operations), partial(write, backend, operations))


class Moment(NamedTuple):
    """``level``: bytes above the level of the first moment. ``peak``: the most above it until the next moment. ``new``:
    bytes allocated since the first moment, and outside of pauses, that are still there; a kind that cannot tell these
    gives the change of the level.
    """

    level: int
    peak: int
    new: int = 0


class Timeline(ABC):
    """Measures how much any code has allocated at each of several moments.

    Open it before the first of them, and before any memory is allocated that may be released between them. Call
    ``close`` in the thread that opened it, and not within a backward. ``marks``: how many moments there were.
    """

    marks: int

    @abstractmethod
    def mark(self) -> None:
        """Mark a moment."""

    @abstractmethod
    def pause(self) -> None:
        """Mark a moment; what comes from now on is not measured."""

    @abstractmethod
    def resume(self) -> None:
        """What comes from now on is."""

    @abstractmethod
    def close(self) -> list[Moment] | None:
        """All moments, in order; None if some are missing from the recording."""


class Kind(ABC):
    """One kind of device.

    ``scalars``: bytes that a budget reserves for the numbers of the loss (its value, its gradient, counts).
    ``counts_states``: whether the states of generators lie in the device's memory, and so count in a budget.
    ``keeps_workspaces``: whether the first use of a kernel in a thread may allocate a workspace that stays.
    ``long``: nanoseconds of a run whose time is right though its gradients are ones and its memory is watched; infinite
    where matrix products of ones are faster than others.
    ``caches``: bytes that push all else out of the caches, where a step's first forward mostly reads from them and a
    run again does not; 0 where ``to_read`` empties them before each run.
    ``choosing``: parts of the names of operations whose kernels may need more memory for smaller tensors.
    ``launches``: whether it runs behind the host, whose launches take time of their own.
    ``settings``: those of torch on which results of this kind, or the memory of its kernels, depend.
    """

    type: ClassVar[str]
    scalars: ClassVar[int]
    counts_states: ClassVar[bool]
    keeps_workspaces: ClassVar[bool]
    long: ClassVar[float] = inf
    caches: ClassVar[int] = 0
    choosing: ClassVar[tuple[str, ...]] = ("conv",)
    launches: ClassVar[bool] = False
    settings: ClassVar[tuple[Setting, ...]]

    @abstractmethod
    def random_state(self, device: torch.device) -> torch.Tensor:
        """The state of the default generator: a uint8 tensor in host memory."""

    @abstractmethod
    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Restore what ``random_state`` returned."""

    @abstractmethod
    def measured_reserved(self, function: Callable[[], Any], device: torch.device) -> int:
        """The most bytes that the allocator reserves for ``function``. Raises ``MeasureError`` if it reserves none."""

    @abstractmethod
    def timeline(self, device: torch.device) -> Timeline:
        """An open timeline."""

    def is_watched(self) -> bool:
        """Whether somebody else watches the allocator, in a way that a timeline ends."""
        return False

    @abstractmethod
    def free(self, device: torch.device) -> int:
        """Bytes that the program can still allocate."""

    @abstractmethod
    def total(self, device: torch.device) -> int:
        """Bytes that the device has, for all programs together."""

    def slack(self, device: torch.device) -> int:
        """Bytes that the allocator holds, and that no other allocation of any size can have; by default none."""
        return 0

    @abstractmethod
    def in_use(self) -> list[torch.device]:
        """The devices of this kind on which the program holds memory."""

    def to_read(self, device: torch.device) -> list[torch.Tensor]:
        """Tensors to read before a timed run, which push its inputs out of the caches; by default none."""
        return []

    def beside_a_rerun(self, touched: int) -> int:
        """Nanoseconds of Python beside the operations of each node that runs again, in a step that uses ``touched``
        bytes; by default 0, since a device that runs behind its queue does not wait for Python.
        """
        return 0

    @abstractmethod
    def model(self, device: torch.device) -> str:
        """The name of the hardware. Devices of one name run kernels in the same time."""

    @abstractmethod
    def roofline(self, device: torch.device, dtype: torch.dtype, convolution: bool) -> Roofline:
        """The roofline of operations with results of ``dtype``; ``convolution``: whether they are convolutions."""

    def available(self) -> bool:
        """Whether the machine has such a device."""
        return True

    def hides_draws(self, name: str, arguments: Callable[[], Mapping[str, Any]]) -> bool:
        """Whether the operation ``name`` draws random numbers from a state that can be neither read nor restored.

        ``arguments``: returns what it is given, by name.
        """
        return False

    def synchronize(self, device: torch.device) -> None:
        """Wait until all kernels that were launched are done."""
        return

    def mark(self, device: torch.device) -> Any:
        """A mark of this moment in the device's order of execution."""
        return time.perf_counter_ns()

    def between(self, start: Any, end: Any) -> int:
        """Nanoseconds between two marks."""
        return int(end - start)

    def hold(self, device: torch.device, at_least: int = 0) -> None:
        """Delay the kernels that are launched next for ``at_least`` nanoseconds, so that none waits for its launch."""
        return

    def first_use(self, function: Callable[[], Any], device: torch.device) -> None:
        """Run ``function`` once in every thread that runs plans, so that its kernels allocate their workspaces."""
        function()

    def warm_up(self, device: torch.device) -> None:
        """Allocate the workspaces of matrix products, before any memory is measured."""
        return
