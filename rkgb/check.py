"""Does the program compute what the module computes? On the sample, and on a second input with other values.

Raises ``MismatchError`` that names the first operation whose result the module does not have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rkgb.capture import drop_saved, preserved
from rkgb.errors import MismatchError
from rkgb.graphs import B_graph, Node
from rkgb.guards import GuardFailed
from rkgb.patches import traceable
from rkgb.program import run_node, source_value
from rkgb.trees import flatten, tensors_of, unflatten


def check_outputs(
    b: B_graph, model: torch.nn.Module, call: Any, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]
) -> None:
    """Raise ``MismatchError`` if the program's outputs on ``call`` (args, kwargs) are not the module's, bit for bit."""
    for k, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if not same(mine, other):
            raise MismatchError(
                f"output {k} ({b.names[b.outputs[k]]}) of the traced program differs from the module's on the sample, "
                f"{_first_difference(b, model, call)}. The module does something that a trace does not show: wrap its "
                "submodules instead."
            )


def check_other_values(b: B_graph, model: torch.nn.Module, call: Any) -> None:
    """Compare program and module on the sample with its rows in another order, so that the values are others.

    Where the module reads values (guards), or cannot be called with these, nothing is compared.
    """
    other = _shifted(call)
    with preserved(model, tensors_of(other), b.structure.written), torch.enable_grad(), drop_saved():
        try:
            theirs = _module_outputs(model, other)
        except Exception:  # noqa: BLE001 - the module may refuse the values; no plan is wrong by that
            return
    with preserved(model, tensors_of(other), b.structure.written), torch.enable_grad(), drop_saved():
        try:
            ours = list(run_program(b, model, tensors_of(other)))
        except (GuardFailed, RuntimeError):
            return  # other values take another path: planned when they come, or refused by the operation that fails
    for k, (mine, their) in enumerate(zip(ours, theirs, strict=False)):
        if not same(mine, their):
            raise MismatchError(
                f"output {k} ({b.names[b.outputs[k]]}) of the traced program differs from the module's when the values "
                f"of the sample are others, {_first_difference(b, model, other)}. The module depends on something that "
                "a trace does not show (a counter, data that left the tensors): wrap its submodules instead."
            )


def run_program(b: B_graph, model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The outputs of ``b``, freeing by liveness."""
    last = {v: k for k, n in enumerate(b.nodes) for v in n.reads()}
    last.update(dict.fromkeys(b.outputs, len(b.nodes)))
    env: dict[int, Any] = {v: source_value(source, model, list(inputs)) for v, source in b.sources.items()}
    for k, node in enumerate(b.nodes):
        env.update(zip(node.outputs, run_node(node, env.__getitem__), strict=True))
        for v in (*node.reads(), *node.outputs):
            if last.get(v, -1) <= k and v not in b.sources:
                env.pop(v, None)
    return (env[v].detach() for v in b.outputs)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, NaN equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def _shifted(call: Any) -> Any:
    """The same arguments with rows moved on by one: other values, and each as valid as before."""
    leaves, spec = flatten(call)

    def shift(t: torch.Tensor) -> torch.Tensor:
        along = next((k for k, size in enumerate(t.shape) if size > 1), None)
        if along is None or t.layout != torch.strided:
            return t
        moved = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        return moved.copy_(t.detach().roll(1, along)).requires_grad_(t.requires_grad)

    with torch.no_grad():
        return unflatten([shift(x) if isinstance(x, torch.Tensor) else x for x in leaves], spec)


def _module_outputs(model: torch.nn.Module, call: Any) -> list[torch.Tensor]:
    args, kwargs = call
    with _as_traced():
        return [t.detach() for t in tensors_of(model(*args, **kwargs))]


@contextlib.contextmanager
def _as_traced() -> Iterator[None]:
    """As the module was traced: no cache of cast weights, checkpoints run plainly."""
    cached = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        with traceable():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


# ---------------------------------------------------------------------------------- where the difference begins


class _Fingerprints(TorchDispatchMode):
    """One number for each result of each operation below autograd, in order; views are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten._local_scalar_dense.default:
            numbers = [t for t in tensors_of(result) if not t.is_complex() and t.layout == torch.strided]
            self.found += [(str(func), float(t.detach().double().nan_to_num().sum())) for t in numbers]
        return result


def _first_difference(b: B_graph, model: torch.nn.Module, call: Any) -> str:
    """The first node with a result that the module does not compute at that place, for people."""
    theirs, ours = _Fingerprints(), _Fingerprints()
    with preserved(model, tensors_of(call), b.structure.written), torch.enable_grad(), drop_saved(), theirs:
        _module_outputs(model, call)
    made: list[tuple[int, Node]] = []  # how many fingerprints there are after each node
    env: dict[int, Any] = {v: source_value(s, model, tensors_of(call)) for v, s in b.sources.items()}
    with preserved(model, tensors_of(call), b.structure.written), torch.enable_grad(), drop_saved(), ours:
        for node in b.nodes:
            env.update(zip(node.outputs, run_node(node, env.__getitem__), strict=True))
            made.append((len(ours.found), node))
    for k, (mine, their) in enumerate(zip(ours.found, theirs.found, strict=False)):
        if mine != their:
            node = next(node for count, node in made if count > k)
            return f"from {node.name} at {node.line} on"
    return "though no operation does"
