"""The CPU and the machine's memory as a kind of device."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rkgb.device.kind import PRECISE, Kind, Setting, Timeline, setting_of_precision
from rkgb.device.profiled import ProfiledTimeline
from rkgb.device.roofline import UNKNOWN, Roofline
from rkgb.errors import MeasureError

_C: Any = torch._C
_GROUP = "/sys/fs/cgroup"  # Linux's control group of a container; its memory.max is a number or "max"


_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")  # Linux's: a folder for each, whose file "size" is such as "512K"
_MOST_READ = 256 * 2**20  # in place of 64 MiB, with which steps took up to 4 % longer than planned beside 480 MiB


def twice_the_largest_cache(folder: Path = _CACHES) -> int:
    """Bytes that push all else out of the processor's caches; ``_MOST_READ`` at most, and where none is known."""
    sizes = [int(found[1]) << 10 for f in folder.glob("index*/size") if (found := re.match(r"(\d+)K", f.read_text()))]
    return min(_MOST_READ, 2 * max(sizes, default=_MOST_READ))


def _figures(path: str) -> dict[str, int]:
    """A file of lines such as "name 12": first word -> second."""
    with open(path, encoding="ascii") as lines:
        return {words[0]: int(words[1]) for words in map(str.split, lines)}


class Cpu(Kind):
    """The CPU. Its allocator reports the bytes that were requested, to torch's profiler."""

    type = "cpu"
    scalars = 64
    long = 5e7
    caches = twice_the_largest_cache()
    counts_states = True
    keeps_workspaces = False
    settings = (
        Setting(torch.get_num_threads),
        Setting(_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
        setting_of_precision("generic", "all"),
        *(setting_of_precision("mkldnn", op) for op in PRECISE),
    )

    def random_state(self, device: torch.device) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)

    def measured_reserved(self, function: Callable[[], Any], device: torch.device) -> int:
        raise MeasureError(
            f"reserved memory was asked for on {device}, whose allocator keeps none: what is released goes back to the "
            "system. Measure without reserved=True, or give the device of the model"
        )

    def timeline(self, device: torch.device) -> Timeline:
        return ProfiledTimeline()

    def is_watched(self) -> bool:
        return torch._C._autograd._profiler_enabled()

    def total(self, device: torch.device) -> int:
        """Bytes of the machine, or of the container if these are fewer."""
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        with contextlib.suppress(OSError, ValueError):
            found = min(found, int(Path(_GROUP, "memory.max").read_text("ascii")))
        return found

    def free(self, device: torch.device) -> int:
        """Bytes available in the machine, or in the container if these are fewer."""
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        with contextlib.suppress(OSError, LookupError):
            available = 1024 * _figures("/proc/meminfo")["MemAvailable:"]
        with contextlib.suppress(OSError, ValueError, LookupError):
            limit, used = (int(Path(_GROUP, f"memory.{what}").read_text("ascii")) for what in ("max", "current"))
            available = min(available, max(0, limit - used + _figures(f"{_GROUP}/memory.stat")["inactive_file"]))
        return available

    def in_use(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def beside_a_rerun(self, touched: int) -> int:
        """What slots, hooks and a second run take where their code is in the caches (13 microseconds in
        ``benchmarks/executor.py``), and where the kernels between have pushed it out (58 to 107 microseconds in nine
        models of ``benchmarks/peers_run/models.py``), as those of a step of 64 MiB do.
        """
        return int(13_000 + 62_000 * min(1.0, touched / 2**26))

    def model(self, device: torch.device) -> str:
        """The processor's name, and the instruction set that torch's kernels use."""
        name = platform.processor() or platform.machine()
        with contextlib.suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
            name = next((line.split(":", 1)[-1].strip() for line in lines if line.startswith("model name")), name)
        return f"{name} {torch.backends.cpu.get_cpu_capability()}"

    def roofline(self, device: torch.device, dtype: torch.dtype, convolution: bool) -> Roofline:
        return UNKNOWN
