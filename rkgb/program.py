"""Run nodes of a graph."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from rkgb.graphs import Mode, Node, Source, substitute
from rkgb.trace.attention import attention_by
from rkgb.trace.capture import current_mode


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, NaN equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def in_mode(mode: Mode, now: Mode | None = None) -> contextlib.AbstractContextManager[None]:
    """A context in which operations run in ``mode``; autocast keeps no copies of weights. ``now``: the mode of now, if
    it is known."""
    now = now or current_mode()
    if mode == now:
        return contextlib.nullcontext()
    if mode.autocast == now.autocast and mode.attention == now.attention:
        return torch.set_grad_enabled(mode.grad)
    return _switched(mode, now)


@contextlib.contextmanager
def _switched(mode: Mode, now: Mode) -> Iterator[None]:
    """It sets what ``torch.autocast`` sets, which takes longer than a small operation."""
    on, kinds = dict(mode.autocast), {kind for kind, _ in (*mode.autocast, *now.autocast)}
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    keeps = torch.is_autocast_cache_enabled()
    with torch.set_grad_enabled(mode.grad), _attention_from(now.attention, mode.attention):
        try:
            for kind, _, dtype in before:
                torch.set_autocast_enabled(kind, kind in on)
                torch.set_autocast_dtype(kind, on.get(kind, dtype))
            torch.set_autocast_cache_enabled(keeps and mode.autocast == now.autocast)
            yield
        finally:
            for kind, enabled, dtype in before:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_cache_enabled(keeps)


def _attention_from(now: tuple[int, ...], kernels: tuple[int, ...]) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if kernels == now else attention_by(kernels)


def run_node(node: Node, value: Callable[[int], Any]) -> tuple[Any, ...]:
    """The results of ``node``, one for each of its outputs."""
    with in_mode(node.mode):
        return computed(node, value)


def computed(node: Node, value: Callable[[int], Any]) -> tuple[Any, ...]:
    """The same in the mode of now, which is the node's."""
    args = substitute(node.args, value)
    kwargs = {k: substitute(a, value) for k, a in node.kwargs}
    result = node.op(*args, **kwargs)
    if node.several:
        return tuple(result)
    return (result,) if node.outputs else ()


def _attribute(x: Any, name: str) -> Any:
    return getattr(x, name, None)


def source_values(
    sources: Mapping[int, Source], model: torch.nn.Module, inputs: list[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """The tensor of each source. Parameters and buffers are looked up by name in the module as it is now.

    Raises ``KeyError`` for a name that the module no longer has.
    """
    tensors: dict[int, torch.Tensor] = {}
    for v, source in sources.items():
        if source.kind == "input":
            tensors[v] = inputs[source.key]
        elif source.kind == "constant":
            tensors[v] = source.key
        else:
            tensor = functools.reduce(_attribute, source.key.split("."), model)
            if not isinstance(tensor, torch.Tensor):
                raise KeyError(
                    f"the module no longer has the {source.kind} {source.key!r} that it had when it was planned"
                )
            tensors[v] = tensor
    return tensors
