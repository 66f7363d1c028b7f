"""Measures a step under a plan: its peak, or the memory of each operation. What needs a plan is planned first."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rkgb.cost import memory
from rkgb.errors import MeasureError, PlanWanted
from rockmate.run.watch import MeasuredStep, Watch
from rockmate.signed import called_right
from rockmate.tell import LOG, be_heard

T = TypeVar("T")

MOST_RUNS = 4
"""Times that what is measured runs before, at most, so that its calls have plans."""


@called_right
def measure_peak(
    function: Callable[[], Any], device: torch.device | str | torch.nn.Module | None = None, *, reserved: bool = False
) -> int:
    """The most bytes that ``function`` allocates at once above the level at the call.

    Call the function once before: the first use of a kernel allocates workspaces that stay. No plan can be made while
    memory is measured. So where the function calls a planned model in a new way (of another shape), it is left there,
    runs once as a whole, so that the plan is made, and is measured the next time; that is said. On CUDA, the requests
    of all threads and streams are counted, as in budgets. The allocator's blocks are larger than the requests;
    ``torch.cuda.max_memory_allocated`` counts blocks. This function resets its peak.

    Args:
        function: A training step, or any other function without arguments.
        device: A device, or a module whose parameters lie on it; by default the CUDA device that holds memory, or else
            the CPU.
        reserved: Instead, the bytes that the allocator reserves on the device for the function, after it has released
            everything unused. Other programs cannot use these.

    Raises:
        MeasureError: Another plan would have to be made, another measurement runs, several devices hold memory and none
            is given, or an argument is no function or no device.
    """
    return _planned_first(function, lambda: memory.measure_peak(function, device, reserved=reserved))


@called_right
def measure_step(step: Callable[[], Any], device: torch.device | str | None = None) -> MeasuredStep:
    """Run ``step``, one forward of a planned model and its backward, and measure the memory of each operation.

    ``rk.plan.plot_memory(measured=rockmate.measure_step(step))`` draws it beside what the plan predicts. Call ``step``
    once or twice before, just as it will be measured; where a plan has to be made, what ``measure_peak`` says holds.
    The marks cost time, memory they do not.

    Args:
        step: One forward under a plan and its backward, without arguments.
        device: By default that of the model, if it is the only one that holds memory.

    Raises:
        MeasureError: As ``measure_peak``, or ``step`` is something else.
    """
    return _planned_first(step, lambda: _measured_step(step, device))


def _measured_step(step: Callable[[], Any], device: torch.device | str | None) -> MeasuredStep:
    memory.check_function(step)
    gc.collect()
    with memory.measured_moments(device) as timeline:
        watch = Watch.current = Watch(timeline)
        try:
            step()
        finally:
            Watch.current = None
            moments = timeline.close()
    if moments is None:
        raise MeasureError("the recording of the allocator is not complete: another profiler ran within the step")
    return watch.measured(moments)


def _planned_first(function: Callable[[], Any], measured: Callable[[], T]) -> T:
    """What is ``measured`` of ``function``, which runs as it is before if a plan has to be made for it.

    That may take more than one run: one to see that the budget binds, the next to be planned.
    """
    runs = 0
    while True:
        try:
            return measured()
        except PlanWanted as error:  # what follows is out of it, so that no frame of the broken step holds tensors
            if runs == MOST_RUNS:
                raise error.with_traceback(None) from None
        be_heard()
        LOG.info(
            "what is measured calls the model in a way that has no plan yet, and planning takes memory itself: it runs "
            "once to be planned, then again to be measured"
        )
        function()
        runs += 1
