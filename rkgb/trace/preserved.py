"""What a run of a module leaves as it was: buffers, inputs, generators, numbers; and what autograd would save."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd.graph import saved_tensors_hooks

from rkgb.randomness import RandomSource, own_generators, random_state, set_random_state, watched_devices


def drop_saved(note: Callable[[torch.Tensor], None] = lambda _: None) -> saved_tensors_hooks:
    """A context in which autograd saves no tensors, so that peak memory is that of inference. ``note`` gets them."""

    def refuse(_: None) -> torch.Tensor:
        raise RuntimeError("a tensor dropped while the module was observed is needed: backward ran inside forward")

    return saved_tensors_hooks(note, refuse)


def each_saved(note: Callable[[torch.Tensor], None]) -> saved_tensors_hooks:
    """A context in which ``note`` is called with each tensor that autograd saves. The tensor is saved as without it."""

    def pack(t: torch.Tensor) -> torch.Tensor:
        note(t)
        return t

    return saved_tensors_hooks(pack, lambda t: t)


@contextlib.contextmanager
def preserved(model: torch.nn.Module, inputs: Sequence[torch.Tensor], written: Sequence[str] = ()) -> Iterator[None]:
    """A context that restores buffers, inputs, generators and the tensors named in ``written`` at its end.

    Version counters are restored, too, since autograd graphs from before may have saved these tensors.
    """
    drawn: list[RandomSource] = [*watched_devices((*inputs, *model.parameters())), *own_generators(model.modules())]
    states = [(x, random_state(x)) for x in drawn]
    buffers = dict(model.named_buffers())
    holders = [(module, name, b) for module in model.modules() for name, b in module._buffers.items()]
    kept = [*buffers.values(), *inputs, *(_held(model, name) for name in written)]
    copies = [(t, t.detach().clone()) for t in kept if t.layout == torch.strided and not t.is_meta]
    counted = tuple(t for t, _ in copies if not t.is_inference())
    versions = tuple(t._version for t in counted)
    try:
        yield
    finally:
        for module, name, b in holders:
            module._buffers[name] = b
        with torch.no_grad():
            for t, copy in copies:
                if t.shape != copy.shape:  # statistics of quantization get their size in the first call
                    t.resize_(copy.shape)
                if not torch.equal(t, copy):
                    t.copy_(copy)
        torch._C._autograd._unsafe_set_version_counter(counted, versions)
        for x, state in states:
            set_random_state(x, state)


@contextlib.contextmanager
def without_gradients(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """A context in which ``tensors`` have no ``.grad`` at first; afterwards they have the one of before."""
    held = [(t, t.grad) for t in tensors]
    try:
        for t in tensors:
            t.grad = None
        yield
    finally:
        for t, gradient in held:
            t.grad = gradient


class Buffers:
    """The buffers of a module and its submodules, to compare with after a forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._before = [(n, m, k, b) for n, m in model.named_modules() for k, b in m._buffers.items()]

    def assigned(self) -> dict[str, torch.Tensor]:
        """The buffers that forward replaced by other tensors, by qualified name."""
        now = [(f"{n}.{k}" if n else k, m._buffers.get(k), b) for n, m, k, b in self._before]
        return {name: t for name, t, before in now if t is not before and t is not None}


def _held(model: torch.nn.Module, name: str) -> torch.Tensor:
    module, _, key = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(module), key)
    return tensor


@contextlib.contextmanager
def attributes_preserved(model: torch.nn.Module) -> Iterator[None]:
    """A context that restores numbers in the modules' attributes at its end, such as counters of calls.

    Caches, hooks and flags that forward sets in its first run stay, as they depend on each other.
    """
    numbers = [(m, k, x) for m in model.modules() for k, x in vars(m).items() if type(x) in (int, float)]
    try:
        yield
    finally:
        for module, name, number in numbers:
            setattr(module, name, number)
