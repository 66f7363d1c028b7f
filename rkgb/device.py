"""The kinds of devices: generators, clock, memory, workspaces, and what of torch's settings is theirs.

Everything that is done otherwise on one of them is a method of ``Kind``; another kind would be another class in
``KINDS``.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rkgb.errors import MeasureError, UnsupportedError
from rkgb.kind import Kind, Window
from rkgb.profiled import ProfiledWindow, profiled, profiled_after
from rkgb.roofline import UNKNOWN, Roofline, roofline_of

_C: Any = torch._C
_RNNS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_PRECISE = ("all", "matmul", "conv", "rnn")
_precision: Callable[[str, str], str] = _C._get_fp32_precision_getter


_GROUP = "/sys/fs/cgroup"  # of a container: Linux's control groups, whose memory.max is a number or "max"


def _figures(path: str) -> dict[str, int]:
    """The second word of each line by the first."""
    with open(path, encoding="ascii") as lines:
        return {words[0]: int(words[1]) for words in map(str.split, lines)}


class Cpu(Kind):
    """The machine itself. Its allocator counts what was asked for."""

    type = "cpu"
    scalars = 64
    counts_states = True
    keeps_workspaces = False
    settings_read = (
        torch.get_num_threads,
        _C._get_mkldnn_enabled,
        partial(_precision, "generic", "all"),
        *(partial(_precision, "mkldnn", op) for op in _PRECISE),
    )
    _cache = 64 * 2**20  # bytes, more than a processor's

    def random_state(self, device: torch.device) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)

    def before_measuring(self) -> None:
        if torch._C._autograd._profiler_enabled():
            warnings.warn(
                "the running profiler session ends: memory is measured by another one. Start the profiler when plans "
                "are made, after a first call of each kind",
                RuntimeWarning,
                stacklevel=4,
            )

    def measured(self, function: Callable[[], Any], device: torch.device) -> tuple[Any, int, int]:
        return profiled(function)

    def measured_after(
        self, prepare: Callable[[], Any], function: Callable[[Any], Any], device: torch.device
    ) -> tuple[Any, int]:
        return profiled_after(prepare, function)

    def measured_reserved(self, function: Callable[[], Any], device: torch.device) -> int:
        raise MeasureError(
            f"reserved memory was asked for on {device}, whose allocator keeps none: what is released goes back to the "
            "system. Measure without reserved=True, or give the device of the model"
        )

    def window(self, device: torch.device) -> Window | None:
        return None if torch._C._autograd._profiler_enabled() else ProfiledWindow()

    def free(self, device: torch.device) -> int:
        """What the machine has, or the container if that has less."""
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        with contextlib.suppress(OSError, LookupError):
            found = 1024 * _figures("/proc/meminfo")["MemAvailable:"]
        with contextlib.suppress(OSError, ValueError, LookupError):
            limit, used = (int(Path(_GROUP, f"memory.{what}").read_text("ascii")) for what in ("max", "current"))
            found = min(found, max(0, limit - used + _figures(f"{_GROUP}/memory.stat")["inactive_file"]))
        return found

    def in_use(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def to_read(self, device: torch.device, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Parameters that fill a processor's cache, or all that there are: a step reads them, too."""
        found: list[torch.Tensor] = []
        left = self._cache
        for p in parameters:
            if left <= 0:
                break
            if type(p) is torch.nn.Parameter and p.layout == torch.strided and p.is_contiguous():
                count = min(p.numel(), left // p.element_size())
                found.append(p.detach().view(-1)[:count])
                left -= found[-1].nbytes
        return found

    def roofline(self, device: torch.device, dtype: torch.dtype, convolution: bool) -> Roofline:
        return UNKNOWN


class Cuda(Kind):
    """NVIDIA's and AMD's GPUs.

    Memory is what was *requested* of the caching allocator. What it has allocated for it depends on what was there
    before: blocks are rounded up to 512 bytes, and one above 1 MiB comes whole with up to 1 MiB more. Only the requests
    follow from the program, so only they can be planned to the byte.
    """

    type = "cuda"
    # A reduction of many numbers to one leaves 4 or 8 bytes a thread block in memory for a moment (ATen's Reduce.cuh):
    # some thousand blocks, or, above 2 ** 27 numbers, one for each 2 ** 17 of them.
    scalars = 65_536
    counts_states = False  # a seed and an offset, in host memory
    keeps_workspaces = True
    # Without the flags that were TF32's before: reading these is an error once the new ones are set, which in turn show
    # what the old ones set.
    settings_read = (
        *(partial(_precision, "cuda", op) for op in _PRECISE),
        _C._get_cudnn_enabled,
        _C._get_cudnn_benchmark,
        _C._get_cudnn_deterministic,
        _C._get_cublas_allow_fp16_reduced_precision_reduction,
        _C._get_cublas_allow_bf16_reduced_precision_reduction,
        _C._get_cublas_allow_fp16_accumulation,
    )

    def random_state(self, device: torch.device) -> torch.Tensor:
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, device)

    def hides_draws(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """cuDNN's recurrent layers draw the masks between layers from a state that torch keeps on the device."""
        if name not in _RNNS or not torch.backends.cudnn.enabled:
            return False
        return bool(arguments["train"]) and arguments["dropout"] > 0 and arguments["num_layers"] > 1

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def mark(self, device: torch.device) -> Any:
        """An event in the queue."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def between(self, start: Any, end: Any) -> int:
        end.synchronize()
        return round(1e6 * float(start.elapsed_time(end)))

    def hold(self, device: torch.device, at_least: int = 0) -> None:
        """The queue waits meanwhile, a millisecond if not more: on an empty one, events around kernels that take less
        time than their launches (10 to 50 µs) tell when Python launched them. A nanosecond is two cycles at most.
        """
        with torch.cuda.device(device):
            torch.cuda._sleep(2 * max(at_least, 1_000_000))

    def to_read(self, device: torch.device, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Memory of its own, twice as large as the second-level cache."""
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 * 2**20
        return [torch.zeros(2 * cache, dtype=torch.uint8, device=device)]

    def roofline(self, device: torch.device, dtype: torch.dtype, convolution: bool) -> Roofline:
        tf32 = _precision("cuda", "conv" if convolution else "matmul") == "tf32"
        return roofline_of(torch.cuda.get_device_name(device), dtype, tf32)

    def measured(self, function: Callable[[], Any], device: torch.device) -> tuple[Any, int, int]:
        what = self._counted()
        before = self._begin(what, device)
        result = function()
        torch.cuda.synchronize(device)
        after = torch.cuda.memory_stats(device)
        return result, after.get(f"{what}.all.peak", 0) - before, after.get(f"{what}.all.current", 0) - before

    def measured_after(
        self, prepare: Callable[[], Any], function: Callable[[Any], Any], device: torch.device
    ) -> tuple[Any, int]:
        made = [prepare()]
        return self.measured(lambda: function(made.pop()), device)[:2]

    def measured_reserved(self, function: Callable[[], Any], device: torch.device) -> int:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        before = self._begin("reserved_bytes", device)
        function()
        torch.cuda.synchronize(device)
        return int(torch.cuda.memory_stats(device).get("reserved_bytes.all.peak", 0) - before)

    def window(self, device: torch.device) -> Window:
        return _StatisticsWindow(self, device)

    def _begin(self, what: str, device: torch.device) -> int:
        """The level. The allocator knows one peak for everybody: the caller's is lost, as ``measure_peak`` says."""
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_stats(device).get(f"{what}.all.current", 0))

    def _counted(self) -> str:
        """CUDA's own asynchronous allocator counts no requests."""
        native = torch.cuda.get_allocator_backend() == "native"
        return "requested_bytes" if native else "allocated_bytes"

    def free(self, device: torch.device) -> int:
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached

    def in_use(self) -> list[torch.device]:
        """Those that hold memory, or else the current one."""
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            return []
        found = [k for k in range(torch.cuda.device_count()) if torch.cuda.memory_allocated(k) > 0]
        return [torch.device("cuda", k) for k in found or [torch.cuda.current_device()]]

    def first_use(self, function: Callable[[], Any], device: torch.device) -> None:
        """Here, where forwards run, and in autograd's thread for the device, where backwards and second runs do: cuBLAS
        has a workspace for each thread's stream, and cuDNN's benchmark remembers for each thread.
        """
        function()
        anchor = torch.ones((), device=device, requires_grad=True)
        with torch.enable_grad():
            end: torch.Tensor = _InBackward.apply(function, anchor)
            end.backward()

    def warm_up(self, device: torch.device) -> None:
        def multiply() -> None:
            with torch.no_grad(), torch.autocast("cuda", enabled=False):
                x = torch.ones(16, 16, device=device, dtype=torch.float32)
                torch.addmm(x[0], torch.mm(x, x), x)  # cuBLAS and, for the sum, cuBLASLt

        with torch.cuda.device(device):
            self.first_use(multiply, device)


