"""What one run of a captured program shows of its operations: which are light, what they share, write and draw."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from rkgb.nodes import Mode
from rkgb.storages import has_memory, storage_key, version_of
from rkgb.trace.capture import current_mode
from rkgb.trace.operators import named, written_arguments
from rkgb.trees import tensors_in
from rockmate.pieces.kernels import form_of


@dataclass
class Seen:
    """What a run has shown of a node.

    ``light``: all that it computes Inductor lowers to kernels of its own. ``work``: operators that make memory.
    ``base``: the node, itself if it allocates, that made the memory of its result. ``grad``: whether a result needs a
    gradient; ``wants``: the nodes that it reads whose results need one then. ``writes``: the bases of what it
    changes in place, or of which it changes whether they need one. ``draws``: whether it draws random numbers.
    ``switches``: whether it is called for what it does to torch (its grad mode). ``types``: of the tensors that it is
    given and makes. ``several``: whether the result is several tensors, of which other nodes take single ones.
    ``argument``: the result as pieces are compiled for it (see ``form_of``), if it is a tensor or a number.
    ``mode``: in which it ran.
    """

    light: bool
    work: int
    base: fx.Node
    grad: bool
    wants: frozenset[fx.Node] = frozenset()
    writes: list[fx.Node] = field(default_factory=list)
    draws: bool = False
    switches: bool = False
    types: frozenset[torch.dtype] = frozenset()
    several: bool = False
    argument: Hashable = None
    mode: Mode = field(default_factory=Mode)


def takes_one(n: fx.Node, seen: Mapping[fx.Node, Seen]) -> bool:
    """Whether ``n`` takes one of several results; ``getitem`` of a tensor is a view, or takes numbers from places."""
    return n.target is getitem and isinstance(n.args[0], fx.Node) and seen[n.args[0]].several


def watch(program: fx.GraphModule, inputs: Sequence[Any]) -> dict[fx.Node, Seen]:
    """Run ``program`` once, and say what each of its nodes did. Peak memory is that of inference if no tensor is saved;
    what it changes, the caller puts back.
    """
    run = _Watched(program)
    run.run(*inputs)
    return run.seen


class _Watched(fx.Interpreter):
    def __init__(self, program: fx.GraphModule) -> None:
        super().__init__(program)
        self.extra_traceback = False  # the trace fails again, and says more
        self.seen: dict[fx.Node, Seen] = {}

    def run_node(self, n: fx.Node) -> Any:
        given = [self.env[i] for i in n.all_input_nodes]
        before = [(version_of(t), t.requires_grad) for t in tensors_in(given)]
        wants = {
            i for i, x in zip(n.all_input_nodes, given, strict=True) if any(t.requires_grad for t in tensors_in(x))
        }
        with _Operators() as called:
            result = super().run_node(n)
        if n.op != "output":
            self.seen[n] = replace(self._about(n, given, before, called, result), wants=frozenset(wants))
        return result

    def _about(
        self, n: fx.Node, given: list[Any], before: list[tuple[int, bool]], called: _Operators, result: Any
    ) -> Seen:
        owners = {storage_key(t): self.seen[i].base for i, x in zip(n.all_input_nodes, given, strict=True)
                  for t in tensors_in(x) if has_memory(t)}  # fmt: skip
        made = list(tensors_in(result))
        bases = [owners.get(storage_key(t), n) for t in made if has_memory(t)]
        written = [t for t, was in zip(tensors_in(given), before, strict=True) if has_memory(t)
                   and ((version_of(t), t.requires_grad) != was or storage_key(t) in called.written)]  # fmt: skip
        tensors = [*tensors_in(given), *made]
        return Seen(
            light=n.op in ("call_function", "call_method") and called.light and bool(made) and _is_plain(tensors),
            work=called.work,
            base=bases[0] if bases else n,
            grad=any(t.requires_grad for t in made),
            writes=[owners[storage_key(t)] for t in written],
            draws=called.draws,
            types=frozenset(t.dtype for t in tensors),
            several=isinstance(result, (tuple, list)),
            argument=form_of(result) if isinstance(result, (torch.Tensor, int, float)) and _is_plain(made) else None,
            mode=current_mode(),
            switches=n.op == "call_function" and not tensors and not isinstance(result, (int, float, tuple, list)),
        )


def _is_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors are such as Inductor has kernels for, on one device."""
    return len({t.device for t in tensors}) <= 1 and all(
        type(t) in (torch.Tensor, torch.nn.Parameter)
        and t.layout == torch.strided
        and not (t.is_complex() or t.is_neg())
        for t in tensors
    )


class _Operators(TorchDispatchMode):
    """Notes what is called below autograd. ``light``: whether all of it is; ``work``: operators that make memory;
    ``written``: the memory that is written to, as under a mode ``torch._foreach_add_`` and its like count no versions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.light, self.work, self.draws = True, 0, False
        self.written: set[int] = set()
        self._made: set[int] = set()  # memory that was not there before the node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        given_by_name = named(func, args, kwargs or {})
        changed = [given_by_name.get(name) for _, name in written_arguments(func)]
        self.written |= {storage_key(t) for t in tensors_in(changed) if has_memory(t)}
        if not func.is_view:
            given = {storage_key(t) for t in tensors_in((args, kwargs)) if has_memory(t)}
            self.work += not all(has_memory(t) and storage_key(t) in given for t in tensors_in(result))
            self.light &= _is_lowered(func) and not _selects(func, (args, kwargs), result)
            statistics = _statistics(func, args)
            self.light &= statistics is None or storage_key(statistics) in self._made
            self._made.update({storage_key(t) for t in tensors_in(result) if has_memory(t)} - given)
        return result


@cache
def _is_lowered(func: Any) -> bool:
    """Whether Inductor makes kernels of its own for the operator: it calls no library (matrix products, convolutions
    and attention, which torch counts operations of), falls back to no kernel of eager mode, and draws nothing.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import fallbacks, lowerings
    from torch.utils.flop_counter import flop_registry

    if torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket in flop_registry:
        return False
    return func in select_decomp_table() or (func in lowerings and func not in fallbacks)


def _statistics(func: Any, args: Sequence[Any]) -> torch.Tensor | None:
    """The running mean that the operator changes, which no version counter shows: a batch norm in training."""
    given = {x.name: a for x, a in zip(func._schema.arguments, args, strict=False)}
    mean: torch.Tensor | None = given.get("running_mean")
    return mean if given.get("training", given.get("train")) else None


def _selects(func: Any, given: Any, result: Any) -> bool:
    """Whether the operator takes numbers from places that integers say, or says places (embedding, gather, sort): the
    backward adds up at places, in an order that is not fixed on a GPU.
    """
    if torch.Tag.pointwise in func.tags:
        return False
    tensors = [*tensors_in(given), *tensors_in(result)]
    whole = any(not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool for t in tensors)
    return whole and any(t.is_floating_point() for t in tensors)
