"""The device that a model is trained on: what its memory is for, and a budget that follows it."""

from __future__ import annotations

import itertools
import weakref
from abc import abstractmethod
from collections.abc import Iterable

import torch

from rockmate.calls.front import Front
from rockmate.calls.terms import Terms
from rockmate.errors import InfeasibleBudgetError, InputError
from rockmate.memory import Memory, StepBytes, memory_of
from rockmate.optimizers import local_bytes
from rockmate.planning.planner import lacks_gradient


class OnDevice(Front):
    """The plans of a model, on the device where it lies."""

    def __init__(self, model: torch.nn.Module, terms: Terms) -> None:
        super().__init__(type(model).__name__, terms)
        self._model = weakref.ref(model)
        self._sizes: list[tuple[weakref.ref[torch.Tensor], int]] = []  # parameters and their bytes, see ``made_bytes``

    @property
    def model(self) -> torch.nn.Module:
        """The model. Raises ``InputError`` when it is gone."""
        model = self._model()
        if model is None:
            raise InputError("the model that this plan was for is gone")
        return model

    def bytes_of_missing_gradients(self) -> dict[str, int]:
        """As in ``Front``."""
        return {name: p.nbytes for name, p in self.model.named_parameters() if lacks_gradient(p)}

    @property
    def known_model(self) -> torch.nn.Module | None:
        """The model; None when it is gone."""
        return self._model()

    def made_bytes(self) -> int:
        """Bytes of the gradients that are there. It is asked in each step, and to go through a model takes long."""
        found = [(ref(), size) for ref, size in self._sizes]
        if not found or any(p is None for p, _ in found):
            found = [] if (model := self._model()) is None else [(p, local_bytes(p)) for p in model.parameters()]
            self._sizes = [(weakref.ref(p), size) for p, size in found if p is not None]
        return sum(size for p, size in found if p is not None and p.is_leaf and p.grad is not None)

    @abstractmethod
    def step_bytes(self) -> StepBytes | None:
        """Of a step of the last plan; where there is none, of the largest step that was planned for or measured; None
        if none was.
        """

    def memory(self) -> Memory:
        """Where the device's memory goes in the worst moment of a step of the last plan; ask between steps."""
        return self._memory(self.step_bytes())

    def _memory(self, step: StepBytes | None) -> Memory:
        device = self.device()
        return memory_of(self.terms.rest(device), step, device, with_margin=self.terms.is_auto)

    def device(self, others: Iterable[torch.Tensor] = ()) -> torch.device:
        """As in ``Front``."""
        model = self._model()
        own = () if model is None else itertools.chain(model.parameters(), model.buffers())
        return super().device(itertools.chain(own, others))

    def explained(self, error: InfeasibleBudgetError, auto: bool) -> InfeasibleBudgetError:
        """``error`` with the model's name, without its frames. With the budget "auto", it says where the memory of the
        device goes.
        """
        said = f"{self.name}: {error}"
        if True in self.said_checkpoints:
            said += " Parts of it keep checkpoints of their own (torch.utils.checkpoint): remove those first."
        if auto:
            self.terms.ask_device()
            table = self._memory(StepBytes(error.min_budget, made=self.terms.rest(self.device()).missing))
            said = f"{self.name} cannot be trained on this device, whatever runs again:\n\n{table}\n\n{error}"
        return InfeasibleBudgetError(said, error.min_budget)
