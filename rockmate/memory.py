"""Where the memory of a device goes in training, and what of it is left for a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from rkgb.device import kind_of
from rockmate.budget import show_bytes
from rockmate.optimizers import OPTIMIZERS, local_bytes
from solvers import Loss, Problem, Schedule, walk
from solvers.tables import text_table

MARGIN = 20
""" "auto" leaves one part in so many of what a step could take: for what allocators round and fragment."""


@dataclass(frozen=True)
class Memory:
    """Where the memory of ``device`` goes in the worst moment of a step, in bytes; the rows add up to ``total``.

    ``gradients``: of all trained parameters, whether they are there or not. ``optimizer``: its state, or what that will
    be: as its first step has shown, by ``optimizer=``, or else two moments of each trained parameter. ``activations``:
    kept from the forward to the backward. ``loss``: room for it. ``temporaries``: the rest of a step; where no plan
    fits, all that it takes at least beside gradients. ``slack``: held by CUDA's allocator, and of no use to it.
    ``margin``: what "auto" leaves. ``other``: inputs, other models and programs, the driver. ``free``: below 0 where
    memory is short.
    """

    device: str
    total: int
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    loss: int
    temporaries: int
    slack: int
    margin: int
    other: int
    free: int

    def __str__(self) -> str:
        sizes = [(name, size) for name, size in asdict(self).items() if name not in ("device", "total")]
        shares = [[_NAMES.get(name, name), show_bytes(x), f"{100 * x / max(1, self.total):.1f} %"] for name, x in sizes]
        return text_table([["memory of", self.device, ""], *shares, ["total", show_bytes(self.total), ""]], left=[0])


_NAMES = {
    "optimizer": "optimizer's state",
    "activations": "kept activations",
    "slack": "allocator's slack",
    "margin": 'margin of "auto"',
}


class Rest(NamedTuple):
    """Bytes on a device between steps. ``made``: of gradients that are there; ``missing``: of those that are not.
    ``state``: of optimizers; ``to_come``: what their first step adds.
    """

    parameters: int
    buffers: int
    made: int
    missing: int
    state: int
    to_come: int

    def margin(self, device: torch.device) -> int:
        """What "auto" leaves."""
        return max(0, kind_of(device).free(device) + self.made - self.to_come) // MARGIN

    def room(self, device: torch.device) -> int:
        """What a step that makes all gradients may take, so that training goes on with a margin."""
        return kind_of(device).free(device) + self.made - self.to_come - self.margin(device)


def rest_of(models: Sequence[torch.nn.Module], device: torch.device) -> Rest:
    """What the ``models`` and their optimizers have on ``device``."""
    own = {id(p): p for model in models for p in model.parameters() if p.device.type == device.type}
    buffers = {id(b): b for model in models for b in model.buffers() if b.device.type == device.type}
    trained = {k: p for k, p in own.items() if p.requires_grad}
    made = sum(local_bytes(p.grad) for p in own.values() if p.grad is not None)
    missing = sum(local_bytes(p) for p in trained.values() if p.grad is None)
    size, of_buffers = (sum(map(local_bytes, tensors)) for tensors in (own.values(), buffers.values()))
    return Rest(size, of_buffers, made, missing, *OPTIMIZERS.state_bytes(trained, device))


class StepBytes(NamedTuple):
    """Of a step: its ``peak``, and of that what it keeps, room for the loss, and gradients that it makes."""

    peak: int
    kept: int = 0
    loss: int = 0
    made: int = 0


def step_of(problem: Problem, schedule: Schedule, peak: int, made: int) -> StepBytes:
    """The bytes of a planned step."""
    kept = walk(problem, schedule).timeline[schedule.index(Loss())] - problem.loss
    return StepBytes(peak, kept, problem.loss, made)


def memory_of(rest: Rest, step: StepBytes, device: torch.device, with_margin: bool) -> Memory:
    """The table. Of a step's peak, gradients come first, then what is kept, then the loss; temporaries are the rest."""
    kind = kind_of(device)
    total, slack, unused = kind.total(device), kind.slack(device), kind.free(device)
    left = max(0, step.peak - step.made)
    activations = min(step.kept, left)
    loss = min(step.loss, left - activations)
    rows = (
        rest.parameters,
        rest.made + rest.missing,
        rest.state + rest.to_come,
        rest.buffers,
        activations,
        loss,
        left - activations - loss,
        slack,
        with_margin * rest.margin(device),
        total - unused - slack - rest.parameters - rest.buffers - rest.made - rest.state,
    )
    return Memory(str(device), total, *rows, total - sum(rows))
