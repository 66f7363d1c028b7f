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
    kept from the forward to the backward. ``loss``: room for it. ``temporaries``: the rest of a step, with the loss
    where there is no plan; where no plan fits, all that the step takes at least beside gradients. ``slack``: held by
    CUDA's allocator, and of no use to it. ``margin``: what "auto" leaves. ``other``: inputs, other models and programs,
    the driver. ``free``: below 0 where memory is short.

    None is for what is in ``temporaries``, and, together with that and ``free``, for what no step has shown yet.
    """

    device: str
    total: int
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int | None
    loss: int | None
    temporaries: int | None
    slack: int
    margin: int
    other: int
    free: int | None

    def __str__(self) -> str:
        sizes = [(name, size) for name, size in asdict(self).items() if name not in ("device", "total")]
        shares = [[_NAMES.get(name, name), *self._share(size)] for name, size in sizes]
        return text_table([["memory of", self.device, ""], *shares, ["total", show_bytes(self.total), ""]], left=[0])

    def _share(self, size: int | None) -> tuple[str, str]:
        if size is None:
            return "not known yet" if self.temporaries is None else "in temporaries", ""
        return show_bytes(size), f"{100 * size / max(1, self.total):.1f} %"


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
    """Of a step: its ``peak``, and of that what it keeps and room for the loss, if these are known apart, and gradients
    that it makes.
    """

    peak: int
    kept: int | None = None
    loss: int | None = None
    made: int = 0


def step_of(problem: Problem, schedule: Schedule, peak: int, made: int) -> StepBytes:
    """The bytes of a planned step."""
    kept = walk(problem, schedule).timeline[schedule.index(Loss())] - problem.loss
    return StepBytes(peak, kept, problem.loss, made)


def memory_of(rest: Rest, step: StepBytes | None, device: torch.device, with_margin: bool) -> Memory:
    """The table. Of a step's peak, gradients come first, then what is kept, then the loss; temporaries are the rest."""
    kind = kind_of(device)
    total, slack, unused = kind.total(device), kind.slack(device), kind.free(device)
    activations = loss = temporaries = free = None
    if step is not None:
        left = max(0, step.peak - step.made)
        activations = None if step.kept is None else min(step.kept, left)
        left -= activations or 0
        loss = None if step.loss is None else min(step.loss, left)
        temporaries = left - (loss or 0)
    rows = (
        rest.parameters,
        rest.made + rest.missing,
        rest.state + rest.to_come,
        rest.buffers,
        activations,
        loss,
        temporaries,
        slack,
        with_margin * rest.margin(device),
        total - unused - slack - rest.parameters - rest.buffers - rest.made - rest.state,
    )
    if step is not None:
        free = total - sum(row or 0 for row in rows)
    return Memory(str(device), total, *rows, free)
