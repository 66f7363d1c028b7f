"""transformers' Trainer under a budget: ``Trainer(…, callbacks=[RockmateCallback("8 GiB")])``."""

from __future__ import annotations

import inspect
from typing import Any

from rockmate.errors import InputError
from rockmate.integrations.meter import Meter, missing
from rockmate.signed import called_right

try:
    from transformers.trainer_callback import CallbackHandler, TrainerCallback
except ModuleNotFoundError as error:
    raise missing("transformers", error) from error


class RockmateCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Attaches the Trainer's model when training begins, and logs figures beside the loss.

    They go through ``Trainer.log``'s own loggers (TensorBoard, W&B, the history). What the Trainer moves to the device
    within a step counts in the measured peak. ``meter.handle`` is what ``attach`` returned.

    Args:
        budget: Bytes or text, as for ``rockmate.attach``.
        plain_steps: How many steps are timed without a plan, as for ``Meter``.
        options: What else ``rockmate.attach`` takes.

    Raises:
        BudgetError: The budget is no amount of memory.
        InputError: ``plain_steps`` is no number of steps, or something else than the Trainer calls this.
    """

    @called_right
    def __init__(self, budget: int | float | str, *, plain_steps: int = 0, **options: Any) -> None:
        self.meter = Meter(budget, plain_steps=plain_steps, **options)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **others: Any) -> None:
        """Attach the model."""
        _go_first(self)
        self.meter.attach(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Begin to measure."""
        self.meter.begin()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The backward is over."""
        self.meter.end()

    on_substep_end = on_pre_optimizer_step  # of several batches that make a step, the first counts

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **others: Any) -> None:
        """Add the figures to what is logged of training."""
        if logs is not None and "loss" in logs:
            found = self.meter.figures()
            for told in (logs, *state.log_history[-1:]):  # the Trainer has copied what it logs to its history
                told.update(found)


def _go_first(callback: RockmateCallback) -> None:
    """Before the loggers, which would not see what a callback behind them adds. No event says who calls."""
    frame = inspect.currentframe()
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            handler.callbacks.remove(callback)
            handler.callbacks.insert(0, callback)
            return
        frame = frame.f_back
    raise InputError("RockmateCallback is for transformers' Trainer, and something else called it: use rockmate.attach")
