"""Lightning under a budget: ``lightning.Trainer(…, callbacks=[RockmateCallback("8 GiB")])``."""

from __future__ import annotations

from typing import Any

from rockmate.errors import InputError
from rockmate.integrations.meter import Meter, missing
from rockmate.signed import called_right

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as error:
    raise missing("lightning", error) from error


class RockmateCallback(Callback):  # type: ignore[misc,unused-ignore]
    """Attaches the module, or a part of it, when training begins, and logs figures.

    They go through ``log_dict``. What a step allocates beside the part counts in the measured peak. ``meter.handle`` is
    what ``attach`` returned.

    Args:
        budget: Bytes or text, as for ``rockmate.attach``.
        part: The name of what ``training_step`` calls, such as "net" for ``self.net(x)``; by default the module itself,
            for ``self(x)``.
        plain_steps: How many steps are timed without a plan, as for ``Meter``.
        options: What else ``rockmate.attach`` takes.

    Raises:
        BudgetError: The budget is no amount of memory.
        InputError: ``plain_steps`` is no number of steps, or no call of the part came in the first step.
    """

    @called_right
    def __init__(self, budget: int | float | str, *, part: str = "", plain_steps: int = 0, **options: Any) -> None:
        self.part = part
        self.meter = Meter(budget, plain_steps=plain_steps, **options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the part."""
        if not isinstance(self.part, str):
            raise InputError(
                f"part={self.part!r} is no name: give the one module that training_step calls. Where it calls several, "
                "call them in the forward of one, or rockmate.attach([image, text], budget) in configure_model"
            )
        try:
            model = pl_module.get_submodule(self.part)
        except AttributeError as error:
            raise InputError(f"part={self.part!r} is no part of {type(pl_module).__name__}: {error}") from None
        self.meter.attach(model)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to measure."""
        self.meter.begin()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """The backward is over."""
        self.meter.end()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the figures."""
        handle = self.meter.handle
        if handle is not None and not handle.called:
            name = type(pl_module).__name__
            what = f"{name}.{self.part}" if self.part else name
            raise InputError(
                f"training_step did not call {what} itself, so that no plan is made for it: name what it calls, as in "
                'RockmateCallback(budget, part="net"), or move what it computes into forward, and call self(...)'
            )
        pl_module.log_dict(self.meter.figures())

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Nothing is measured any more."""
        self.meter.drop()
