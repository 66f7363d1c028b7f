"""Rooflines: the least time of an operation, from the memory bandwidth and the peak rate in a device's data sheet."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Roofline:
    """``bytes_per_ns``: bytes that a device moves in a nanosecond. ``flops_per_ns``: floating-point operations
    in a nanosecond, of matrix products.
    """

    bytes_per_ns: int
    flops_per_ns: int

    def time(self, flops: int, size: int) -> int:
        """Nanoseconds, at least 1, for ``flops`` operations that read and write ``size`` bytes."""
        return 1 + max(size // self.bytes_per_ns, flops // self.flops_per_ns)


UNKNOWN = Roofline(2_000, 200_000)
"""For devices that are not listed. Only the ratio decides plans; this is the ratio of an accelerator."""

# TFLOPS of matrix products without sparsity, by precision: NVIDIA's data sheets of the A100 (June 2021), the H100
# (March 2023; the NVL's, 2024) and the H200 (November 2023). Theirs for tensor cores with sparsity are halved. An H100
# (SXM) was measured at 266 operations a byte in bfloat16; these figures say 295.
_A100 = {"half": 312.0, "tf32": 156.0, "single": 19.5, "double": 19.5}
_H100 = {"half": 989.4, "tf32": 494.7, "single": 66.9, "double": 66.9}
_H100_NVL = {"half": 835.0, "tf32": 417.0, "single": 60.0, "double": 60.0}
_H100_PCIE = {"half": 756.0, "tf32": 378.0, "single": 51.0, "double": 51.0}

# (pattern of the driver's name of a device, memory bandwidth in GB/s, TFLOPS); the first match counts.
_LISTED: tuple[tuple[str, int, dict[str, float]], ...] = (
    (r"\bH200\b", 4_800, _H100),
    (r"\bH100 PCIe\b", 2_000, _H100_PCIE),
    (r"\bH100 NVL\b", 3_900, _H100_NVL),
    (r"\bH100\b", 3_350, _H100),
    (r"\bA100.*SXM.*80GB", 2_039, _A100),
    (r"\bA100.*80GB", 1_935, _A100),
    (r"\bA100\b", 1_555, _A100),
)


def roofline_of(name: str, dtype: torch.dtype, tf32: bool) -> Roofline:
    """The roofline of the device called ``name``, for results of ``dtype``.

    ``tf32``: whether products of float32 are computed in TF32. ``UNKNOWN`` for devices that are not listed.
    """
    kind = "half" if dtype.itemsize <= 2 else "tf32" if tf32 else "single"
    if dtype in (torch.float64, torch.complex128):
        kind = "double"
    for pattern, bandwidth, tflops in _LISTED:
        if re.search(pattern, name):
            return Roofline(bandwidth, round(1_000 * tflops[kind]))
    return UNKNOWN
