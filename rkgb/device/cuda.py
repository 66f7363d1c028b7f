"""GPUs as a kind of device. No other file names CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from rkgb.device.kind import PRECISE, Kind, Moment, Setting, Timeline, precision, setting_of_precision
from rkgb.device.roofline import Roofline, roofline_of

_C: Any = torch._C
_RNNS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


_FLAGS = (
    "cudnn_enabled",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation",
)


def _write(name: str, value: Any) -> None:
    getattr(_C, name)(*value if isinstance(value, tuple) else (value,))


class Cuda(Kind):
    """NVIDIA's and AMD's GPUs.

    Memory is counted in bytes *requested* of the caching allocator. Its blocks are larger: they are rounded up to 512
    bytes, and one above 1 MiB may have up to 1 MiB more, depending on which blocks are free. Only the requests follow
    from the program alone, so only they can be planned to the byte.
    """

    type = "cuda"
    # A reduction of many numbers to one takes 4 or 8 bytes of temporary memory for each thread block (ATen's
    # Reduce.cuh). There are some thousand blocks, or above 2 ** 27 numbers one for each 2 ** 17 of them.
    scalars = 65_536
    # All of them: a matrix product whose inner dimension reaches some length takes memory for partial products, a sum
    # for partial sums, and attention pads a mask whose length is no multiple of 16.
    choosing = ("",)
    counts_states = False  # a seed and an offset, in host memory
    keeps_workspaces = True
    launches = True
    # The old flags of TF32 are left out: reading them is an error once the new ones are set, and the new ones show what
    # the old ones set.
    settings = (
        *(setting_of_precision("cuda", op) for op in PRECISE),
        *(Setting(getattr(_C, f"_get_{name}"), partial(_write, f"_set_{name}")) for name in _FLAGS),
    )

    def available(self) -> bool:
        return torch.cuda.is_available()

    def random_state(self, device: torch.device) -> torch.Tensor:
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, device)

    def hides_draws(self, name: str, arguments: Callable[[], Mapping[str, Any]]) -> bool:
        """Recurrent layers of cuDNN draw dropout masks from a state that torch keeps on the device."""
        if name not in _RNNS or not torch.backends.cudnn.enabled:
            return False
        given = arguments()
        return bool(given["train"]) and given["dropout"] > 0 and given["num_layers"] > 1

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def mark(self, device: torch.device) -> Any:
        """An event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def between(self, start: Any, end: Any) -> int:
        end.synchronize()
        return round(1e6 * float(start.elapsed_time(end)))

    def hold(self, device: torch.device, at_least: int = 0) -> None:
        """Delay the stream for ``at_least`` nanoseconds, and for a millisecond at least.

        Most kernels are shorter than their launches (10 to 50 µs). On an empty stream, events around them would measure
        the launches. A nanosecond has at most two cycles.
        """
        with torch.cuda.device(device):
            torch.cuda._sleep(2 * max(at_least, 1_000_000))

    def to_read(self, device: torch.device) -> list[torch.Tensor]:
        """One tensor that is twice as large as the second-level cache."""
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 * 2**20
        return [torch.zeros(2 * cache, dtype=torch.uint8, device=device)]

    def model(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def roofline(self, device: torch.device, dtype: torch.dtype, convolution: bool) -> Roofline:
        tf32 = precision("cuda", "conv" if convolution else "matmul") == "tf32"
        return roofline_of(torch.cuda.get_device_name(device), dtype, tf32)

    def measured_reserved(self, function: Callable[[], Any], device: torch.device) -> int:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        before = self._begin("reserved_bytes", device)
        function()
        torch.cuda.synchronize(device)
        return int(torch.cuda.memory_stats(device).get("reserved_bytes.all.peak", 0) - before)

    def timeline(self, device: torch.device) -> Timeline:
        return _StatisticsTimeline(self, device)

    def _begin(self, what: str, device: torch.device) -> int:
        """The level in bytes, after the allocator's only peak was reset; ``measure_peak`` documents that it is lost."""
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_stats(device).get(f"{what}.all.current", 0))

    def _counted(self) -> str:
        """The statistic to read: CUDA's asynchronous allocator counts no requests, only blocks."""
        native = torch.cuda.get_allocator_backend() == "native"
        return "requested_bytes" if native else "allocated_bytes"

    def free(self, device: torch.device) -> int:
        """What the driver has, and what the allocator holds without use; but for parts of segments in use, which it
        cannot give back.
        """
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached - sum(stuck for stuck, _ in self._left_over(device))

    def total(self, device: torch.device) -> int:
        return torch.cuda.mem_get_info(device)[1]

    def slack(self, device: torch.device) -> int:
        return sum(stuck + rounding for stuck, rounding in self._left_over(device))

    def _left_over(self, device: torch.device) -> list[tuple[int, int]]:
        """Of each segment: bytes beside its blocks in use, and bytes of these that nobody asked for."""
        at = torch.cuda.current_device() if device.index is None else device.index
        segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == at and s["allocated_size"]]
        return [
            (
                0 if s["is_expandable"] else s["total_size"] - s["allocated_size"],
                s["allocated_size"] - s["requested_size"],
            )
            for s in segments
        ]

    def in_use(self) -> list[torch.device]:
        """The GPUs on which the program holds memory, or else the current one."""
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            return []
        used = [k for k in range(torch.cuda.device_count()) if torch.cuda.memory_allocated(k) > 0]
        return [torch.device("cuda", k) for k in used or [torch.cuda.current_device()]]

    def first_use(self, function: Callable[[], Any], device: torch.device) -> None:
        """Run ``function`` in this thread, in which forwards run, and in autograd's thread for the device, in which
        backwards and recomputes run. cuBLAS has a workspace, and cuDNN's benchmark a memory, for each thread.
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


class _StatisticsTimeline(Timeline):
    """A timeline by the allocator's statistics; it resets their peak at each moment."""

    def __init__(self, kind: Cuda, device: torch.device) -> None:
        self.kind, self.device, self.what = kind, device, kind._counted()
        self.marks = 0
        self.found: list[list[int]] = []  # of each moment its level, and the peak
        self.beside = 0  # bytes that pauses have left
        self.paused = False

    def mark(self) -> None:
        torch.cuda.synchronize(self.device)
        self._see_peak()
        level = self.kind._begin(self.what, self.device) - self.beside
        self.found.append([level, level])
        self.marks += 1

    def pause(self) -> None:
        self.mark()
        self.paused = True

    def resume(self) -> None:
        level = self.kind._begin(self.what, self.device) - self.beside
        self.beside += level - self.found[-1][0]
        self.paused = False

    def _see_peak(self) -> None:
        if self.found and not self.paused:
            peak = int(torch.cuda.memory_stats(self.device).get(f"{self.what}.all.peak", 0)) - self.beside
            self.found[-1][1] = max(self.found[-1][1], peak)

    def close(self) -> list[Moment] | None:
        self._see_peak()
        first = self.found[0][0] if self.found else 0
        return [Moment(level - first, peak - first, max(0, level - first)) for level, peak in self.found]


class _InBackward(torch.autograd.Function):
    """Its backward calls a function, and so in autograd's thread."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[], Any], anchor: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        with torch.enable_grad():
            ctx.function()
        return None, None
