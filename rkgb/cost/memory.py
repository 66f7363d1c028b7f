"""Measures memory: the most bytes that are allocated at once while a function runs, as the allocator reports them.

How the allocator is asked depends on the device (``rkgb/device/kind.py``).
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from rkgb.device import device_in_use, kind_of
from rkgb.device.kind import Timeline
from rkgb.errors import MeasureError, PlanWanted
from rkgb.storages import storage_key
from rkgb.warn import warn


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage of ``tensor``, all of it if ``tensor`` is a view; of a sparse one, indices and values."""
    if tensor.layout == torch.sparse_coo:
        return storage_bytes(tensor._indices()) + storage_bytes(tensor._values())
    return tensor.untyped_storage().nbytes()


def bytes_by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Storage (``storage_key``) -> bytes, for the distinct memories that ``tensors`` lie in."""
    return {storage_key(t): storage_bytes(t) for t in tensors}


_MEASURING = threading.Lock()
_measurers: list[int] = []  # the thread that is measuring, if any
_PATIENCE = 60.0  # seconds that another thread waits until it is done


_PLANS_WITHIN = (
    "memory is being measured already, so that no plan can be made meanwhile for a new kind of call (other shapes; "
    "gradients that are there, or not, when the call begins). Call the function once before, just as it will be "
    "measured, and after calls of other sizes"
)


def is_measuring() -> bool:
    return threading.get_ident() in _measurers


def refuse_within_measurements() -> None:
    """Raise ``PlanWanted`` if this thread is measuring: memory that planning takes would be counted."""
    if is_measuring():
        raise PlanWanted(_PLANS_WITHIN)


@contextlib.contextmanager
def _measuring(device: torch.device) -> Iterator[None]:
    """Measure once at a time. A second measurement would end the counting of the first, whose peak would be too low."""
    if is_measuring():
        raise MeasureError(
            "memory is being measured already, and a second measurement would end the first: leave one of them out"
        )
    if not _MEASURING.acquire(timeout=_PATIENCE):
        raise MeasureError("memory is being measured already, by another thread: wait until it is done")
    _measurers.append(threading.get_ident())
    try:
        for end in give_way:
            end()
        if kind_of(device).is_watched():
            warn(
                "the running profiler session ends: memory is measured by another one. Start the profiler when plans "
                "are made, after a first call of each kind",
                RuntimeWarning,
            )
        yield
    finally:
        _measurers.clear()
        _MEASURING.release()


give_way: list[Callable[[], None]] = []
"""Are called before memory is measured: what records it meanwhile ends."""


def measure_memory(function: Callable[[], Any], device: torch.device) -> tuple[Any, int, int]:
    """(result, peak, net) of ``function``: bytes above the level at the call, at the peak and at the end.

    Raises ``MeasureError`` within another measurement.
    """
    result, ((peak, net),) = measure_phases([lambda _: function()], device)
    return result, peak, net


def measure_phases(phases: Sequence[Callable[[Any], Any]], device: torch.device) -> tuple[Any, list[tuple[int, int]]]:
    """Run ``phases`` in turn, each on the result of the one before, the first on None: the last result, and of each
    phase the bytes above the level at its begin, at the most and at its end.

    Memory that one phase allocates and another releases is subtracted; two calls of ``measure_memory`` would not see
    this on the CPU. Raises ``MeasureError`` within another measurement.
    """
    results: list[Any] = [None]  # what a phase gets is held by nobody else
    with _measuring(device):
        timeline = kind_of(device).timeline(device)
        try:
            for phase in phases:
                timeline.mark()
                results.append(phase(results.pop()))
            timeline.mark()
        finally:
            moments = timeline.close()
    assert moments is not None, "every mark was recorded"
    return results.pop(), [(a.peak - a.level, b.level - a.level) for a, b in itertools.pairwise(moments)]


def timeline(device: torch.device) -> Timeline | None:
    """A ``Timeline`` on the allocator of ``device``; None during a measurement or a session of torch's profiler."""
    return None if _measurers or kind_of(device).is_watched() else kind_of(device).timeline(device)


def measure_peak(
    function: Callable[[], Any], device: torch.device | str | torch.nn.Module | None = None, *, reserved: bool = False
) -> int:
    """The most bytes that ``function`` allocates at once above the level at the call.

    What ``rockmate.measure_peak`` says of arguments and results holds. Raises ``PlanWanted`` where a plan would have to
    be made, and ``MeasureError`` as that does.
    """
    check_function(function)
    gc.collect()
    where = _where(device)
    if not reserved:
        return measure_memory(function, where)[1]
    with _measuring(where):
        return kind_of(where).measured_reserved(function, where)


@contextlib.contextmanager
def measured_moments(device: torch.device | str | torch.nn.Module | None = None) -> Iterator[Timeline]:
    """An open ``Timeline``, which the caller closes; what ``measure_peak`` says of ``device`` and of errors holds."""
    where = _where(device)
    with _measuring(where):
        if kind_of(where).is_watched():
            raise MeasureError("a profiler session is open, and memory is measured by one: end it before")
        yield kind_of(where).timeline(where)


def _where(device: torch.device | str | torch.nn.Module | None) -> torch.device:
    if isinstance(device, torch.nn.Module):
        return next((p.device for p in device.parameters()), torch.device("cpu"))
    if device is None:
        return device_in_use()
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        given = repr(device) if isinstance(device, str) else f"a {type(device).__name__}"
        raise MeasureError(
            f"device={given} is no device: give the name of one, or a module that lies on it. What is measured is a "
            "function without arguments"
        ) from None


def check_function(function: object) -> None:
    """Raise ``MeasureError`` for what cannot be called without arguments."""
    runs = callable(function) and not isinstance(function, torch.nn.Module)
    if runs:
        with contextlib.suppress(ValueError):  # functions in C have no signature
            try:
                inspect.signature(function).bind()  # type: ignore[arg-type]
            except TypeError:
                runs = False
    if not runs:
        what = f"a {type(function).__name__}" if isinstance(function, torch.nn.Module) else repr(function)
        raise MeasureError(
            f"{what} cannot be measured: give a function without arguments that runs a step, such as lambda: step(x)"
        )
