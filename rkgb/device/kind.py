"""The interface of a kind of device, which ``rkgb/device/cpu.py`` and ``rkgb/device/cuda.py`` implement."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from rkgb.device.roofline import Roofline

PRECISE = ("all", "matmul", "conv", "rnn")
"""The operations for which torch has a setting of float32 precision."""

precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter


class Window(ABC):
    """Measures what the caller's code allocates and frees between two moments, ``begin`` and ``mark``.

    Open it before anything is allocated that may be freed meanwhile. Call ``close`` in the same thread, and not within
    a backward.
    """

    @abstractmethod
    def begin(self) -> None:
        """The first moment is now."""

    @abstractmethod
    def mark(self) -> None:
        """The second moment is now."""

    @abstractmethod
    def close(self) -> tuple[int, int, int] | None:
        """(peak, new, left) in bytes; None if ``mark`` was not called.

        ``peak``: the most above the level of the first moment. ``new``: allocated since, and there at the second
        moment; ``left``: allocated since, and there now. A kind that does not know these returns changes of the level.
        """


class Moment(NamedTuple):
    """``level``: bytes above the first moment's. ``peak``: the most, likewise, from here to the next moment."""

    level: int
    peak: int


class Timeline(ABC):
    """What other people's code has allocated at any number of moments. It is opened before the first of them.

    ``close`` must follow in the thread that opened it, and outside of a backward.
    """

    @abstractmethod
    def mark(self) -> None:
        """A moment is now."""

    @abstractmethod
    def close(self) -> list[Moment] | None:
        """All moments, in order; None if they cannot be told."""


class Kind(ABC):
    """One kind of device.

    ``scalars``: bytes of each budget for the numbers of the loss (its value, its gradient, counts). ``counts_states``:
    whether states of generators are in device memory. ``keeps_workspaces``: whether the first use of a kernel in a
    thread may allocate memory that stays. ``settings_read``: functions that read the settings of torch on which
    results, or the memory of kernels, depend.
    """

    type: ClassVar[str]
    scalars: ClassVar[int]
    counts_states: ClassVar[bool]
    keeps_workspaces: ClassVar[bool]
    settings_read: ClassVar[tuple[Callable[[], Hashable], ...]]

    @abstractmethod
    def random_state(self, device: torch.device) -> torch.Tensor:
        """The state of the default generator, as bytes in host memory."""

    @abstractmethod
    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Restore what ``random_state`` returned."""

    @abstractmethod
    def measured(self, function: Callable[[], Any], device: torch.device) -> tuple[Any, int, int]:
        """(result, peak, net) of ``function()``: the most bytes above the level at the call, and those at its end."""

    @abstractmethod
    def measured_after(
        self, prepare: Callable[[], Any], function: Callable[[Any], Any], device: torch.device
    ) -> tuple[Any, int]:
        """(result, peak) of ``function(prepare())``: the most bytes above the level between the two."""

    @abstractmethod
    def measured_reserved(self, function: Callable[[], Any], device: torch.device) -> int:
        """Bytes that the allocator reserves for ``function()``."""

    @abstractmethod
    def window(self, device: torch.device) -> Window | None:
        """An open window; None if none can be opened."""

    @abstractmethod
    def timeline(self, device: torch.device) -> Timeline | None:
        """What other people's code allocates, from now on; None where that cannot be seen."""

    @abstractmethod
    def free(self, device: torch.device) -> int:
        """Bytes that can be allocated."""

    def free_for_budgets(self, device: torch.device) -> int:
        """The part of ``free`` that a budget may have, in bytes.

        A tenth is left for unused parts of blocks, and for the temporary memory of the optimizer.
        """
        return self.free(device) * 9 // 10

    @abstractmethod
    def in_use(self) -> list[torch.device]:
        """The devices of this kind that a program works on."""

    @abstractmethod
    def to_read(self, device: torch.device, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors to read before a timed run, so that its own inputs are in no cache."""

    @abstractmethod
    def model(self, device: torch.device) -> str:
        """The name of the device. Kernels take equal times on devices of one name."""

    @abstractmethod
    def roofline(self, device: torch.device, dtype: torch.dtype, convolution: bool) -> Roofline:
        """The roofline of an operation with results of ``dtype``."""

    def available(self) -> bool:
        """Whether the machine has one."""
        return True

    def hides_draws(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Whether the operation draws from a state that can neither be read nor restored."""
        return False

    def before_measuring(self) -> None:
        """Warn of what measuring memory disturbs."""
        return

    def synchronize(self, device: torch.device) -> None:
        """Wait for all kernels that were launched."""
        return

    def mark(self, device: torch.device) -> Any:
        """A time stamp of the device, for ``between``."""
        return time.perf_counter_ns()

    def between(self, start: Any, end: Any) -> int:
        """Nanoseconds between two marks."""
        return int(end - start)

    def hold(self, device: torch.device, at_least: int = 0) -> None:
        """Delay the kernels that are launched next until all are launched; ``at_least``: for so many nanoseconds."""
        return

    def first_use(self, function: Callable[[], Any], device: torch.device) -> None:
        """Run ``function`` in each thread in which plans run kernels, for these to allocate what stays."""
        function()

    def warm_up(self, device: torch.device) -> None:
        """Make kernels allocate what stays, before any memory is measured."""
        return