class _StatisticsWindow(Window):
    """By the allocator's statistics, whose peak it resets."""

    def __init__(self, kind: Cuda, device: torch.device) -> None:
        self.kind, self.device, self.what = kind, device, kind._counted()
        self.before = 0
        self.seen: tuple[int, int] | None = None  # at the mark

    def begin(self) -> None:
        self.before = self.kind._begin(self.what, self.device)

    def mark(self) -> None:
        now = torch.cuda.memory_stats(self.device)
        peak, level = now.get(f"{self.what}.all.peak", 0), now.get(f"{self.what}.all.current", 0)
        self.seen = max(0, peak - self.before), max(0, level - self.before)

    def close(self) -> tuple[int, int, int] | None:
        if self.seen is None:
            return None
        now = torch.cuda.memory_stats(self.device).get(f"{self.what}.all.current", 0)
        return *self.seen, max(0, now - self.before)


class _InBackward(torch.autograd.Function):
    """Calls a function when its backward runs, in the thread where it does."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[], Any], anchor: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        with torch.enable_grad():
            ctx.function()
        return None, None


KINDS: dict[str, Kind] = {kind.type: kind for kind in (Cpu(), Cuda())}
"""By the name that torch has for them; autocast is set for each."""

SETTINGS = tuple(read for kind in KINDS.values() for read in kind.settings_read)
"""Functions that read the settings of torch which change results, or what kernels allocate, on some device."""


def kind_of(device: torch.device) -> Kind:
    """The kind of ``device``; what has no memory (meta) counts as the CPU's."""
    return KINDS.get(device.type, KINDS["cpu"])


