"""The check that a traced program computes what the module computes, on other values than the sample's.

``MismatchError`` names the first operation whose result differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rkgb.Btools import is_pure
from rkgb.Dtools import Probed, probe
from rkgb.errors import MismatchError, UnsupportedError
from rkgb.graphs import B_graph, D_graph, Node
from rkgb.program import run_node, same, source_values
from rkgb.sample import Call
from rkgb.trace.guards import GuardFailed, is_guard
from rkgb.trace.operators import WritesSeen
from rkgb.trace.patches import traceable
from rkgb.trace.preserved import Buffers, attributes_preserved, drop_saved, preserved
from rkgb.trace.written import put_back
from rkgb.trees import tensors_of


def checked(b: B_graph, model: torch.nn.Module, call: Call, expected: Sequence[torch.Tensor]) -> D_graph:
    """D of ``b``, from a run whose outputs were compared with the module's.

    The run is made on the sample, ``call``, with its rows in another order. If the module reads values
    (guards), cannot be called with these values, or has sizes that depend on them, the run is made on the sample
    itself, for which the module returned ``expected``. So is that of a module without Python of its own, which is to
    depend on no values.

    Raises:
        MismatchError: an output differs in a bit, though the module gives the same bits in every run.
        UnsupportedError: a module without Python of its own depends on values all the same.
    """
    other = None if is_pure(model) else _shifted(call)
    theirs = None if other is None else _run_module(b, model, other)
    if other is not None and theirs is not None:
        try:
            probed = probe(b, model, other.tensors)
        except (GuardFailed, RuntimeError):
            pass  # other values take another path: planned when they come, or refused by the operation that fails
        else:
            notes = _compare(b, model, other, probed, theirs, "when the values of the sample are others")
            values = probed.graph.values
            if not probed.numbers_read and all(values[v].shape == x for v, x in b.shapes.items() if v in values):
                return dataclasses.replace(probed.graph, notes=notes)
    del other, theirs
    probed = probe(b, model, call.tensors)
    if is_pure(model) and (guard := next(filter(is_guard, probed.graph.nodes), None)):
        raise UnsupportedError(f"a number that an operation takes is read from a tensor at {guard.line}")
    return dataclasses.replace(probed.graph, notes=_compare(b, model, call, probed, expected, "on the sample"))


def _run_module(b: B_graph, model: torch.nn.Module, call: Call) -> list[torch.Tensor] | None:
    """The module's outputs on ``call``; None if it raises an error. Buffers, inputs and generators are restored."""
    outputs, seen = None, WritesSeen()
    with (
        preserved(model, call.tensors, b.structure.written),
        put_back(model, seen),
        seen,
        torch.enable_grad(),
        drop_saved(),
        contextlib.suppress(Exception),  # the module may refuse the values, which does not make the plan wrong
    ):
        outputs = _module_outputs(model, call)
    return outputs


def _compare(
    b: B_graph,
    model: torch.nn.Module,
    call: Call,
    probed: Probed,
    theirs: Sequence[torch.Tensor],
    when: str,
) -> tuple[str, ...]:
    """Compare the outputs with the module's (``theirs``), and return notes for the plan.

    If two runs of the module differ, the tolerances of ``torch.testing`` apply. Raises ``MismatchError``.
    """
    ours = probed.outputs
    differing = [k for k in range(len(b.outputs)) if len(ours) != len(theirs) or not same(ours[k], theirs[k])]
    if not differing:
        return ()
    unseen = [node for node, facts in zip(probed.graph.nodes, probed.graph.facts, strict=True) if facts.unseen]
    if unseen and len(ours) == len(theirs):
        return (
            f"{unseen[0].name} at {unseen[0].line} draws from a state of its own, which planning moved on: no two runs "
            "are equal, and the program's results were not compared with the module's",
        )
    close = False
    with contextlib.suppress(AssertionError):
        torch.testing.assert_close(ours, list(theirs), equal_nan=True)
        close = True
    if close and not _repeats_itself(b, model, call):
        return ("the module's own runs differ in some bits; the program was compared within rounding",)
    k = differing[0]
    raise MismatchError(
        f"output {k} ({b.names[b.outputs[k]]}) of the traced program differs from the module's {when}, "
        f"{_first_difference(b, model, call)}. The module depends on something that a trace does not show (a "
        "counter, data that left the tensors): plan its submodules instead."
    )


def _repeats_itself(b: B_graph, model: torch.nn.Module, call: Call) -> bool:
    """Whether two runs from one state, counters in Python included, give the same bits."""
    outputs = []
    for _ in range(2):
        with attributes_preserved(model):
            outputs.append(_run_module(b, model, call))
    first, second = outputs
    return first is None or second is None or all(map(same, first, second))


def _shifted(call: Call) -> Call:
    """The same arguments with rows shifted by one: other values, each as valid as before.

    Integers are shifted within their rows, and integer vectors stay as they are: an index may be valid in its row only
    (``edge_index``), or only behind its predecessor (``cu_seqlens``). On a GPU, an invalid index fails an assertion in
    a kernel, after which no call in this process works. A tensor that is given twice is one tensor again, since Python
    may ask for that (``query is key``).
    """

    @cache
    def shift(t: torch.Tensor) -> torch.Tensor:
        along = _moved_along(t)
        if along is None or t.layout != torch.strided or torch._debug_has_internal_overlap(t) == 1:
            return t
        moved = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        return moved.copy_(t.detach().roll(1, along)).requires_grad_(t.requires_grad)

    with torch.no_grad():
        return call.with_tensors(shift)


def _moved_along(t: torch.Tensor) -> int | None:
    """The dimension along which other values are as valid; None if there is none."""
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        return next((k for k, size in enumerate(t.shape) if size > 1), None)
    return t.dim() - 1 if t.dim() > 1 and t.shape[-1] > 1 else None


def _module_outputs(model: torch.nn.Module, call: Call) -> list[torch.Tensor]:
    """The outputs of the module, then the buffers that it replaced."""
    before = Buffers(model)
    with _as_traced():
        results = tensors_of(model(*call.args, **call.kwargs))
    return [t.detach() for t in (*results, *before.assigned().values())]


@contextlib.contextmanager
def _as_traced() -> Iterator[None]:
    """A context like that of tracing: autocast keeps no copies of weights, checkpointed parts run directly."""
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


def _first_difference(b: B_graph, model: torch.nn.Module, call: Call) -> str:
    """Words for the first node whose result differs from what the module computes at that place."""
    theirs, ours = _Fingerprints(), _Fingerprints()
    with preserved(model, call.tensors, b.structure.written), torch.enable_grad(), drop_saved(), theirs:
        _module_outputs(model, call)
    made: list[tuple[int, Node]] = []  # how many fingerprints there are after each node
    env: dict[int, Any] = dict(source_values(b.sources, model, call.tensors))
    with preserved(model, call.tensors, b.structure.written), torch.enable_grad(), drop_saved(), ours:
        for node in b.nodes:
            env.update(zip(node.outputs, run_node(node, env.__getitem__), strict=True))
            made.append((len(ours.found), node))
    for k, (mine, their) in enumerate(zip(ours.found, theirs.found, strict=False)):
        if mine != their:
            node = next(node for count, node in made if count > k)
            return f"from {node.name}{f' in {node.path}' if node.path else ''} at {node.line} on"
    return "though no operation does"
