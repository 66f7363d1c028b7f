"""Times of ``costs="flops"`` by device, and the gradients of runs that are timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rkgb.cost.piece import gradient, randomized
from rkgb.device import Cpu, Cuda
from rkgb.device.roofline import UNKNOWN, roofline_of

META = torch.device("meta")


def test_rooflines_of_listed_devices() -> None:
    h100 = roofline_of("NVIDIA H100 80GB HBM3", torch.bfloat16, tf32=False)
    assert 0.8 < h100.flops_per_ns / h100.bytes_per_ns / 266 < 1.2  # as was measured
    assert roofline_of("NVIDIA H200", torch.bfloat16, tf32=False).bytes_per_ns == 4_800
    assert roofline_of("NVIDIA GH200 480GB", torch.bfloat16, tf32=False) == UNKNOWN
    assert roofline_of("NVIDIA A100 80GB PCIe", torch.float16, tf32=False).bytes_per_ns == 1_935
    assert roofline_of("NVIDIA A100-SXM4-40GB", torch.float32, tf32=False).flops_per_ns == 19_500
    by_type = [roofline_of("NVIDIA H100 80GB HBM3", torch.float32, tf32).flops_per_ns for tf32 in (True, False)]
    assert h100.flops_per_ns > by_type[0] > by_type[1]


def test_the_precision_in_force_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the driver only the device's name is asked; TF32 is on for convolutions unless it is set off."""
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    product, convolution = (Cuda().roofline(META, torch.float32, kind).flops_per_ns for kind in (False, True))
    assert (product, convolution) == (66_900, 494_700)


def test_times_on_the_cpu_are_what_they_were() -> None:
    line = Cpu().roofline(torch.device("cpu"), torch.float32, convolution=False)
    assert line.time(0, 8_000_000) == 4_001
    assert line.time(8_000_000, 0) == 41


# ---------------------------------------------------------------------------------------- values of gradients


@pytest.mark.parametrize("stride", [None, (1, 4), (0, 1), (0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_gradients_of_timed_runs_are_random(stride: Any, dtype: torch.dtype) -> None:
    """On a GPU matrix products of ones take less power, and so less time."""
    ones = gradient(torch.Size((4, 3)), stride, dtype, torch.device("cpu"))
    form = ones.stride()
    filled = randomized(ones)
    assert filled.stride() == form
    values = set(filled.flatten().tolist())
    assert 1.0 not in values
    assert len(values) == {(0, 1): 3, (0, 0): 1}.get(stride, 12) or dtype == torch.bfloat16
