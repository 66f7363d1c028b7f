"""Section ``versions``: what runs here, and the most that the device copies and multiplies."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from gpu_run.context import Context

QUERY = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem", "--format=csv,noheader")


def run(ctx: Context) -> None:
    """Versions first: they cost nothing."""
    for what, value in _versions(ctx).items():
        ctx.emit(case=what, value=str(value))
    cases: dict[str, Callable[[], None]] = {"copy": lambda: _copy(ctx)}
    for name, dtype, precision in (
        ("bfloat16", torch.bfloat16, "highest"),
        ("tf32", torch.float32, "high"),
        ("float32", torch.float32, "highest"),
    ):
        cases[name] = lambda name=name, dtype=dtype, precision=precision: _product(ctx, name, dtype, precision)
    ctx.run_each(cases, 2)


def _versions(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "built for": getattr(torch.version, ctx.device.type, None) or "the CPU",
        "cuDNN": torch.backends.cudnn.version(),
        "device": ctx.device,
    }
    if hasattr(ctx.api, "get_device_properties"):
        properties = ctx.api.get_device_properties(ctx.device)
        found["name"] = properties.name
        found["memory"] = properties.total_memory
        found["multiprocessors"] = getattr(properties, "multi_processor_count", None)
        found["second-level cache"] = getattr(properties, "L2_cache_size", None)
        try:
            said = subprocess.run(QUERY, capture_output=True, text=True, timeout=10, check=False)
            found["nvidia-smi"] = said.stdout.strip() or said.stderr.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            found["nvidia-smi"] = error
    return found


def _copy(ctx: Context) -> None:
    """Counts the bytes that are read and those that are written."""
    source = torch.randn((2**20 if ctx.dry else 2**30), device=ctx.device)
    target = torch.empty_like(source)
    target.copy_(source)
    time = ctx.times({"copy": lambda: target.copy_(source)}, 10)["copy"]
    ctx.emit(case="copy, read and written", value=f"{2 * source.nbytes / max(1, time):,.0f} GB/s", time_ns=time)


def _product(ctx: Context, name: str, dtype: torch.dtype, precision: str) -> None:
    """Of random matrices: ones take less power, and so less time."""
    n = 64 if ctx.dry else 8192
    a, b = (torch.randn(n, n, device=ctx.device).to(dtype) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        for _ in range(3):
            a @ b
        time = ctx.times({name: lambda: a @ b}, 10)[name]
    finally:
        torch.set_float32_matmul_precision(before)
    ctx.emit(case=f"matrix product, {name}", value=f"{2 * n**3 / max(1, time) / 1e3:,.2f} TFLOP/s", time_ns=time)
