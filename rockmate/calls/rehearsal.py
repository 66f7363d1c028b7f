"""Training steps on a sample, ahead of the first one: a plan of a followed forward needs them.

All that the steps change is put back: parameters, gradients, buffers and other tensors that modules hold, generators of
random numbers, attributes, containers and counters that the model's Python reaches.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from rkgb.errors import UnsupportedError
from rkgb.randomness import random_state, set_random_state, watched_devices
from rkgb.trees import tensors_in
from rockmate.calls.held import Held

MOST_STEPS = 5
"""Steps after which a plan is there, or none comes."""

USUAL_ROOM = 3
"""Times the bytes of the outputs that a loss has as room before a step has shown what it takes."""


def rehearse(step: Callable[[], Any], planned: Callable[[], bool], loss_memory: int | None) -> None:
    """Train until there is a plan. ``step`` is the forward; ``loss_memory``: bytes that the loss allocates.

    Outputs whose backward raises are none that training reads, and are left out.
    """
    read: list[int] | None = None  # the places of those that are read, if not all are
    for _ in range(MOST_STEPS):
        many, error = _train(step, read, loss_memory)
        if error is not None:
            read = [k for k in range(many) if _train(step, [k], 0)[1] is None] if read is None else []
            if not read:
                raise error
        elif not many or planned():
            return


def _train(step: Callable[[], Any], read: list[int] | None, loss_memory: int | None) -> tuple[int, RuntimeError | None]:
    """One step, from all outputs with gradients, or from those at the places ``read`` among them. How many it has, and
    what its backward raises.
    """
    leaves = ([x, getattr(x, "__dict__", None)] for x in pytree.tree_leaves(step()))  # data classes are leaves
    roots = [t for t in dict.fromkeys(tensors_in([*leaves])) if t.requires_grad]
    try:
        if roots:  # which loops hold meanwhile
            _loss(roots if read is None else [roots[k] for k in read], loss_memory).backward()
    except RuntimeError as error:
        return len(roots), error.with_traceback(None)  # whose frames hold the graph
    return len(roots), None


def _loss(roots: list[torch.Tensor], loss_memory: int | None) -> torch.Tensor:
    """A number with gradients for all outputs; a number among these is the loss."""
    numbers = [t for t in roots if t.numel() == 1 and t.dim() == 0]
    if numbers and len(roots) > len(numbers):
        return torch.stack([t.real.to(torch.float64) if t.is_complex() else t.double() for t in numbers]).sum()
    size = sum(t.numel() * max(4, t.element_size()) for t in roots)
    room = USUAL_ROOM * size if loss_memory is None else loss_memory
    loss: torch.Tensor = _Loss.apply(room, size if loss_memory is None else 0, *roots)
    return loss


class _Loss(torch.autograd.Function):
    """Reads all outputs, takes room as losses do, and has gradients as large as the outputs."""

    @staticmethod
    def forward(ctx: Any, room: int, kept: int, *roots: torch.Tensor) -> torch.Tensor:
        device = roots[0].device
        torch.empty(room, dtype=torch.uint8, device=device)
        ctx.kept = torch.empty(kept, dtype=torch.uint8, device=device)
        ctx.forms = [(t.shape, t.dtype, t.device) for t in roots]
        return torch.zeros((), device=device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        made = (torch.full(shape, 1e-3, dtype=dtype, device=device) for shape, dtype, device in ctx.forms)
        return (None, None, *made)


@contextlib.contextmanager
def put_back(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Train ``model`` within: afterwards all is as it was. Raises ``UnsupportedError`` for iterators and queues, which
    cannot be put back.
    """
    held = Held(model)
    if held.one_way:
        raise UnsupportedError(
            f"{held.one_way[0]} is an iterator or a queue, and what forward takes from it could not be put back after "
            "the steps that a plan needs ahead of training. Take it outside of forward, or attach the model without "
            "a sample"
        )
    tensors = _tensors_of(model, inputs)
    values = [(t, t._version, t.detach(), t.detach().to("cpu", copy=True)) for t in tensors if not t.is_meta]
    gradients = [(t, t.grad) for t in tensors if t.is_leaf]
    for t, gradient in gradients:
        if gradient is not None:
            t.grad = gradient.detach().clone()
    devices = watched_devices(tensors)
    states = [(device, random_state(device)) for device in devices]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.enable_grad():
            yield
    finally:
        held.put_back()
        with torch.no_grad():
            for t, version, memory, value in values:
                if t.shape != memory.shape or t.data_ptr() != memory.data_ptr():
                    t.data = memory  # it got other memory, or another size
                if t._version != version or not torch.equal(t.detach().cpu(), value):
                    t.data.copy_(value)
        for t, gradient in gradients:
            t.grad = gradient
        for device, state in states:
            set_random_state(device, state)
        random.setstate(python)
        np.random.set_state(numpy)


def _tensors_of(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs, parameters, buffers, and other tensors that modules hold, each once."""
    found: dict[int, torch.Tensor] = {}
    own = [*model.parameters(), *model.buffers()]  # those of scripted modules are among no attributes
    for held in (inputs, own, *(v for m in model.modules() for v in vars(m).values())):
        values = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else [held]
        found.update((id(t), t) for t in values if isinstance(t, torch.Tensor))
    return [t for t in found.values() if t.layout == torch.strided and not t.is_nested]
