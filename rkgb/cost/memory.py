"""Exact allocator measurements: the largest sum of bytes allocated while a function runs.

What an allocator reports, and how it is asked, is its device's (``rkgb/device/__init__.py``).
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from rkgb.device import device_in_use, kind_of
from rkgb.device.kind import Timeline, Window
from rkgb.errors import MeasureError
from rkgb.storages import storage_key


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the memory of ``tensor``, of which it may be a part; of a sparse one, indices and values."""
    if tensor.layout == torch.sparse_coo:
        return storage_bytes(tensor._indices()) + storage_bytes(tensor._values())
    return tensor.untyped_storage().nbytes()


def bytes_by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Storage (``storage_key``) -> bytes, for the distinct memories that ``tensors`` lie in."""
    return {storage_key(t): storage_bytes(t) for t in tensors}


_MEASURING = threading.Lock()
_measurers: list[int] = []  # the thread that measures
_PATIENCE = 60.0  # seconds that another thread waits for it


_WITHIN = (
    "memory is being measured already, so that no plan can be made meanwhile for a new kind of call (other shapes; "
    "gradients that are there, or not, when the call begins). Call the function once before, just as it will be "
    "measured"
)


def refuse_within_measurements() -> None:
    """Raise ``MeasureError`` where this thread measures already: what planning takes would count."""
    if threading.get_ident() in _measurers:
        raise MeasureError(_WITHIN)


@contextlib.contextmanager
def _measuring(device: torch.device) -> Iterator[None]:
    """One measurement at a time: a second one would end what the first one counts, which then comes out too small."""
    refuse_within_measurements()
    if not _MEASURING.acquire(timeout=_PATIENCE):
        raise MeasureError(_WITHIN)
    _measurers.append(threading.get_ident())
    try:
        kind_of(device).before_measuring()
        yield
    finally:
        _measurers.clear()
        _MEASURING.release()


def measure_memory(function: Callable[[], Any], device: torch.device) -> tuple[Any, int, int]:
    """(result, peak, net): bytes above the level at the call, at the worst moment and at the end."""
    with _measuring(device):
        return kind_of(device).measured(function, device)


def measure_after(prepare: Callable[[], Any], function: Callable[[Any], Any], device: torch.device) -> tuple[Any, int]:
    """(result, peak) of ``function(prepare())``: bytes above the level between the two, at the worst moment of the
    second.

    What ``prepare`` allocated and ``function`` releases counts, which ``measure_memory`` cannot see on the CPU.
    """
    with _measuring(device):
        return kind_of(device).measured_after(prepare, function, device)


def window(device: torch.device) -> Window | None:
    """What other people's code allocates on ``device`` from now on; None while something is measured, or profiled."""
    return None if _measurers else kind_of(device).window(device)


def timeline(device: torch.device) -> Timeline | None:
    """As ``window``, for any number of moments."""
    return None if _measurers else kind_of(device).timeline(device)


def measure_peak(
    function: Callable[[], Any], device: torch.device | str | torch.nn.Module | None = None, *, reserved: bool = False
) -> int:
    """Bytes that ``function`` allocates above the level at the call, at its worst moment.

    ``device``: where to look, or a module whose parameters lie there; by default the CUDA device that holds memory if
    there is one (if there are several, ``MeasureError``), else the CPU.
    Call the function once before: the first use of a kernel allocates workspaces that stay, and a plan cannot be made
    while it is measured (``MeasureError``).

    On CUDA these are the bytes that were asked for, of all threads and streams, as budgets are. Blocks that the
    allocator hands out are larger: ``torch.cuda.max_memory_allocated``, whose peak this resets, says by how much.
    ``reserved=True``: what the allocator takes from the device for it, unused parts of its blocks included, if it
    begins with none that are unused; what other programs cannot have meanwhile.
    """
    gc.collect()
    where = _where(device)
    if not reserved:
        return measure_memory(function, where)[1]
    with _measuring(where):
        return kind_of(where).measured_reserved(function, where)


def _where(device: torch.device | str | torch.nn.Module | None) -> torch.device:
    if isinstance(device, torch.nn.Module):
        return next((p.device for p in device.parameters()), torch.device("cpu"))
    return device_in_use() if device is None else torch.device(device)
