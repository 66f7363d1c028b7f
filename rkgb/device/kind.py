"""What the packages need of a kind of device; ``rkgb/device/cpu.py`` and ``rkgb/device/cuda.py`` are the kinds."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from rkgb.device.roofline import Roofline

PRECISE = ("all", "matmul", "conv", "rnn")
"""What torch has a precision of float32 for, on each kind of device."""

precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter


class Window(ABC):
    """What other people's code allocates and releases between two moments, ``begin`` and ``mark``.

    It is opened before what may be released meanwhile is allocated. ``close`` must follow in the thread that opened it,
    and outside of a backward.
    """

    @abstractmethod
    def begin(self) -> None:
        """The first moment is now."""

    @abstractmethod
    def mark(self) -> None:
        """The second moment is now."""

    @abstractmethod
    def close(self) -> tuple[int, int, int] | None:
        """(peak, new, left): the most bytes above the level of the first moment; those allocated since that are there
        at the second moment; the same now. Where the last two are not known, the change of the level. None if there was
        no second moment.
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

    ``scalars``: bytes of a budget that are for the numbers of the loss itself (its value, its gradient, counts).
    ``counts_states``: whether states of generators lie in the memory that budgets are of. ``keeps_workspaces``: whether
    the first use of a kernel in a thread may allocate what stays. ``settings_read``: functions that read the settings
    of torch on which results of this kind depend, or what its kernels allocate.
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
        """(result, peak, net) of ``function``: bytes above the level at the call."""

    @abstractmethod
    def measured_after(
        self, prepare: Callable[[], Any], function: Callable[[Any], Any], device: torch.device
    ) -> tuple[Any, int]:
        """(result, peak) of ``function(prepare())``: bytes above the level between the two."""

    @abstractmethod
    def measured_reserved(self, function: Callable[[], Any], device: torch.device) -> int:
        """Bytes that the allocator takes for ``function``."""

    @abstractmethod
    def window(self, device: torch.device) -> Window | None:
        """A window that is open; None where none can be."""

    @abstractmethod
    def timeline(self, device: torch.device) -> Timeline | None:
        """What other people's code allocates, from now on; None where that cannot be seen."""

    @abstractmethod
    def free(self, device: torch.device) -> int:
        """Bytes that can be allocated."""

    def free_for_budgets(self, device: torch.device) -> int:
        """What a budget may have of ``free``: a tenth is left for what lies beside it, such as unused parts of blocks,
        and the numbers that an optimizer computes with.
        """
        return self.free(device) * 9 // 10

    @abstractmethod
    def in_use(self) -> list[torch.device]:
        """The devices of this kind that a program works on."""

    @abstractmethod
    def to_read(self, device: torch.device, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors to read before a timed run, for what it reads to lie in memory and in no cache."""

    @abstractmethod
    def model(self, device: torch.device) -> str:
        """The name that times of kernels go by: devices of one name are alike."""

    @abstractmethod
    def roofline(self, device: torch.device, dtype: torch.dtype, convolution: bool) -> Roofline:
        """That of an operation with results of ``dtype``."""

    def available(self) -> bool:
        """Whether the machine has one."""
        return True

    def hides_draws(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Whether the operation draws from a state that can neither be read nor put back."""
        return False

    def before_measuring(self) -> None:
        """Say what measuring memory disturbs."""
        return

    def synchronize(self, device: torch.device) -> None:
        """Wait for what was begun."""
        return

    def mark(self, device: torch.device) -> Any:
        """This moment of the device."""
        return time.perf_counter_ns()

    def between(self, start: Any, end: Any) -> int:
        """Nanoseconds between two marks."""
        return int(end - start)

    def hold(self, device: torch.device, at_least: int = 0) -> None:
        """What is begun next waits until all of it is begun; ``at_least``: nanoseconds that this takes."""
        return

    def first_use(self, function: Callable[[], Any], device: torch.device) -> None:
        """Run ``function`` wherever plans run: first uses of its kernels are then over."""
        function()

    def warm_up(self, device: torch.device) -> None:
        """Allocate what stays, before any memory is measured."""
        return