def default_device() -> str:
    """The name of the device that programs run on unless they are told where."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_in_use() -> torch.device:
    """The device that the program works on. Raises ``MeasureError`` where there are several."""
    used = next(found for kind in reversed(KINDS.values()) if (found := kind.in_use()))
    if len(used) > 1:
        raise MeasureError(f"there is memory on {', '.join(map(str, used))}: say which of them to measure (device=…)")
    return used[0]


def one_device(
    parameters: Iterable[tuple[str, torch.device]], others: Iterable[tuple[str, torch.device]] = ()
) -> torch.device:
    """The device of all ``parameters`` (names and devices) and of ``others``, which may lie on the CPU as well.

    Raises ``UnsupportedError``, by name, where there are two, or one of an unknown kind.
    """
    home: tuple[str, torch.device] | None = None
    for required, found in ((True, parameters), (False, others)):
        for name, device in found:
            elsewhere = not required and device.type == "cpu"
            if device.type == "meta" or elsewhere or (home and device == home[1]):
                continue
            if device.type not in KINDS:
                raise UnsupportedError(
                    f"{name} is on {device}, and plans can be made for {' and '.join(KINDS)}: move the model and the "
                    "sample there"
                )
            if home:
                raise UnsupportedError(
                    f"{home[0]} is on {home[1]} and {name} on {device}, and a plan is for one device: its memory is "
                    "counted as one. Plan the submodules of each device instead of the whole module"
                )
            home = name, device
    return home[1] if home else torch.device("cpu")
