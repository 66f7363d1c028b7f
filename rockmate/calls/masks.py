"""Attention masks of transformers, which it leaves out in eager mode where they would mask nothing but the future.

To see that, it reads values: of the padding mask, which may be full of ones, and of positions, which may start again
where sequences are packed. Under a compiler it reads none, and always makes the mask. Then other kernels run, with
other bits and in more time. Here both are known without a look at values within the capture: those of an argument are
read before the call, and what ``torch.arange`` counts does not start again. Captures with and without masks are kept
apart.
"""

from __future__ import annotations

import contextlib
import operator
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from rkgb.sample import Call
from rockmate.calls.captured import source_of

if TYPE_CHECKING:
    from torch import fx

_MASK = "attention_mask"
_COUNTED, _FULL = "counted", "full"


def is_full(call: Call) -> bool | None:
    """Whether no padding mask among the arguments masks anything; None where there is none."""
    if "transformers.masking_utils" not in sys.modules:
        return None
    masks = [x for name, x in call.kwargs.items() if name.endswith(_MASK) and isinstance(x, torch.Tensor)]
    return all(bool(mask.all()) for mask in masks) if masks else None


@contextlib.contextmanager
def left_out_as_eager(full: bool | None, values: bool) -> Iterator[None]:
    """What TorchDynamo captures leaves out masks as in eager mode.

    ``full``: of the call, which TorchDynamo must guard. ``values``: whether masks are left out where their values say
    that they may, without a look at these, and the tensors are marked that say so.
    """
    library: Any = sys.modules.get("transformers.masking_utils")
    asked = {name: f for name, f in _ASKED.items() if values or name not in _OF_VALUES}
    found = {name: there for name, f in asked.items() if (there := getattr(library, name, f)) is not f}
    if found:
        _original.update(found)
        torch.compiler.allow_in_graph(_mark)
        torch.compiler.assume_constant_result(_is_full)
    before, _captured.full = without_padding(), full
    for name in found:
        setattr(library, name, _ASKED[name])
    try:
        yield
    finally:
        _captured.full = before
        for name, original in found.items():
            setattr(library, name, original)


def without_padding() -> bool | None:
    """Whether the call that this thread captures has no padding; None where nothing is known."""
    return getattr(_captured, "full", None)


_captured = threading.local()
_original: dict[str, Callable[..., Any]] = {}


def _is_full() -> bool:
    return bool(without_padding())


def _packed(position_ids: torch.Tensor) -> torch.Tensor | None:
    """The number of each position's sequence, or None where there is one sequence."""
    if not torch.compiler.is_dynamo_compiling():
        return _original["find_packed_sequence_indices"](position_ids)  # type: ignore[no-any-return]
    _mark(position_ids, _COUNTED)
    return None


def _without_full(name: str) -> Callable[..., bool]:
    """The function ``name``, whether no mask is needed beside the usual one, where a full padding mask is none."""

    def asked(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
        if padding_mask is not None and torch.compiler.is_dynamo_compiling() and _is_full():
            _mark(padding_mask, _FULL)
            padding_mask = None
        return _original[name](padding_mask, *args, **kwargs)  # type: ignore[no-any-return]

    return asked


def _traced(values: Any = None) -> bool:
    """Whether ``values`` cannot be read. transformers asks that also where there are none, and then makes the mask."""
    return values is not None and bool(_original["is_tracing"](values))


def _exporting() -> bool:
    """TorchDynamo answers yes before torch 2.14, whatever it captures for."""
    return False


_ASKED: dict[str, Callable[..., Any]] = {
    "is_tracing": _traced,
    "is_torchdynamo_exporting": _exporting,
    "find_packed_sequence_indices": _packed,
    **{name: _without_full(name) for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")},
}


_OF_VALUES = frozenset(_ASKED) - {"is_tracing", "is_torchdynamo_exporting"}


def _mark(x: torch.Tensor, _: str) -> torch.Tensor:
    return x


def are_known(program: fx.GraphModule) -> bool:
    """Remove the marks of a captured graph. Whether each is of counted positions, or of a mask that was read."""
    marks = [node for node in program.graph.nodes if node.target is _mark]
    known = all(_is_known(*mark.args) for mark in marks)
    for mark in marks:
        program.graph.erase_node(mark)
    if marks:
        program.recompile()
    return known


def _is_known(node: fx.Node, kind: str) -> bool:
    """Whether it goes up by one along its last dimension, whatever the sizes are, or is an argument that was read."""
    while node.target in _SHAPED or node.target in (_ADDED if kind == _COUNTED else _SHAPED_ANYHOW):
        examples = (getattr(x, "meta", {}).get("example_value") for x in node.args)
        if [k for k, x in enumerate(examples) if isinstance(x, torch.Tensor)] != [0]:
            return False
        node = node.all_input_nodes[0]
    if kind == _COUNTED:
        step = node.kwargs.get("step", node.args[2] if len(node.args) > 2 else 1)
        return bool(node.target is torch.arange and step == 1)
    return bool(_ARGUMENT.fullmatch(source_of(node)))


_ARGUMENT = re.compile(rf"L\['kwargs'\]\['\w*{_MASK}'\]")
_SHAPED = frozenset({"expand", "to", "unsqueeze"})
_SHAPED_ANYHOW = frozenset({"view", "reshape"})
_ADDED = frozenset({operator.add, operator.iadd, torch.add, "add"})
