"""Generators of random numbers: those of devices, and a model's own ``torch.Generator``s."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch

from rkgb.device import kind_of
from rkgb.errors import UnsupportedError
from rkgb.graphs import Node, S_graph
from rkgb.trace.operators import named

RandomSource = torch.device | torch.Generator
"""What random numbers are drawn from: a generator, or a device, which stands for its default generator."""


def random_state(source: RandomSource) -> torch.Tensor:
    """The state of a generator, as bytes in host memory."""
    if type(source) is torch.device:
        return kind_of(source).random_state(source)
    return cast(torch.Generator, source).get_state()


def random_bytes(source: RandomSource) -> bytes:
    """The same as bytes of Python, which are compared without calling an operator."""
    state = random_state(source)
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def set_random_state(source: RandomSource, state: torch.Tensor) -> None:
    """Restore what ``random_state`` returned."""
    if type(source) is torch.device:
        kind_of(source).set_random_state(source, state)
    else:
        cast(torch.Generator, source).set_state(state)


def watched_devices(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """The devices whose default generators a program may draw from: the CPU, and the devices of its ``tensors``.

    Each operation is watched for all of them, since those that make random tensors (``torch.rand``) read no tensor.
    """
    return tuple(dict.fromkeys((torch.device("cpu"), *(t.device for t in tensors))))


def random_states(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The states of the generators of ``watched_devices``, to compare."""
    return [random_state(device) for device in watched_devices(tensors)]


def draws_unseen(node: Node, reads: Iterable[torch.Tensor]) -> bool:
    """Whether an operation draws from a state that can neither be read nor restored, so that it must run only once."""
    given = partial(named, node.op, node.args, dict(node.kwargs))
    return hasattr(node.op, "_schema") and any(
        kind_of(device).hides_draws(node.name, given) for device in {t.device for t in reads}
    )


@contextlib.contextmanager
def drawing_again(sources: Sequence[RandomSource], states: Sequence[torch.Tensor] | None) -> Iterator[None]:
    """A context in which ``sources`` have these ``states``. Afterwards their own states are restored."""
    if not states:
        yield
        return
    outer = [random_state(x) for x in sources]
    try:
        for x, state in zip(sources, states, strict=True):
            set_random_state(x, state)
        yield
    finally:
        for x, state in zip(sources, outer, strict=True):
            set_random_state(x, state)


def own_generators(modules: Iterable[torch.nn.Module]) -> list[torch.Generator]:
    return list(dict.fromkeys(generators_in(v for m in modules for v in vars(m).values())))


def generators_in(arguments: Iterable[Any]) -> list[torch.Generator]:
    # ``isinstance`` is slow for classes opaque to compilers.
    return [a for a in arguments if torch.Generator in type(a).__mro__]


def drawn_by(s: S_graph, i: int) -> tuple[RandomSource, ...]:
    """What node i of S draws from, each once."""
    return tuple(dict.fromkeys(x for op in s.nodes[i].ops for x in s.d.facts[op].drawn))


def node_generators(node: Node) -> list[torch.Generator]:
    return generators_in([*node.args, *(a for _, a in node.kwargs)])


def refuse_unseen_draws(module: torch.nn.Module, device: torch.device, what: str) -> None:
    """Raise ``UnsupportedError`` if a layer of ``module``, which is to run again, ``draws_unseen``."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.RNNBase):
            given = {"train": layer.training, "dropout": layer.dropout, "num_layers": layer.num_layers}
            if kind_of(device).hides_draws(layer.mode.lower(), partial(dict, given)):
                raise UnsupportedError(
                    f"{what} has {layer.mode} layers with dropout between them, which cuDNN draws from a state of its "
                    "own: run again, it would draw other numbers. Use one layer each with nn.Dropout between them, "
                    "or set torch.backends.cudnn.enabled = False"
                )


def state_bytes(sources: Iterable[RandomSource]) -> int:
    """Bytes of the states in device memory. CUDA's states are in host memory and do not count."""
    devices = ((x, x.device if isinstance(x, torch.Generator) else x) for x in sources)
    return sum(random_state(x).nbytes for x, device in devices if kind_of(device).counts_states)
