"""One stage of a chain, run alone on a given input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rkgb.cost.memory import storage_bytes
from rkgb.cost.piece import Gradients, Layouts, Tap, gradient, ignore
from rkgb.randomness import set_random_state
from rkgb.trees import tensor_leaves
from rockmate.rotor.parts import Moment, Parts
from rockmate.rotor.values import Function, device_of, mapped


class StageRun:
    """A stage on the input ``x`` (``Piece`` in ``rkgb/cost/piece.py``).

    Its parameters are replaced by others in the same memory with a ``.grad`` of their own, so that the model's stay as
    they are. They are parameters, too, as a compiled layer is compiled again for other kinds of tensors.
    """

    layouts: Layouts | None = None

    def __init__(self, function: Function, x: Any) -> None:
        self.function, self.x, self.device = function, x, device_of(x)
        self.moment = Moment(Parts(function))
        parts = self.moment.parts
        self.states = parts.generator_states(x)
        self.anchor = torch.zeros((), requires_grad=True)
        self.leaves: dict[str, torch.Tensor] = {
            n: torch.nn.Parameter(p.detach(), p.requires_grad) for n, p in parts.parameters.items()
        }

    def forward(self, collect: Callable[[Gradients], None] = ignore) -> list[torch.Tensor]:
        """The tensors of the output, with history. ``collect`` gets the gradients of ``x`` from the backward."""
        self.drop_gradients()
        for source, state in self.states.items():
            set_random_state(source, state)  # all runs take one path
        x = self.x
        tapped = [t for t in tensor_leaves(x) if t.requires_grad]
        if tapped:
            taps = iter(Tap.apply(collect, self.anchor, *tapped))
            x = mapped(lambda t: next(taps) if t.requires_grad else t, x)
        with self.moment.again(self.leaves):
            return tensor_leaves(self.function(x))

    def ends(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results that require grad."""
        return [t for t in results if t.requires_grad]

    def gradients(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """New gradients of ones for ``ends(results)``."""
        return [gradient(t.shape, None, t.dtype, t.device) for t in self.ends(results)]

    def drop_gradients(self) -> None:
        """Remove the ``.grad`` of all parameters of this run."""
        for leaf in self.leaves.values():
            leaf.grad = None

    def parameter_gradients(self) -> int:
        """Bytes of the gradients of parameters that a backward has made."""
        return sum(storage_bytes(leaf.grad) for leaf in self.leaves.values() if leaf.grad is not None)
