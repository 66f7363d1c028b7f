"""Whether what a trace without data shows holds on a device.

Torch may spell, save and allocate otherwise where there are no data. So each distinct call of a program is made once on
the device, on zeros, and what is traced and seen there is compared with what is without data. A call sees
of others only what it is given. So where all distinct calls are alike, the graphs of the program are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from rkgb.blocks.simplify import D_to_S
from rkgb.Btools import trace
from rkgb.cost.layouts import strides_of_new
from rkgb.Dtools import probe
from rkgb.graphs import B_graph, D_graph
from rkgb.nodes import kept_bytes
from rkgb.probe.names import with_display_names
from rkgb.probe.operations import is_python
from rkgb.probe.resize import graph_without_data, is_same, is_same_program, on_device, program_without_data
from rkgb.probe.skeleton import skeleton
from rkgb.program import in_mode
from rkgb.sample import Call
from rkgb.trace.distinct import Distinct, DistinctCalls, Like
from rkgb.trace.guards import is_guard
from rkgb.trees import tensors_in, tensors_of


def graphs_without_data(model: torch.nn.Module, call: Call, device: torch.device) -> tuple[B_graph, D_graph] | None:
    """B and D of ``call`` of a program ``model``, both on the meta device, as they are on ``device``.

    None where what shows without data differs there, or where it takes data; where the program runs Python of the
    user's, of which nothing tells what else it does; and where what is given to one call takes more memory than a step.
    """
    calls = DistinctCalls()
    b = program_without_data(model, call, device, calls)
    d = None if b is None or any(map(is_python, b.nodes)) else graph_without_data(b, model, call, device)
    if b is None or d is None or any(map(is_guard, d.nodes)):
        return None  # a run says where a number is read from a tensor, and refuses the program
    if any(d.values[v].stride != lies for v, lies in b.strides.items() if v in d.values):
        return None  # calls were noted with tensors that lie otherwise
    most = max((sum(call.memory) for call in calls.calls()), default=0)
    if most > _memory_of_a_step(d) or not _are_alike(calls.calls(), device):
        return None
    written = {x for facts in d.facts for x in facts.writes}
    parameters = {v: x.key for v, x in d.sources.items() if x.kind == "parameter"}
    changed = tuple(name for v, name in parameters.items() if d.values[v].storage in written)
    structure = dataclasses.replace(b.structure, written=changed)
    d = with_display_names(dataclasses.replace(d, structure=structure))
    d.verify()
    return dataclasses.replace(on_device(b, device), structure=structure), d


def _memory_of_a_step(d: D_graph) -> int:
    """Bytes that a step takes at least: what forward computes and saves, gradients of what the program starts from, and
    while forward runs, its largest value.
    """
    kept = kept_bytes((facts.saved for facts in d.facts), d.storages)
    made = (value.bytes for v, value in d.values.items() if v not in d.sources)
    return kept + sum(d.values[v].bytes for v in d.sources if d.values[v].requires_grad) + max(made, default=0)


class _Calls(torch.nn.Module):
    """A program that makes ``calls``, each on zeros of its own."""

    pure = True  # see ``rkgb.Btools.is_pure``

    def __init__(self, calls: Sequence[Distinct], device: torch.device, where: str | torch.device) -> None:
        """``where``: the parameters are; what is made is on ``device``."""
        super().__init__()
        self.calls, self.device = calls, device
        types = {x.dtype for call in calls for x in tree_leaves((call.args, call.kwargs)) if _is_trained(x)}
        for dtype in types:
            self.register_parameter(_name(dtype), torch.nn.Parameter(torch.zeros((), dtype=dtype, device=where)))

    def forward(self) -> list[torch.Tensor]:
        """An empty tensor of each result, so that none counts as unread."""
        marks: list[torch.Tensor] = []
        for call in self.calls:
            args, kwargs = self._given(call)
            with in_mode(call.mode):
                found = tensors_of(call.func(*args, **kwargs)) or list(tensors_in(args))
            marks += [t.new_empty(0) for t in found if t.layout == torch.strided]
        return marks

    def _given(self, call: Distinct) -> Any:
        """Positional arguments and keywords for ``call``, with tensors."""
        given = call.args, call.kwargs
        found = [x for x in tree_leaves(given) if isinstance(x, Like)]
        lie = [[like for like in found if like.memory == k] for k in range(len(call.memory))]
        memory = [self._zeros(size, likes) for size, likes in zip(call.memory, lie, strict=True)]

        def tensor(like: Like) -> torch.Tensor:
            t = memory[like.memory]
            if not like.requires_grad and any(x.requires_grad for x in lie[like.memory]):
                t = t.detach()
            if _is_whole(like, call.memory[like.memory], lie[like.memory]):
                return t
            return t.as_strided(like.shape, like.stride, like.offset)

        return tree_map_only(Like, cache(tensor), given)

    def _zeros(self, size: int, likes: Sequence[Like]) -> torch.Tensor:
        """Memory of ``size`` bytes, in which tensors ``likes`` lie."""
        first = likes[0]
        shape = first.shape if _is_whole(first, size, likes) else (size // first.dtype.itemsize,)
        if any(map(_is_trained, likes)):
            return self.get_parameter(_name(first.dtype)).repeat(shape)
        return torch.zeros(shape, dtype=first.dtype, device=self.device)


def _is_trained(x: Any) -> bool:
    """Whether ``x`` stands for a tensor that gets a gradient."""
    return isinstance(x, Like) and x.requires_grad


def _name(dtype: torch.dtype) -> str:
    """Of the parameter of this type; modules have methods that are called as types are."""
    return f"of_{str(dtype).rpartition('.')[2]}"


def _is_whole(like: Like, size: int, others: Sequence[Like]) -> bool:
    """Whether a tensor ``like`` this is all that lies in its memory of ``size`` bytes, without gaps."""
    dense = like.stride == strides_of_new(like.shape)
    return bool(like.shape) and dense and size == math.prod(like.shape) * like.dtype.itemsize and {*others} == {like}


_REFUSE_ZEROS = "assert", "multinomial"
"""Functions with these in their names may end all work of a GPU where they are given zeros."""


def _are_alike(calls: Sequence[Distinct], device: torch.device) -> bool:
    """Whether ``calls`` do on ``device`` what they do without data."""
    names = [str(getattr(call.func, "__name__", call.func)) for call in calls]
    if any(refuses in name for name in names for refuses in _REFUSE_ZEROS):
        return False
    there, here = _Calls(calls, device, device), _Calls(calls, device, "meta")
    nothing = Call((), {})
    try:
        with torch.enable_grad():
            b = trace(there, nothing)[0]
            bare = program_without_data(here, nothing, device)
        if bare is None or not is_same_program(bare, b, device):
            return False
        a, d = probe(b, there, []).graph, graph_without_data(bare, here, nothing, device)
        if d is None:
            return False
        of_data, shown = D_to_S(a), D_to_S(with_display_names(d))
    except Exception:  # noqa: BLE001 - operations refuse zeros, each in its own way
        return False
    same = skeleton(of_data) == skeleton(shown) and is_same(of_data, shown)
    return same and [facts.drawn for facts in a.facts] == [facts.drawn for facts in d.facts]
